"""T5 and mT5: encoder and decoder with relative positions and RMS norms.

Source: Raffel et al. 2019, arXiv:1910.10683; Shazeer 2020, arXiv:2002.05202 (gates of T5 1.1); Xue et al. 2020,
arXiv:2010.11934 (mT5).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import bias_by_distance
from varlen.models.blocks.heads import (
    Heads,
    TableNames,
    read_tables,
    record_output,
    suppress_tokens,
)
from varlen.models.blocks.layer_parts import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    NormedFeedForward,
    RmsResidualStream,
    SelfAttention,
    SourceAttention,
    record_decoder_layers,
    record_encoder_layers,
    store_source,
)
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.family import Family, HeadConfig
from varlen.models.checkpoint.files import ACTIVATIONS, Json, read_flag, read_int, read_layers
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm, TokenTable
from varlen.program.rank import AttentionHeads
from varlen_kernels import Activation

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
        layers, heads = self.layers, self.attention_heads
        stream = _residual_stream(ops, self.token_table, layers, self.norm, eps=self.norm_eps)
        return record_encoder_layers(ops, stream, layers, heads, scale=1.0, bias=self.bias)


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
        store_source(ops, cross, hidden, self.layers, self.attention_heads)

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        heads, layers, bias = self.attention_heads, self.layers, self.decoder_bias
        stream = _residual_stream(
            ops, self.token_table, layers, self.decoder_norm, eps=self.norm_eps
        )
        return record_decoder_layers(
            ops, stream, layers, heads, attention, cross, scale=1.0, bias=bias
        )

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


# Longest sequence; relative positions have no limit, but an engine plans memory for it.
LONGEST_SEQUENCE = 32_768

_MAX_DISTANCE, _BUCKETS = "relative_attention_max_distance", "relative_attention_num_buckets"
# Saved by old releases, and not used by any.
_UNUSED_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# Where config.json has no feed_forward_proj.
_FEED_FORWARD = {"t5": "relu", "mt5": "gated-gelu"}


def _read_feed_forward(config: Json) -> tuple[Activation, bool]:
    kind = config.get("feed_forward_proj", _FEED_FORWARD[config["model_type"]])
    name = str(kind).removeprefix("gated-")
    is_gated = name != kind
    if name not in ACTIVATIONS:
        names = ", ".join([*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS)])
        raise CheckpointError(f'config.json has feed_forward_proj "{kind}"; allowed: {names}')
    # what T5 1.1 means by it
    name = "gelu_new" if kind == "gated-gelu" else name
    # release 5 saves these two as well
    for key, value in (("dense_act_fn", name), ("is_gated_act", is_gated)):
        if config.get(key, value) != value:
            raise CheckpointError(
                f'config.json has {key} {config[key]!r} and feed_forward_proj "{kind}", which disagree'
            )
    return ACTIVATIONS[name], is_gated


def _read_buckets(config: Json) -> int:
    return read_int(config, _BUCKETS, default=32, lowest=4)


def _read_max_distance(config: Json) -> int:
    buckets, distance = _read_buckets(config), read_int(config, _MAX_DISTANCE, default=128)
    if distance <= buckets // 2:
        raise CheckpointError(
            f"config.json has {_MAX_DISTANCE} {distance}; allowed: numbers above {buckets // 2},"
            f" half of {_BUCKETS}"
        )
    return distance


def _read_output_scale(config: Json) -> float:
    """Return the factor in front of the output layer, which is 1 since T5 1.1."""
    if config["model_type"] == "mt5":
        return 1.0
    is_tied = read_flag(config, "tie_word_embeddings", default=True)
    is_scaled = read_flag(config, "scale_decoder_outputs", default=is_tied)
    return float(config["d_model"] ** -0.5) if is_scaled else 1.0


def _read_decoder_layers(config: Json) -> int:
    has_own = config.get("num_decoder_layers") is not None
    return read_layers(config, "num_decoder_layers" if has_own else "num_layers")


@dataclass(frozen=True, slots=True)
class T5Config(declare.ConfigFields):
    """The fields of config.json that shape the model.

    Attributes:
        head_dim: features of a head; all heads together may be wider or narrower than hidden.
        max_distance: first distance of the last bias.
    """

    feed_forward: tuple[Activation, bool] = declare.computed(
        _read_feed_forward, "feed_forward_proj", "dense_act_fn", "is_gated_act"
    )
    encoder_layers: int = declare.layers("num_layers")
    hidden: int = declare.size("d_model")
    positions: int = declare.computed(lambda _: LONGEST_SEQUENCE)
    vocab_size: int = declare.size("vocab_size")
    inner: int = declare.size("d_ff")
    num_heads: int = declare.size("num_heads")
    head_dim: int = declare.size("d_kv")
    decoder_layers: int = declare.computed(_read_decoder_layers, "num_decoder_layers")
    buckets: int = declare.computed(_read_buckets, _BUCKETS)
    max_distance: int = declare.computed(_read_max_distance, _MAX_DISTANCE)
    norm_eps: float = declare.epsilon("layer_norm_epsilon", 1e-6)
    output_scale: float = declare.computed(
        _read_output_scale, "scale_decoder_outputs", "tie_word_embeddings"
    )

    @property
    def heads(self) -> AttentionHeads:
        return AttentionHeads(self.num_heads, self.num_heads, self.head_dim)


def _table_names(present: Container[str]) -> TableNames:
    """Return the names of the tensors that hold the tables, given the checkpoint's names.

    Since release 5, transformers ties them whatever config.json says, unless the checkpoint has several.
    """
    own = TableNames("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    return own.find(("shared.weight", own.source, own.target, own.output), present)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> T5:
    """Return the T5 or mT5 of a checkpoint; see `Family`."""
    config = T5Config.read(fields)
    size, scale, heads = config.vocab_size, config.output_scale, read.heads(config.heads)
    tables = read_tables(read, _table_names(read), config.hidden, sources=size, targets=size)
    parts = _T5Reader(config, read)
    encoder = parts.encoder(tables.source, has_decoder=True)
    decoder_bias = parts.bias("decoder", is_causal=True)
    decoder_layers = read.layers(
        config.decoder_layers,
        lambda reader, index: _T5Reader(config, reader).decoder_layer(index),
    )
    norm = parts.norm("decoder.final_layer_norm")
    return T5(
        encoder=encoder,
        token_table=tables.target,
        layers=decoder_layers,
        decoder_bias=decoder_bias,
        decoder_norm=read.computed(lambda: Norm(norm.weight * scale, None)),
        output=read.computed(
            lambda: suppress_tokens(
                Linear(tables.output_weight, None), head.masked_tokens, read.rank.bounds(size)[0]
            )
        ),
        attention_heads=heads,
        norm_eps=config.norm_eps,
    )


def load_encoder(read: LayerReader, fields: Json, head: HeadConfig) -> T5Encoder:  # noqa: ARG001  # it has none
    """Return the encoder of a checkpoint without a decoder; see `Family`."""
    config = T5Config.read(fields)
    table = read.token_table(_table_names(read).source, config.vocab_size, config.hidden)
    return _T5Reader(config, read).encoder(table, has_decoder=False)


class _T5Reader:
    def __init__(self, config: T5Config, read: LayerReader) -> None:
        self._config = config
        self._read = read

    def encoder(self, table: TokenTable, *, has_decoder: bool) -> T5Encoder:
        config = self._config
        return T5Encoder(
            token_table=table,
            bias=self.bias("encoder", is_causal=False),
            layers=self._read.layers(
                config.encoder_layers,
                lambda reader, index: _T5Reader(config, reader).encoder_layer(index),
                is_for_first_stage=has_decoder,
            ),
            norm=self.norm("encoder.final_layer_norm"),
            attention_heads=self._read.heads(config.heads),
            norm_eps=config.norm_eps,
        )

    def encoder_layer(self, index: int) -> EncoderLayer:
        at = f"encoder.block.{index}.layer"
        return EncoderLayer(self.attention(at), self.mlp(f"{at}.1"))

    def decoder_layer(self, index: int) -> DecoderLayer:
        at = f"decoder.block.{index}.layer"
        return DecoderLayer(self.attention(at), self.source_attention(at), self.mlp(f"{at}.2"))

    def attention(self, layer: str) -> SelfAttention:
        name = f"{layer}.0.SelfAttention"
        qkv, norm = self._inputs(name, "q", "k", "v"), self.norm(f"{layer}.0.layer_norm")
        return SelfAttention(qkv, self._output(name), norm)

    def source_attention(self, layer: str) -> SourceAttention:
        name = f"{layer}.1.EncDecAttention"
        return SourceAttention(
            norm=self.norm(f"{layer}.1.layer_norm"),
            query=self._inputs(name, "q"),
            kv=self._inputs(name, "k", "v"),
            output=self._output(name),
        )

    def mlp(self, part: str) -> NormedFeedForward:
        config, name = self._config, f"{part}.DenseReluDense"
        activation, is_gated = config.feed_forward
        ups = [f"{name}.wi_0", f"{name}.wi_1"] if is_gated else [f"{name}.wi"]
        mlp = FeedForward(
            self._read.linear(
                ups, config.hidden, [config.inner] * len(ups), bias=False, split="outputs"
            ),
            self._read.linear(
                [f"{name}.wo"], config.inner, [config.hidden], bias=False, split="inputs"
            ),
            is_gated,
        )
        return NormedFeedForward(mlp, self.norm(f"{part}.layer_norm"), activation)

    def norm(self, name: str) -> Norm:
        return self._read.norm(name, self._config.hidden, bias=False)

    def bias(self, stack: str, *, is_causal: bool) -> Tensor:
        config = self._config
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table = self._read.head_columns(name, config.buckets, config.num_heads)
        return self._read.computed(
            lambda: bias_by_distance(table, max_distance=config.max_distance, is_causal=is_causal)
        )

    def _inputs(self, attention: str, *parts: str) -> Linear:
        names = [f"{attention}.{part}" for part in parts]
        widths = [self._config.heads.width] * len(names)
        return self._read.linear(
            names,
            self._config.hidden,
            widths,
            bias=False,
            split="outputs",
            units=[self._config.num_heads] * len(names),
        )

    def _output(self, attention: str) -> Linear:
        config = self._config
        width = config.heads.width
        return self._read.linear(
            [f"{attention}.o"], width, [config.hidden], bias=False, split="inputs"
        )


def _is_unused(name: str, stored: Container[str]) -> bool:  # noqa: ARG001
    return name in (_UNUSED_BIAS, "shared.weight")


_RULES = declare.ENCODER_DECODER.plus(T5Config.names())
# The class of the encoder has no decoder in transformers, whatever config.json says.
_ENCODER_RULES = FieldRules(
    _RULES.read,
    declare.ENCODER.harmless | {"is_encoder_decoder", "prefix"},
    {name: value for name, value in _RULES.fixed.items() if name != "is_encoder_decoder"},
)


def _family(head: str) -> Family[T5]:
    return Family(
        architectures={head: "translate"},
        heads={"translate": head},
        fields=_RULES,
        read_sizes=T5Config.read,
        load=load,
        is_unused=_is_unused,
        tokenizer_class="T5Tokenizer",
        kind="encoder_decoder",
        is_divisible=True,
    )


FAMILIES: Mapping[str, Family[T5]] = {
    "t5": _family("T5ForConditionalGeneration"),
    "mt5": _family("MT5ForConditionalGeneration"),
}
ENCODERS: Mapping[str, Family[T5Encoder]] = {
    name: Family(
        architectures={name: "embed"},
        heads={},
        fields=_ENCODER_RULES,
        read_sizes=T5Config.read,
        load=load_encoder,
        is_unused=_is_unused,
        tokenizer_class="T5Tokenizer",
        is_divisible=True,
    )
    for name in ("T5EncoderModel", "MT5EncoderModel")
}
