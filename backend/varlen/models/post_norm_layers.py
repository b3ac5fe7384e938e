"""The forward pass of post-norm encoders, BERT and its relatives, over packed tokens.

Source: Devlin et al. 2018, arXiv:1810.04805 (post-norm layers of Vaswani et al. 2017, arXiv:1706.03762); the file of
each family names its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.program.rank import ALONE

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.feed_forward import Experts, FeedForward
    from varlen.models.blocks.heads import Heads
    from varlen.models.checkpoint.layers import Linear, Norm, TokenTable
    from varlen.program.heads import AttentionHeads
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder
    from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """Queries and keys that are normalized over the features of all heads, and values."""

    query: Linear
    key: Linear
    value: Linear
    query_norm: Norm
    key_norm: Norm
    eps: float

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record queries, keys and values side by side, `[tokens, 3 * hidden]`."""
        queries, keys = (
            ops.layer_norm(layer.record(ops, x), norm.weight, norm.bias, eps=self.eps)
            for layer, norm in ((self.query, self.query_norm), (self.key, self.key_norm))
        )
        return ops.concat(ops.concat(queries, keys), self.value.record(ops, x))


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """One transformer layer; queries, keys and values are side by side.

    Attributes:
        second_norm: norm of the sum of the attention's normalized output and its input again, if there is one.
    """

    qkv: Linear | NormedHeads
    attention_output: Linear
    attention_norm: Norm
    second_norm: Norm | None
    mlp: FeedForward | Experts
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class PostNormEncoder:
    """An encoder in one dtype.

    Attributes:
        position_table, type_table: `[rows, features]`; position 0 is the first row. A family without token types has
            one type, of zeros; a family with other positions has no position table.
        cos_sin: `[positions, head features]` fp32, rotary positions.
        layers: a shared layer occurs several times.
        distance_bias: `[heads, distances]` fp32, added to the scores of all layers; see `bias_by_distance`.
    """

    token_table: TokenTable
    position_table: Tensor | None
    cos_sin: Tensor | None
    type_table: Tensor
    embedding_norm: Norm
    projection: Linear | None
    layers: tuple[PostNormLayer, ...]
    attention_heads: AttentionHeads
    distance_bias: Tensor | None
    activation: Activation
    norm_eps: float
    heads: Heads

    @property
    def type_vocab_size(self) -> int:
        return self.type_table.shape[0]

    def record(self, ops: Recorder) -> Value:
        types = inputs.type_ids(ops)
        if self.position_table is None:
            # what is added for a position is what is added for the type, which leaves nothing for the type
            no_types = self.type_table.new_zeros(self.type_table.shape)
            second, tables = types, (self.type_table, no_types)
        else:
            second, tables = inputs.position_ids(ops), (self.position_table, self.type_table)
        x = self._record_embedding(ops, second, types, tables)
        if self.projection is not None:
            x = self.projection.record(ops, x)
        ops.layer_output(x)
        for layer in self.layers:
            x = self._record_layer(ops, layer, x)
            ops.layer_output(x)
        return x

    def _record_embedding(
        self, ops: Recorder, second: Value, types: Value, tables: tuple[Tensor, Tensor]
    ) -> Value:
        norm, token_ids = self.embedding_norm, inputs.token_ids(ops)
        if self.token_table.rank != ALONE:
            others = ops.embed(second, tables[0], types, tables[1])
            tokens = self.token_table.record(ops, token_ids)
            return self._add_norm(ops, tokens, others, norm)
        operands = (token_ids, second, types, self.token_table.weight, *tables)
        return ops.embed_layer_norm(*operands, norm.weight, norm.bias, eps=self.norm_eps)

    def _record_layer(self, ops: Recorder, layer: PostNormLayer, x: Value) -> Value:
        qkv = layer.qkv.record(ops, x)
        if self.cos_sin is not None:
            qkv = ops.rotary(qkv, inputs.position_ids(ops), self.cos_sin, self.attention_heads)
        context = ops.attention_varlen(
            qkv,
            inputs.cu_seqlens(ops),
            self.attention_heads,
            self.distance_bias,
            scale=self.attention_heads.dim**-0.5,
        )
        attended = layer.attention_output.record(ops, context)
        before, x = x, self._add_norm(ops, attended, x, layer.attention_norm)
        if layer.second_norm is not None:
            x = self._add_norm(ops, x, before, layer.second_norm)
        given = layer.mlp.record(ops, x, self.activation)
        return self._add_norm(ops, given, x, layer.output_norm)

    def _add_norm(self, ops: Recorder, x: Value, residual: Value, norm: Norm) -> Value:
        return ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=self.norm_eps)
