"""Fields of config.json: those a family declares; which others are ignored or refused.

Each is declared once: its name, what it may be, and its default. A family's configuration is a frozen dataclass of
them, read field by field, in their order. See docs/decisions/0014-config-fields.md.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from varlen.errors import CheckpointError
from varlen.models.checkpoint import generation_config
from varlen.models.checkpoint.files import (
    ACTIVATIONS,
    HARMLESS_FIELDS,
    Json,
    check_fields,
    is_off,
    read_choice,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
)
from varlen.models.checkpoint.quantization import FIELDS

_T = TypeVar("_T")
_Config = TypeVar("_Config", bound="ConfigFields")

# Written by .ci/write_config_fields.py from the sources of the releases.
FIELDS_FILE = Path(__file__).with_name("fields_of_transformers.json")
# Fields that may change results although the releases above do not read them: earlier ones did.
_REFUSED_FIELDS = frozenset({"position_embedding_type"})
_FILE = "config.json"
# The end of a refusal that the owner of a checkpoint can override.
REMEDY = " (the setting ignore_config_fields leaves it out)"
_HIDDEN_SIZES = ("hidden_size", "d_model", "n_embd", "dim")
# Fields that say that weights are quantized; the last one is of MLX.
_QUANTIZATION_FIELDS = (*FIELDS, "quantization")


@dataclass(frozen=True, slots=True)
class FieldRules:
    """The fields of config.json that a family knows.

    Attributes:
        harmless: fields that transformers reads, and that change no logit and no hidden state.
        fixed: fields that are served with one value; null means that value too.
    """

    read: frozenset[str]
    harmless: frozenset[str]
    fixed: Mapping[str, object]

    def know(self, name: str) -> bool:
        """Return whether a field is read, or changes no result, whatever its value is."""
        return name in self.read or name in self.harmless or is_dropout(name)

    def plus(
        self,
        read: Iterable[str] = (),
        harmless: Iterable[str] = (),
        fixed: Mapping[str, object] | None = None,
    ) -> "FieldRules":
        """Return these rules with more fields; what is fixed is neither read nor harmless."""
        fixed = fixed or {}
        return FieldRules(
            self.read.union(read) - fixed.keys(),
            self.harmless.union(harmless) - fixed.keys(),
            {**self.fixed, **fixed},
        )


_READ = frozenset(("architectures", "model_type"))

# Releases of transformers before 5 save the defaults of generation in every config.json; an encoder generates nothing.
ENCODER = FieldRules(
    _READ | {"id2label", "num_labels"}, HARMLESS_FIELDS | generation_config.ALL_FIELDS, {}
)
# See docs/decisions/0017-decoder-checkpoints.md. Releases before 5 also kept the fields of generation_config.json here.
DECODER = FieldRules(
    _READ | {"is_causal"},
    HARMLESS_FIELDS
    | generation_config.REQUEST_FIELDS
    | generation_config.HARMLESS_FIELDS
    # a decoder is one either way; only a classifier reads labels
    | {"id2label", "is_decoder", "num_labels", "prefix"},
    {
        **generation_config.FIXED_FIELDS,
        "add_cross_attention": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
    },
)
# Fields of generation are read where there is no generation_config.json; see `generation_config`.
ENCODER_DECODER = FieldRules(
    _READ,
    HARMLESS_FIELDS | generation_config.TRANSLATE_FIELDS | {"prefix"},
    {
        "add_cross_attention": False,
        "is_decoder": False,
        "is_encoder_decoder": True,
        "pruned_heads": {},
    },
)


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """Fields of a config.json that a load leaves out.

    Attributes:
        unread: fields that no release of transformers reads.
        by_setting: fields that the setting `ignore_config_fields` names.
    """

    unread: tuple[str, ...]
    by_setting: tuple[str, ...]

    def note(self) -> str:
        """Return a sentence about them, empty if there are none."""
        if not self.unread and not self.by_setting:
            return ""
        first, last = (release.rpartition(".")[0] for release in (releases()[0], releases()[-1]))
        reasons = (
            (self.unread, f"read by no release of transformers from {first} to {last}"),
            (self.by_setting, "named by ignore_config_fields"),
        )
        parts = [f"{', '.join(names)} ({reason})" for names, reason in reasons if names]
        return f"fields of {_FILE} that are ignored: {'; '.join(parts)}"


def check_unquantized(config: Json) -> None:
    """Raise CheckpointError if config.json says that the weights are quantized."""
    for name in _QUANTIZATION_FIELDS:
        if not is_off(config.get(name)):
            raise CheckpointError(
                f"{_FILE} has {name}, which is not served, and ignore_config_fields cannot make floats of"
                " quantized weights: take the checkpoint that they were made of"
            )


def check_known(config: Json, rules: FieldRules) -> None:
    """Raise CheckpointError for a field of config.json that would change results and is not served."""
    if not is_off(config.get("auto_map")):
        raise CheckpointError(
            f"{_FILE} has auto_map, which names code of the checkpoint; such code never runs, and another model may"
            f" need it{REMEDY}"
        )
    known = [
        name
        for name, value in config.items()
        if rules.know(name) or _is_hidden_size(name, value, config)
    ]
    check_fields(config, _FILE, known=known, fixed=rules.fixed, remedy=REMEDY)


def unread_fields(config: Json, rules: FieldRules) -> tuple[str, ...]:
    """Return the fields of config.json that neither varlen nor a listed release of transformers reads."""
    checked = {*rules.fixed, *_QUANTIZATION_FIELDS}
    return tuple(
        name
        for name, value in config.items()
        if not (rules.know(name) or name in checked or is_off(value))
        and is_unread(name, config["model_type"])
    )


def is_dropout(name: str) -> bool:
    """Return whether a field sets dropout, which only training applies."""
    return "dropout" in name or name.endswith(("pdrop", "layerdrop"))


def _is_hidden_size(name: str, value: object, config: Json) -> bool:
    """Return whether a field says that embeddings have the width of layers."""
    return name == "embedding_size" and value in [config.get(each) for each in _HIDDEN_SIZES]


def without(config: Json, names: Collection[str]) -> Json:
    """Return a config.json without some fields."""
    return {name: value for name, value in config.items() if name not in names}


def check_ignored(names: Collection[str], rules: FieldRules) -> None:
    """Raise CheckpointError if `ignore_config_fields` names a field that no load refuses as such."""
    for name in names:
        if rules.know(name):
            raise CheckpointError(
                f"ignore_config_fields names {name}, which varlen knows: correct it in {_FILE}, or leave it out of the"
                " setting"
            )


def is_unread(field: str, model_type: str) -> bool:
    """Return whether no listed release reads a field for this `model_type`."""
    return field not in fields_read("shared") | fields_read(model_type) | _REFUSED_FIELDS


def releases() -> list[str]:
    """Return the listed releases of transformers, oldest first."""
    return " ".join(_content()["releases"]).split()


@cache
def fields_read(family: str) -> frozenset[str]:
    """Return the fields read for a `model_type`, or for every one (`shared`)."""
    return frozenset(" ".join(_content()[family]).split())


@cache
def _content() -> dict[str, list[str]]:
    content: dict[str, list[str]] = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    return content


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


def size(name: str, default: int | None = None) -> int:
    """Declare a whole number from 1."""
    return computed(lambda config: read_int(config, name, default=default), name)


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
