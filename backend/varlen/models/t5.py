"""T5 and mT5: encoder and decoder with relative positions and RMS norms.

Source: Raffel et al. 2019, arXiv:1910.10683; Shazeer 2020, arXiv:2002.05202 (gates of T5 1.1); Xue et al. 2020,
arXiv:2010.11934 (mT5); tensor names as Hugging Face transformers saves them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from varlen.models.blocks import inputs
from varlen.models.blocks.attention import Attention, CrossAttention
from varlen.models.blocks.embedding_tables import read_tables
from varlen.models.blocks.heads import Heads
from varlen.models.blocks.output import record_output, suppress_tokens
from varlen.models.blocks.relative_positions import bias_by_distance
from varlen.models.blocks.residual import RmsResidualStream
from varlen.models.checkpoint.layers import LayerReader, Linear
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.t5_checkpoint import T5Config, table_names
from varlen.program.program import Value
from varlen.program.recorder import AttentionHeads, Recorder
from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class T5SelfAttention:
    """Attention inside a sequence; query, key and value are one matrix, side by side."""

    norm: Tensor
    qkv: Linear
    output: Linear


@dataclass(frozen=True, slots=True)
class T5SourceAttention:
    """Attention to a source; key and value are one matrix, side by side."""

    norm: Tensor
    query: Linear
    kv: Linear
    output: Linear


@dataclass(frozen=True, slots=True)
class T5FeedForward:
    """The feed-forward part of a layer; gate and up are one matrix."""

    norm: Tensor
    up: Linear
    down: Linear
    activation: Activation
    is_gated: bool

    def record(self, ops: Recorder, x: Value) -> Value:
        """Record its output, `[tokens, hidden]`."""
        if self.is_gated:
            inner = ops.activate_gate(self.up.record(ops, x), kind=self.activation)
        else:
            inner = self.up.record_activated(ops, x, self.activation)
        return self.down.record(ops, inner)


@dataclass(frozen=True, slots=True)
class T5EncoderLayer:
    """One layer of the encoder."""

    attention: T5SelfAttention
    mlp: T5FeedForward

    @property
    def norms(self) -> tuple[Tensor, ...]:
        """The norm before each part."""
        return self.attention.norm, self.mlp.norm


@dataclass(frozen=True, slots=True)
class T5DecoderLayer:
    """One layer of the decoder."""

    attention: T5SelfAttention
    source: T5SourceAttention
    mlp: T5FeedForward

    @property
    def norms(self) -> tuple[Tensor, ...]:
        """The norm before each part."""
        return self.attention.norm, self.source.norm, self.mlp.norm


@dataclass(frozen=True, slots=True)
class T5Encoder:
    """The encoder of a T5 or mT5 in one dtype.

    Attributes:
        table: `[vocabulary, hidden]`.
        bias: `[heads, distances]` fp32, added to scores of all layers; see `bias_by_distance`.
        norm: `[hidden]`, after the last layer.
        attention_heads: heads of all layers.
    """

    table: Tensor
    layers: tuple[T5EncoderLayer, ...]
    bias: Tensor
    norm: Tensor
    attention_heads: AttentionHeads
    norm_eps: float

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        return self.table.shape[0]

    @property
    def type_vocab_size(self) -> int:
        """Token types below this are valid: it has one."""
        return 1

    @property
    def heads(self) -> Heads:
        """The layers on top of it: none."""
        return Heads()

    def record(self, ops: Recorder) -> Value:
        """Record the encoder and return its last hidden state, `[tokens, hidden]`."""
        stream = _residual_stream(ops, self.table, self.layers, self.norm, eps=self.norm_eps)
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
        encoder: reads the source.
        target_table: `[vocabulary, hidden]`, embeddings of the decoder.
        decoder_bias: `[heads, distances]` fp32, added to scores of all layers; see `bias_by_distance`.
        decoder_norm: `[hidden]`, after the last layer; includes the scale before the output layer.
        output: `[hidden, vocabulary]`.
        attention_heads: heads of all layers.
    """

    encoder: T5Encoder
    target_table: Tensor
    decoder_layers: tuple[T5DecoderLayer, ...]
    decoder_bias: Tensor
    decoder_norm: Tensor
    output: Linear
    attention_heads: AttentionHeads
    norm_eps: float

    @property
    def num_layers(self) -> int:
        """Number of layers of the decoder."""
        return len(self.decoder_layers)

    @property
    def vocab_size(self) -> int:
        """Token ids of targets below this are valid."""
        return self.target_table.shape[0]

    def record_encoder(self, ops: Recorder, cross: CrossAttention) -> None:
        """Record the encoder, and storing its keys and values for each layer of the decoder."""
        hidden = self.encoder.record(ops)
        for number, layer in enumerate(self.decoder_layers):
            cross.store(ops, number, layer.source.kv.record(ops, hidden), self.attention_heads)

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        """Record the decoder and return its last hidden state after the final norm, `[tokens, hidden]`."""
        heads, layers = self.attention_heads, self.decoder_layers
        stream = _residual_stream(
            ops, self.target_table, layers, self.decoder_norm, eps=self.norm_eps
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
        """Record the output layer and return fp32 logits, `[rows, vocabulary]`."""
        return record_output(ops, self.output, hidden)


def _residual_stream(
    ops: Recorder,
    table: Tensor,
    layers: Sequence[T5EncoderLayer] | Sequence[T5DecoderLayer],
    last_norm: Tensor,
    *,
    eps: float,
) -> RmsResidualStream:
    """Record the embeddings and return the residual stream of a stack."""
    norms = chain.from_iterable(layer.norms for layer in layers)
    embedded = ops.embed(inputs.token_ids(ops), table)
    return RmsResidualStream(ops, embedded, chain(norms, [last_norm]), eps=eps)


def load_t5(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> T5:
    """Return the model of a checkpoint in `dtype` on `device`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = T5Config.read(checkpoint.config)
    size = config.vocab_size
    with CheckpointWeights(checkpoint.folder) as weights:
        layers = LayerReader(weights, dtype, device)
        read = _T5Reader(config, layers)
        names = table_names(weights)
        tables = read_tables(layers, names, config.hidden, sources=size, targets=size)
        return T5(
            encoder=read.encoder(tables.source),
            target_table=tables.target,
            decoder_layers=tuple(
                T5DecoderLayer(read.attention(at), read.source_attention(at), read.mlp(f"{at}.2"))
                for at in _layer_names("decoder", config.decoder_layers)
            ),
            decoder_bias=read.bias("decoder", is_causal=True),
            decoder_norm=read.norm("decoder.final_layer_norm") * config.output_scale,
            output=suppress_tokens(Linear(tables.output_weight, None), checkpoint.masked_tokens),
            attention_heads=AttentionHeads(config.num_heads, config.num_heads, config.head_dim),
            norm_eps=config.norm_eps,
        )


def load_t5_encoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> T5Encoder:
    """Return the encoder of a checkpoint without a decoder in `dtype` on `device`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    config = T5Config.read(checkpoint.config)
    with CheckpointWeights(checkpoint.folder) as weights:
        layers = LayerReader(weights, dtype, device)
        table = layers.tensor(table_names(weights).source, config.vocab_size, config.hidden)
        return _T5Reader(config, layers).encoder(table)


class _T5Reader:
    """Reads the parts of the model by their names in a checkpoint."""

    def __init__(self, config: T5Config, read: LayerReader) -> None:
        self._config = config
        self._read = read

    def encoder(self, table: Tensor) -> T5Encoder:
        config = self._config
        return T5Encoder(
            table=table,
            layers=tuple(
                T5EncoderLayer(self.attention(at), self.mlp(f"{at}.1"))
                for at in _layer_names("encoder", config.encoder_layers)
            ),
            bias=self.bias("encoder", is_causal=False),
            norm=self.norm("encoder.final_layer_norm"),
            attention_heads=AttentionHeads(config.num_heads, config.num_heads, config.head_dim),
            norm_eps=config.norm_eps,
        )

    def attention(self, layer: str) -> T5SelfAttention:
        name = f"{layer}.0.SelfAttention"
        qkv, norm = self._inputs(name, "q", "k", "v"), self.norm(f"{layer}.0.layer_norm")
        return T5SelfAttention(norm, qkv, self._output(name))

    def source_attention(self, layer: str) -> T5SourceAttention:
        name = f"{layer}.1.EncDecAttention"
        return T5SourceAttention(
            norm=self.norm(f"{layer}.1.layer_norm"),
            query=self._inputs(name, "q"),
            kv=self._inputs(name, "k", "v"),
            output=self._output(name),
        )

    def mlp(self, part: str) -> T5FeedForward:
        config, name = self._config, f"{part}.DenseReluDense"
        ups = [f"{name}.wi_0", f"{name}.wi_1"] if config.is_gated else [f"{name}.wi"]
        return T5FeedForward(
            norm=self.norm(f"{part}.layer_norm"),
            up=self._read.linear(ups, config.hidden, [config.inner] * len(ups), bias=False),
            down=self._read.linear([f"{name}.wo"], config.inner, [config.hidden], bias=False),
            activation=config.activation,
            is_gated=config.is_gated,
        )

    def norm(self, name: str) -> Tensor:
        return self._read.tensor(f"{name}.weight", self._config.hidden)

    def bias(self, stack: str, *, is_causal: bool) -> Tensor:
        config = self._config
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table = self._read.tensor(name, config.buckets, config.num_heads)
        return bias_by_distance(table, max_distance=config.max_distance, is_causal=is_causal)

    def _inputs(self, attention: str, *parts: str) -> Linear:
        names = [f"{attention}.{part}" for part in parts]
        widths = [self._config.width] * len(names)
        return self._read.linear(names, self._config.hidden, widths, bias=False)

    def _output(self, attention: str) -> Linear:
        config = self._config
        return self._read.linear([f"{attention}.o"], config.width, [config.hidden], bias=False)


def _layer_names(stack: str, layers: int) -> list[str]:
    return [f"{stack}.block.{index}.layer" for index in range(layers)]
