"""T5 and mT5: the forward pass, with relative positions and RMS norms.

Source: Raffel et al. 2019, arXiv:1910.10683; Shazeer 2020, arXiv:2002.05202 (gates of T5 1.1); Xue et al. 2020,
arXiv:2010.11934 (mT5); tensor names as Hugging Face transformers saves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.models.blocks.heads import Heads
from varlen.models.blocks.output import record_output
from varlen.models.blocks.residual import RmsResidualStream
from varlen.models.blocks.seq2seq_layers import DecoderLayer, EncoderLayer
from varlen.models.checkpoint.layers import Linear, Norm, TokenTable
from varlen.program.heads import AttentionHeads

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention, CrossAttention
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder


@dataclass(frozen=True, slots=True)
class T5Encoder:
    """The encoder of a T5 or mT5 in one dtype.

    Attributes:
        bias: `[heads, distances]` fp32, added to scores of all layers; see `bias_by_distance`.
        norm: norm after the last layer.
    """

    token_table: TokenTable
    layers: tuple[EncoderLayer, ...]
    bias: Tensor
    norm: Norm
    attention_heads: AttentionHeads
    norm_eps: float
    heads: Heads = Heads()
    type_vocab_size: int = 1

    def record(self, ops: Recorder) -> Value:
        stream = _residual_stream(ops, self.token_table, self.layers, self.norm, eps=self.norm_eps)
        for layer in self.layers:
            context = ops.attention_varlen(
                layer.attention.qkv.record(ops, stream.x),
                inputs.cu_seqlens(ops),
                self.attention_heads,
                scale=1.0,
                bias=self.bias,
            )
            stream.add(layer.attention.output.record(ops, context))
            stream.add(layer.mlp.record(ops, stream.x))
        return stream.x


@dataclass(frozen=True, slots=True)
class T5:
    """A T5 or mT5 in one dtype.

    Attributes:
        decoder_bias: `[heads, distances]` fp32, added to scores of all layers; see `bias_by_distance`.
        decoder_norm: decoder norm after the last layer; includes the scale before the output layer.
        output: `[hidden, vocabulary]`.
    """

    encoder: T5Encoder
    token_table: TokenTable
    layers: tuple[DecoderLayer, ...]
    decoder_bias: Tensor
    decoder_norm: Norm
    output: Linear
    attention_heads: AttentionHeads
    norm_eps: float

    def record_encoder(self, ops: Recorder, cross: CrossAttention) -> None:
        hidden = self.encoder.record(ops)
        for number, layer in enumerate(self.layers):
            cross.store(ops, number, layer.source.kv.record(ops, hidden), self.attention_heads)

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        heads, layers = self.attention_heads, self.layers
        stream = _residual_stream(
            ops, self.token_table, layers, self.decoder_norm, eps=self.norm_eps
        )
        for number, layer in enumerate(layers):
            qkv = layer.attention.qkv.record(ops, stream.x)
            context = attention.record(ops, number, qkv, heads, scale=1.0, bias=self.decoder_bias)
            stream.add(layer.attention.output.record(ops, context))
            queries = layer.source.query.record(ops, stream.x)
            context = cross.attend(ops, number, queries, heads, scale=1.0)
            stream.add(layer.source.output.record(ops, context))
            stream.add(layer.mlp.record(ops, stream.x))
        return stream.x

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        return record_output(ops, self.output, hidden, self.token_table.vocab_size)


def _residual_stream(
    ops: Recorder,
    table: TokenTable,
    layers: Sequence[EncoderLayer] | Sequence[DecoderLayer],
    last_norm: Norm,
    *,
    eps: float,
) -> RmsResidualStream:
    norms = chain.from_iterable(layer.norms for layer in layers)
    embedded = table.record(ops, inputs.token_ids(ops))
    return RmsResidualStream(ops, embedded, chain(norms, [last_norm]), eps=eps)
