"""Feed-forward parts of a layer, experts, and all parts of encoder-decoder models.

Source: Shazeer 2020, arXiv:2002.05202 (gates); Shazeer et al. 2017, arXiv:1701.06538 (experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from varlen.models.blocks.attention import Attention, CrossAttention
    from varlen.models.checkpoint.layers import GroupLinear, Linear, Norm
    from varlen.program.program import Value
    from varlen.program.rank import AttentionHeads
    from varlen.program.recorder import Recorder
    from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Two linear layers with an activation between them.

    Attributes:
        up: the layer in front of the activation; gate and up side by side, if `is_gated`.
    """

    up: Linear
    down: Linear
    is_gated: bool = True

    def record(self, ops: Recorder, x: Value, activation: Activation) -> Value:
        """Record the result for each token, `[tokens, hidden]`."""
        if self.is_gated:
            inner = ops.activate_gate(self.up.record(ops, x), kind=activation)
        else:
            inner = self.up.record_activated(ops, x, activation)
        return self.down.record(ops, inner)


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts: each token sums the results of a few, by weight.

    Attributes:
        router: a logit of each expert, in fp32: a rounded one may choose another expert.
        up: the layer in front of the activation; gate and up side by side, if `is_gated`.
        count: experts of a token.
        normalizes: whether the weights of a token's experts add up to 1; else each is its part of the softmax over all.
    """

    router: Linear
    up: GroupLinear
    down: GroupLinear
    count: int
    normalizes: bool
    is_gated: bool
    bias: Tensor | None = None

    def record(self, ops: Recorder, x: Value, activation: Activation) -> Value:
        """Record the sum of its experts for each token, `[tokens, hidden]`."""
        import torch

        rows = x if x.dtype == torch.float32 else ops.to_fp32(x)
        logits = self.router.record(ops, rows)
        routes = ops.route_tokens(logits, count=self.count, normalize=self.normalizes)
        inner = self.up.record(ops, ops.select_rows(x, routes.tokens), routes.cu_groups)
        activate = ops.activate_gate if self.is_gated else ops.activate
        inner = activate(inner, kind=activation)
        given = self.down.record(ops, inner, routes.cu_groups)
        total = ops.sum_experts(given, routes.weights, routes.places, self.bias)
        return ops.all_reduce(total) if self.down.is_partial else total


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
class NormedFeedForward:
    """The feed-forward part of an encoder-decoder's layer, and its norm."""

    part: FeedForward
    norm: Norm
    activation: Activation

    def record(self, ops: Recorder, x: Value) -> Value:
        return self.part.record(ops, x, self.activation)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer of the encoder."""

    attention: SelfAttention
    mlp: NormedFeedForward

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self.attention.norm, self.mlp.norm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of the decoder."""

    attention: SelfAttention
    source: SourceAttention
    mlp: NormedFeedForward

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


def record_encoder_layers(
    ops: Recorder,
    stream: ResidualStream | RmsResidualStream,
    layers: Sequence[EncoderLayer],
    heads: AttentionHeads,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Value:
    """Record the layers of an encoder and return their result, `[tokens, hidden]`."""
    for layer in layers:
        context = ops.attention_varlen(
            layer.attention.qkv.record(ops, stream.x),
            inputs.cu_seqlens(ops),
            heads,
            scale=scale,
            bias=bias,
        )
        stream.add(layer.attention.output.record(ops, context))
        stream.add(layer.mlp.record(ops, stream.x))
    return stream.x


def store_source(
    ops: Recorder,
    cross: CrossAttention,
    hidden: Value,
    layers: Sequence[DecoderLayer],
    heads: AttentionHeads,
) -> None:
    """Record storing the keys and values of sources for each layer of a decoder."""
    for number, layer in enumerate(layers):
        cross.store(ops, number, layer.source.kv.record(ops, hidden), heads)


def record_decoder_layers(
    ops: Recorder,
    stream: ResidualStream | RmsResidualStream,
    layers: Sequence[DecoderLayer],
    heads: AttentionHeads,
    attention: Attention,
    cross: CrossAttention,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Value:
    """Record the layers of a decoder and return their result, `[tokens, hidden]`."""
    for number, layer in enumerate(layers):
        qkv = layer.attention.qkv.record(ops, stream.x)
        context = attention.record(ops, number, qkv, heads, scale=scale, bias=bias)
        stream.add(layer.attention.output.record(ops, context))
        queries = layer.source.query.record(ops, stream.x)
        context = cross.attend(ops, number, queries, heads, scale=scale)
        stream.add(layer.source.output.record(ops, context))
        stream.add(layer.mlp.record(ops, stream.x))
    return stream.x
