"""The forward pass of DeBERTa over packed tokens.

Post-norm layers whose scores have products with distances ("disentangled attention"): of a query with the key of its
distance to a token, and of the token's key with the query of that distance. Keys and queries of distances are
projections of learned embeddings, so they are computed when the model is loaded.
Large ones of version 2 also have a convolution beside their first layer.
Source: He et al. 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543; names as Hugging Face
transformers saves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.models.blocks.heads import HeadActivation, Heads
from varlen.models.checkpoint.layers import Linear, Norm, TokenTable
from varlen.program.heads import AttentionHeads
from varlen_kernels import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.program.program import Value
    from varlen.program.recorder import Recorder
    from varlen_kernels.reference.attention import Distances


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over the tokens of a sequence, which reads what the first layer reads.

    Attributes:
        linear: `[size * hidden, hidden]`, the weights of a window's rows one after another.
        size: tokens of a window.
        activation: applied to its output, which is added to the output of the first layer.
    """

    linear: Linear
    size: int
    activation: HeadActivation
    norm: Norm

    def record(self, ops: Recorder, x: Value, output: Value, *, eps: float) -> Value:
        """Record it over `x` and the norm of its sum with `output`, `[tokens, hidden]`."""
        windows = ops.window_rows(x, inputs.cu_seqlens(ops), size=self.size)
        if self.activation == "tanh":
            y = ops.tanh(self.linear.record(ops, windows))
        else:
            y = self.linear.record_activated(ops, windows, self.activation)
        return ops.add_layer_norm(y, output, self.norm.weight, self.norm.bias, eps=eps)


@dataclass(frozen=True, slots=True)
class DebertaLayer:
    """One layer; queries, keys and values are side by side."""

    qkv: Linear
    distances: Distances | None
    attention_output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class Deberta:
    """A DeBERTa in one dtype.

    Attributes:
        position_table: `[positions, features]`.
        projection: projection from the features of the tables to the features of the layers, if there is one.
        convolution: beside the first layer, if there is one.
        scale: multiplies the scores.
    """

    token_table: TokenTable
    position_table: Tensor | None
    projection: Linear | None
    embedding_norm: Norm
    layers: tuple[DebertaLayer, ...]
    convolution: Convolution | None
    attention_heads: AttentionHeads
    activation: Activation
    norm_eps: float
    scale: float
    heads: Heads
    type_vocab_size: int = 1

    def record(self, ops: Recorder) -> Value:
        positions = None if self.position_table is None else inputs.position_ids(ops)
        x = self.token_table.record(ops, inputs.token_ids(ops), positions, self.position_table)
        if self.projection is not None:
            x = self.projection.record(ops, x)
        norm = self.embedding_norm
        x = ops.layer_norm(x, norm.weight, norm.bias, eps=self.norm_eps)
        ops.layer_output(x)
        for index, layer in enumerate(self.layers):
            before, x = x, self._record_layer(ops, layer, x)
            if self.convolution is not None and index == 0:
                x = self.convolution.record(ops, before, x, eps=self.norm_eps)
            ops.layer_output(x)
        return x

    def _record_layer(self, ops: Recorder, layer: DebertaLayer, x: Value) -> Value:
        context = ops.attention_varlen(
            layer.qkv.record(ops, x),
            inputs.cu_seqlens(ops),
            self.attention_heads,
            distances=layer.distances,
            scale=self.scale,
        )
        x = self._add_norm(
            ops, layer.attention_output.record(ops, context), x, layer.attention_norm
        )
        inner = layer.up.record_activated(ops, x, self.activation)
        return self._add_norm(ops, layer.down.record(ops, inner), x, layer.output_norm)

    def _add_norm(self, ops: Recorder, x: Value, residual: Value, norm: Norm) -> Value:
        return ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=self.norm_eps)
