"""Transformers for inputs of every length: packed batches, in process or behind Triton Inference Server."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varlen.in_process.encoder import Encoder
    from varlen.in_process.generator import Generator

__all__ = ["Encoder", "Generator"]


def __getattr__(name: str) -> object:
    # lazy: the server imports this package in processes that must not pay for torch
    if name == "Encoder":
        from varlen.in_process.encoder import Encoder

        return Encoder
    if name == "Generator":
        from varlen.in_process.generator import Generator

        return Generator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
