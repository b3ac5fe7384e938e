"""What `Encoder` and `Generator` share: settings by name, and the end of the model."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, TypedDict

from varlen.config import NO_LIMIT, Device, DType, EngineConfig

if TYPE_CHECKING:
    from typing_extensions import Self

    from varlen.service.service import Service

# The caller's own memory and clock are the limits; nothing is measured at load.
_DEFAULTS = {
    "max_queued_requests": NO_LIMIT,
    "max_queued_tokens": NO_LIMIT,
    "max_text_bytes": NO_LIMIT,
    "warmup_seconds": 0,
}


class ModelSettings(TypedDict, total=False):
    """Settings of any model; docs/reference/configuration.md describes them."""

    device: Device
    dtype: DType
    threads: int
    ignore_config_fields: str
    adapter: str
    adapters: str
    adapter_bytes: int | str
    max_sequence_tokens: int | None


def config_of(settings: Mapping[str, object], kind: type[ModelSettings]) -> EngineConfig:
    """Return the settings of a model in process.

    Args:
        settings: values by name; others have the default of `EngineConfig`.

    Raises:
        TypeError: there is no setting of some name.
        ConfigError: a setting is out of range.
    """
    for name in settings.keys() - kind.__annotations__.keys():
        raise TypeError(f"from_pretrained() got an unexpected keyword argument '{name}'")
    return EngineConfig(**{**_DEFAULTS, **settings})  # type: ignore[arg-type]  # __post_init__ checks every value


class InProcess:
    """A loaded model, which `close` or the end of a `with` block stops."""

    _adapter = ""

    def __init__(self, service: Service[Any]) -> None:
        self._service = service

    def with_adapter(self, name: str) -> Self:
        """Return the same model with an adapter; sequences of both share batches.

        A name that the model does not have is refused by its methods.

        Args:
            name: name of the adapter; empty for none.
        """
        other = copy(self)
        other._adapter = name
        return other

    def close(self) -> None:
        """Finish what runs and stop the engine."""
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
