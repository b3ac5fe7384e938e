"""BART and its relatives: the forward pass of an encoder and a decoder with cross-attention.

mBART, Marian, M2M-100 and NLLB are this model with other norms and positions.
Source: Lewis et al. 2019, arXiv:1910.13461; Liu et al. 2020, arXiv:2001.08210 (mBART); Junczys-Dowmunt et al. 2018,
arXiv:1804.00344 (Marian); Fan et al. 2020, arXiv:2010.11125 (M2M-100); tensor names as Hugging Face transformers
saves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.models.blocks.output import record_output
from varlen.models.blocks.residual import ResidualStream
from varlen.models.blocks.seq2seq_layers import DecoderLayer, EncoderLayer
from varlen.models.checkpoint.layers import Linear, Norm, TokenTable
from varlen.program.heads import AttentionHeads

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention, CrossAttention
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

# Epsilon of all norms, which config.json does not name.
_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class BartEmbedding:
    """The embedding of tokens and positions.

    Attributes:
        position_table: `[positions, hidden]`.
        scale: multiplies the embeddings of tokens.
    """

    token_table: TokenTable
    position_table: Tensor
    scale: float
    norm: Norm | None

    def record(self, ops: Recorder) -> Value:
        """Record the embeddings of a batch, `[tokens, hidden]`."""
        tokens, positions = inputs.token_ids(ops), inputs.position_ids(ops)
        x = self.token_table.record(ops, tokens, positions, self.position_table, scale=self.scale)
        if self.norm is None:
            return x
        return ops.layer_norm(x, self.norm.weight, self.norm.bias, eps=_NORM_EPS)


@dataclass(frozen=True, slots=True)
class Bart:
    """A BART or a relative in one dtype.

    Attributes:
        source_embedding, target_embedding: embeddings of the encoder and the decoder.
        encoder_norm, decoder_norm: norms after the last layer, if norms are before sublayers.
        attention_heads: heads of the decoder's layers, in both kinds of attention.
    """

    source_embedding: BartEmbedding
    encoder_layers: tuple[EncoderLayer, ...]
    encoder_norm: Norm | None
    encoder_heads: AttentionHeads
    target_embedding: BartEmbedding
    layers: tuple[DecoderLayer, ...]
    decoder_norm: Norm | None
    attention_heads: AttentionHeads
    output: Linear

    @property
    def token_table(self) -> TokenTable:
        return self.target_embedding.token_table

    def record_encoder(self, ops: Recorder, cross: CrossAttention) -> None:
        heads = self.encoder_heads
        stream = _stream(ops, self.source_embedding, self.encoder_layers, self.encoder_norm)
        for layer in self.encoder_layers:
            context = ops.attention_varlen(
                layer.attention.qkv.record(ops, stream.x),
                inputs.cu_seqlens(ops),
                heads,
                scale=heads.dim**-0.5,
            )
            stream.add(layer.attention.output.record(ops, context))
            stream.add(layer.mlp.record(ops, stream.x))
        for number, decoder_layer in enumerate(self.layers):
            kv = decoder_layer.source.kv.record(ops, stream.x)
            cross.store(ops, number, kv, self.attention_heads)

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        heads = self.attention_heads
        stream = _stream(ops, self.target_embedding, self.layers, self.decoder_norm)
        for number, layer in enumerate(self.layers):
            qkv = layer.attention.qkv.record(ops, stream.x)
            context = attention.record(ops, number, qkv, heads)
            stream.add(layer.attention.output.record(ops, context))
            queries = layer.source.query.record(ops, stream.x)
            context = cross.attend(ops, number, queries, heads, scale=heads.dim**-0.5)
            stream.add(layer.source.output.record(ops, context))
            stream.add(layer.mlp.record(ops, stream.x))
        return stream.x

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        return record_output(ops, self.output, hidden, self.token_table.vocab_size)


def _stream(
    ops: Recorder,
    embedding: BartEmbedding,
    layers: tuple[EncoderLayer, ...] | tuple[DecoderLayer, ...],
    last_norm: Norm | None,
) -> ResidualStream:
    norms = chain.from_iterable(layer.norms for layer in layers)
    if last_norm is None:
        return ResidualStream(ops, embedding.record(ops), norms, is_pre_norm=False, eps=_NORM_EPS)
    return ResidualStream(
        ops, embedding.record(ops), chain(norms, [last_norm]), is_pre_norm=True, eps=_NORM_EPS
    )
