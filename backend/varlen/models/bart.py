"""BART and its relatives: an encoder and a decoder with cross-attention, over packed tokens.

mBART, Marian, M2M-100 and NLLB are this model with other norms and positions.
Source: Lewis et al. 2019, arXiv:1910.13461; Liu et al. 2020, arXiv:2001.08210 (mBART); Junczys-Dowmunt et al. 2018,
arXiv:1804.00344 (Marian); Fan et al. 2020, arXiv:2010.11125 (M2M-100); tensor names as Hugging Face transformers
saves them.
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from varlen.models.bart_checkpoint import LEARNED_OFFSET, BartConfig, StackConfig
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import Attention, CrossAttention
from varlen.models.blocks.embedding_tables import read_tables
from varlen.models.blocks.output import record_output, suppress_tokens
from varlen.models.blocks.residual import ResidualStream
from varlen.models.blocks.sinusoidal import m2m_positions, marian_positions
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder
from varlen_kernels import Activation

# Epsilon of all norms, which config.json does not name.
_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class BartEmbedding:
    """The embedding of tokens and positions.

    Attributes:
        token_table, position_table: `[rows, hidden]`.
        scale: multiplies the embeddings of tokens.
        norm: of the sum, if it has one.
    """

    token_table: Tensor
    position_table: Tensor
    scale: float
    norm: Norm | None

    def record(self, ops: Recorder) -> Value:
        """Record the embeddings of a batch, `[tokens, hidden]`."""
        tokens, positions = inputs.token_ids(ops), inputs.position_ids(ops)
        x = ops.embed(tokens, self.token_table, positions, self.position_table, scale=self.scale)
        if self.norm is None:
            return x
        return ops.layer_norm(x, self.norm.weight, self.norm.bias, eps=_NORM_EPS)


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
    """The feed-forward part of a layer."""

    up: Linear
    down: Linear
    norm: Norm
    activation: Activation

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record its output, `[tokens, hidden]`."""
        return self.down.record(ops, self.up.record_activated(ops, x, self.activation))


@dataclass(frozen=True, slots=True)
class BartEncoderLayer:
    """One layer of the encoder."""

    attention: SelfAttention
    mlp: FeedForward

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norm of each part."""
        return self.attention.norm, self.mlp.norm


@dataclass(frozen=True, slots=True)
class BartDecoderLayer:
    """One layer of the decoder."""

    attention: SelfAttention
    source: SourceAttention
    mlp: FeedForward

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norm of each part."""
        return self.attention.norm, self.source.norm, self.mlp.norm


@dataclass(frozen=True, slots=True)
class Bart:
    """A BART or a relative in one dtype.

    Attributes:
        source_embedding, target_embedding: of the encoder and the decoder.
        encoder_norm, decoder_norm: after the last layer, if norms are before sublayers.
        output: `[hidden, vocabulary]`.
        encoder_heads: heads of the encoder's layers.
        attention_heads: heads of the decoder's layers, in both kinds of attention.
    """

    source_embedding: BartEmbedding
    encoder_layers: tuple[BartEncoderLayer, ...]
    encoder_norm: Norm | None
    encoder_heads: AttentionHeads
    target_embedding: BartEmbedding
    decoder_layers: tuple[BartDecoderLayer, ...]
    decoder_norm: Norm | None
    attention_heads: AttentionHeads
    output: Linear

    @property
    def num_layers(self) -> int:
        """Number of layers of the decoder."""
        return len(self.decoder_layers)

    @property
    def vocab_size(self) -> int:
        """Token ids of targets below this are valid."""
        return self.target_embedding.token_table.shape[0]

    def record_encoder(self, ops: Recorder, cross: CrossAttention) -> None:
        """Record the encoder, and storing its keys and values for each layer of the decoder."""
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
        for number, decoder_layer in enumerate(self.decoder_layers):
            kv = decoder_layer.source.kv.record(ops, stream.x)
            cross.store(ops, number, kv, self.attention_heads)

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        """Record the decoder and return its last hidden state, `[tokens, hidden]`."""
        heads = self.attention_heads
        stream = _stream(ops, self.target_embedding, self.decoder_layers, self.decoder_norm)
        for number, layer in enumerate(self.decoder_layers):
            qkv = layer.attention.qkv.record(ops, stream.x)
            context = attention.record(ops, number, qkv, heads)
            stream.add(layer.attention.output.record(ops, context))
            queries = layer.source.query.record(ops, stream.x)
            context = cross.attend(ops, number, queries, heads, scale=heads.dim**-0.5)
            stream.add(layer.source.output.record(ops, context))
            stream.add(layer.mlp.record(ops, stream.x))
        return stream.x

    def record_logits(self, ops: Recorder, hidden: Value) -> Value:
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""
        return record_output(ops, self.output, hidden)


def load_bart(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Bart:
    """Return the model of a checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = BartConfig.read(checkpoint.config)
    encoder, decoder = config.encoder, config.decoder
    with CheckpointWeights(checkpoint.folder) as weights:
        layers = LayerReader(weights, dtype, device)
        read = _BartReader(config, layers)
        tables = read_tables(
            layers,
            config.table_names(weights),
            config.hidden,
            sources=encoder.vocab_size,
            targets=decoder.vocab_size,
        )
        return Bart(
            source_embedding=read.embedding("encoder", tables.source),
            encoder_layers=tuple(
                BartEncoderLayer(read.attention(at), read.mlp(at, encoder))
                for at in _layer_names("encoder", encoder)
            ),
            encoder_norm=read.last_norm("encoder"),
            encoder_heads=_heads(config, encoder),
            target_embedding=read.embedding("decoder", tables.target),
            decoder_layers=tuple(
                BartDecoderLayer(
                    read.attention(at), read.source_attention(at), read.mlp(at, decoder)
                )
                for at in _layer_names("decoder", decoder)
            ),
            decoder_norm=read.last_norm("decoder"),
            attention_heads=_heads(config, decoder),
            output=suppress_tokens(
                Linear(tables.output_weight, read.output_bias()), checkpoint.masked_tokens
            ),
        )


class _BartReader:
    """Reads the parts of the model by their names in a checkpoint."""

    def __init__(self, config: BartConfig, read: LayerReader) -> None:
        self._config = config
        self._read = read

    def embedding(self, stack: str, table: Tensor) -> BartEmbedding:
        config = self._config
        name = f"model.{stack}.layernorm_embedding"
        has_norm = config.options.has_embedding_norm
        return BartEmbedding(
            token_table=table,
            position_table=self._positions(stack).to(table),
            scale=config.hidden**0.5 if config.scales_embedding else 1.0,
            norm=self._read.norm(name, config.hidden) if has_norm else None,
        )

    def attention(self, layer: str) -> SelfAttention:
        name = f"{layer}.self_attn"
        qkv = self._linears(name, "q_proj", "k_proj", "v_proj")
        return SelfAttention(qkv, self._linears(name, "out_proj"), self._norm(name))

    def source_attention(self, layer: str) -> SourceAttention:
        name = f"{layer}.encoder_attn"
        return SourceAttention(
            query=self._linears(name, "q_proj"),
            kv=self._linears(name, "k_proj", "v_proj"),
            output=self._linears(name, "out_proj"),
            norm=self._norm(name),
        )

    def mlp(self, layer: str, stack: StackConfig) -> FeedForward:
        hidden, inner = self._config.hidden, stack.inner
        return FeedForward(
            up=self._read.linear([f"{layer}.fc1"], hidden, [inner]),
            down=self._read.linear([f"{layer}.fc2"], inner, [hidden]),
            norm=self._norm(f"{layer}.final"),
            activation=self._config.activation,
        )

    def last_norm(self, stack: str) -> Norm | None:
        if not self._config.options.is_pre_norm:
            return None
        return self._read.norm(f"model.{stack}.layer_norm", self._config.hidden)

    def output_bias(self) -> Tensor | None:
        name, size = "final_logits_bias", self._config.decoder.vocab_size
        if not self._config.options.has_output_bias or name not in self._read:
            return None
        bias = self._read.tensor(name, 1, size)[0]
        return bias if bool(bias.any()) else None

    def _positions(self, stack: str) -> Tensor:
        config = self._config
        rows, hidden = config.positions, config.hidden
        match config.options.positions:
            case "learned":
                name = f"model.{stack}.embed_positions.weight"
                return self._read.tensor(name, rows + LEARNED_OFFSET, hidden)[LEARNED_OFFSET:]
            case "marian":
                return marian_positions(rows, hidden)
            case "m2m":
                return m2m_positions(rows, hidden, first=config.first_position)

    def _linears(self, at: str, *parts: str) -> Linear:
        hidden = self._config.hidden
        names = [f"{at}.{part}" for part in parts]
        return self._read.linear(names, hidden, [hidden] * len(names))

    def _norm(self, of: str) -> Norm:
        return self._read.norm(f"{of}_layer_norm", self._config.hidden)


def _stream(
    ops: Recorder,
    embedding: BartEmbedding,
    layers: tuple[BartEncoderLayer, ...] | tuple[BartDecoderLayer, ...],
    last_norm: Norm | None,
) -> ResidualStream:
    """Record the embeddings and return the residual stream of a stack."""
    norms = chain.from_iterable(layer.norms for layer in layers)
    if last_norm is None:
        return ResidualStream(ops, embedding.record(ops), norms, is_pre_norm=False, eps=_NORM_EPS)
    return ResidualStream(
        ops, embedding.record(ops), chain(norms, [last_norm]), is_pre_norm=True, eps=_NORM_EPS
    )


def _layer_names(stack: str, config: StackConfig) -> list[str]:
    return [f"model.{stack}.layers.{index}" for index in range(config.num_layers)]


def _heads(config: BartConfig, stack: StackConfig) -> AttentionHeads:
    return AttentionHeads(stack.num_heads, stack.num_heads, config.hidden // stack.num_heads)
