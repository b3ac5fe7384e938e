"""Fields of config.json, each declared once: its name, what it may be, and its default.

A family's configuration is a frozen dataclass of them. It is read field by field, in their order.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

from varlen.models.checkpoint.config_file import (
    ACTIVATIONS,
    Json,
    read_choice,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
)

_T = TypeVar("_T")
_Config = TypeVar("_Config", bound="ConfigFields")


class ConfigFields:
    """What config.json says of a model: a frozen dataclass of declared fields.

    See `ModelSizes` for those that every family declares.
    """

    hidden: int
    positions: int

    @property
    def uncounted_token(self) -> int | None:
        return None

    @classmethod
    def names(cls) -> frozenset[str]:
        return frozenset(name for each in fields(cls) for name in each.metadata["names"])  # type: ignore[arg-type]  # of a dataclass

    @classmethod
    def read(cls: type[_Config], config: Json) -> _Config:
        """Return the fields; raise CheckpointError for a configuration that is not served."""
        return cls(**{each.name: each.metadata["read"](config) for each in fields(cls)})  # type: ignore[arg-type]  # of a dataclass


def computed(read: Callable[[Json], _T], *names: str) -> _T:
    """Declare what a function makes of config.json.

    Args:
        read: the function; raises CheckpointError for what is not served.
        names: fields that it reads, unless they are declared already.
    """
    declared: Any = field(metadata={"read": read, "names": names})
    return declared  # type: ignore[no-any-return]


def size(name: str) -> int:
    """Declare a whole number from 1."""
    return computed(lambda config: read_int(config, name), name)


def layers(name: str, *, lowest: int = 1) -> int:
    """Declare a number of layers."""
    return computed(lambda config: read_layers(config, name, lowest=lowest), name)


def flag(name: str, *, default: bool = False) -> bool:
    """Declare a boolean."""
    return computed(lambda config: read_flag(config, name, default=default), name)


def choice(name: str, choices: Mapping[str, _T], default: str) -> _T:
    """Declare one of several words, each with its meaning."""
    return computed(lambda config: read_choice(config, name, choices, default=default), name)


def activation(name: str, default: str = "gelu") -> Any:
    """Declare an activation, by transformers' name."""
    return choice(name, ACTIVATIONS, default)


def epsilon(name: str, default: float) -> float:
    """Declare the epsilon of norms."""
    return computed(lambda config: read_norm_eps(config, name, default=default), name)
