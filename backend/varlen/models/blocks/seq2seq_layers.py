"""The layers of encoder-decoder models, and the residual sums and norms between their parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.checkpoint.layers import Linear, Norm
from varlen_kernels import Activation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from varlen.models.checkpoint.layers import Norm
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


class ResidualStream:
    """Records the residual sums and layer norms between sublayers.

    Attributes:
        x: input of the next sublayer, `[tokens, hidden]`; after the last one, the result of the stack.
    """

    def __init__(
        self,
        ops: Recorder,
        embedded: Value,
        norms: Iterable[Norm],
        *,
        is_pre_norm: bool,
        eps: float,
    ) -> None:
        """Begin with embedded tokens.

        Args:
            embedded: `[tokens, hidden]`.
            norms: norms of each sublayer, in their order; with `is_pre_norm` also the one after the last sublayer.
            is_pre_norm: whether a sublayer reads the norm of the sum, and not the sum of norms.
            eps: added to variances.
        """
        self._ops = ops
        self._norms = iter(norms)
        self._is_pre_norm = is_pre_norm
        self._eps = eps
        self._residual = self.x = embedded
        if is_pre_norm:
            norm = next(self._norms)
            self.x = ops.layer_norm(embedded, norm.weight, norm.bias, eps=eps)

    def add(self, y: Value) -> None:
        """Record the sum with the output of a sublayer, `[tokens, hidden]`, and its norm."""
        norm, eps = next(self._norms), self._eps
        if self._is_pre_norm:
            self._residual, self.x = self._ops.residual_layer_norm(
                y, self._residual, norm.weight, norm.bias, eps=eps
            )
        else:
            self.x = self._ops.add_layer_norm(y, self.x, norm.weight, norm.bias, eps=eps)


class RmsResidualStream:
    """Records the residual sums and RMS norms between sublayers, with norms before them.

    Attributes:
        x: input of the next sublayer, `[tokens, hidden]`; after the last one, the result of the stack.
    """

    def __init__(
        self, ops: Recorder, embedded: Value, norms: Iterable[Norm], *, eps: float
    ) -> None:
        """Begin with embedded tokens.

        Args:
            embedded: `[tokens, hidden]`.
            norms: norms before each sublayer, in their order, and after the last one.
            eps: added to mean squares.
        """
        self._ops = ops
        self._norms = iter(norms)
        self._eps = eps
        self._residual = embedded
        self.x = ops.rms_norm(embedded, next(self._norms).weight, eps=eps)

    def add(self, y: Value) -> None:
        weight = next(self._norms).weight
        self._residual, self.x = self._ops.residual_rms_norm(
            y, self._residual, weight, eps=self._eps
        )
