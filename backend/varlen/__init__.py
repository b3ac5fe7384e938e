"""Transformers for inputs of every length: packed batches, in process or behind Triton Inference Server."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varlen.encoder import Encoder

__all__ = ["Encoder"]


def __getattr__(name: str) -> object:
    # lazy: the server imports this package in processes that must not pay for torch
    if name == "Encoder":
        from varlen.encoder import Encoder

        return Encoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
