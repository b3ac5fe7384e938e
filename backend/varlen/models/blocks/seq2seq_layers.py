"""The layers of encoder-decoder models: what each part reads of a checkpoint, and its norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.checkpoint.layers import Linear, Norm
from varlen_kernels import Activation

if TYPE_CHECKING:
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Attention inside a sequence; query, key and value are one matrix, side by side."""

    qkv: Linear
    output: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class SourceAttention:
    """Attention to a source; key and value are one matrix, side by side."""

    query: Linear
    kv: Linear
    output: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The feed-forward part of a layer; gate and up are one matrix."""

    up: Linear
    down: Linear
    norm: Norm
    activation: Activation
    is_gated: bool = False

    def record(self, ops: Recorder, x: Value) -> Value:
        if self.is_gated:
            inner = ops.activate_gate(self.up.record(ops, x), kind=self.activation)
        else:
            inner = self.up.record_activated(ops, x, self.activation)
        return self.down.record(ops, inner)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer of the encoder."""

    attention: SelfAttention
    mlp: FeedForward

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self.attention.norm, self.mlp.norm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of the decoder."""

    attention: SelfAttention
    source: SourceAttention
    mlp: FeedForward

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self.attention.norm, self.source.norm, self.mlp.norm
