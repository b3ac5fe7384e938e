"""BART and its relatives: an encoder and a decoder with cross-attention, over packed tokens.

mBART, Marian, M2M-100 and NLLB are this model with other norms and positions.
Source: Lewis et al. 2019, arXiv:1910.13461; Liu et al. 2020, arXiv:2001.08210 (mBART); Junczys-Dowmunt et al. 2018,
arXiv:1804.00344 (Marian); Fan et al. 2020, arXiv:2010.11125 (M2M-100).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.heads import TableNames, read_tables, record_output, suppress_tokens
from varlen.models.blocks.layer_parts import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    NormedFeedForward,
    ResidualStream,
    SelfAttention,
    SourceAttention,
    record_decoder_layers,
    record_encoder_layers,
    store_source,
)
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.family import Family, HeadConfig
from varlen.models.checkpoint.files import (
    ACTIVATIONS,
    Json,
    check_multiple,
    read_choice,
    read_computed_positions,
    read_flag,
    read_int,
    read_layers,
)
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm, TokenTable
from varlen.program.rank import AttentionHeads
from varlen_kernels import Activation

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
    """A BART or a relative in one dtype."""

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
        heads, layers = self.encoder_heads, self.encoder_layers
        stream = _stream(ops, self.source_embedding, layers, self.encoder_norm)
        hidden = record_encoder_layers(ops, stream, layers, heads)
        store_source(ops, cross, hidden, self.layers, self.attention_heads)

    def record(self, ops: Recorder, attention: Attention, cross: CrossAttention) -> Value:
        heads, layers = self.attention_heads, self.layers
        stream = _stream(ops, self.target_embedding, layers, self.decoder_norm)
        return record_decoder_layers(ops, stream, layers, heads, attention, cross)

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


# Second names of fields, which must agree with them.
_ALIASES: Mapping[str, str] = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
# Learned tables begin with two rows that no position has.
LEARNED_OFFSET = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What distinguishes the families.

    Attributes:
        is_pre_norm: whether norms are before sublayers, with one more after the last.
        activation: default activation, by transformers' name.
    """

    head: str
    positions: Literal["learned", "marian", "m2m"]
    is_pre_norm: bool
    has_embedding_norm: bool
    has_output_bias: bool = True
    activation: str = "gelu"
    scales_embedding: bool = False
    fields: frozenset[str] = field(default_factory=frozenset)

    @property
    def fixed_fields(self) -> Mapping[str, object]:
        """Fields that only the first releases saved, each with the value that is served."""
        return {
            "add_final_layer_norm": self.is_pre_norm,
            "normalize_before": self.is_pre_norm,
            "normalize_embedding": self.has_embedding_norm,
            "static_position_embeddings": self.positions != "learned",
        }


OPTIONS: Mapping[str, Options] = {
    "bart": Options(
        "BartForConditionalGeneration", "learned", is_pre_norm=False, has_embedding_norm=True
    ),
    "mbart": Options(
        "MBartForConditionalGeneration", "learned", is_pre_norm=True, has_embedding_norm=True
    ),
    "marian": Options(
        "MarianMTModel",
        "marian",
        is_pre_norm=False,
        has_embedding_norm=False,
        fields=frozenset({"decoder_vocab_size", "share_encoder_decoder_embeddings"}),
    ),
    "m2m_100": Options(
        "M2M100ForConditionalGeneration",
        "m2m",
        is_pre_norm=True,
        has_embedding_norm=False,
        has_output_bias=False,
        activation="relu",
        scales_embedding=True,
    ),
}


@dataclass(frozen=True, slots=True)
class StackConfig:
    """The sizes of the encoder or of the decoder."""

    num_layers: int
    heads: AttentionHeads
    inner: int


def _options(config: Json) -> Options:
    return OPTIONS[config["model_type"]]


def _read_options(config: Json) -> Options:
    for alias, name in _ALIASES.items():
        if alias in config and config[alias] != config.get(name):
            raise CheckpointError(
                f"config.json has {alias} {config[alias]!r} and {name} {config.get(name)!r}, which mean the"
                " same; make them agree"
            )
    return _options(config)


def _read_shares_tables(config: Json) -> bool:
    name = "share_encoder_decoder_embeddings"
    shares = name not in _options(config).fields or read_flag(config, name, default=True)
    sources, targets = read_int(config, "vocab_size"), _read_targets(config)
    if shares and sources != targets:
        raise CheckpointError(
            f"config.json has decoder_vocab_size {targets} and vocab_size {sources}, which the shared"
            " embeddings of encoder and decoder need to be equal"
        )
    return shares


def _read_targets(config: Json) -> int:
    has_own = config.get("decoder_vocab_size") is not None
    return read_int(config, "decoder_vocab_size" if has_own else "vocab_size")


def _read_first_position(config: Json) -> int:
    # positions of M2M-100 are counted from the padding token's id
    is_m2m = _options(config).positions == "m2m"
    return read_int(config, "pad_token_id", lowest=0) + 1 if is_m2m else 0


def _read_positions(config: Json) -> int:
    if _options(config).positions == "learned":
        return read_int(config, "max_position_embeddings")
    return read_computed_positions(config)


def _declare_stack(name: str) -> StackConfig:
    def read(config: Json) -> StackConfig:
        heads = read_int(config, f"{name}_attention_heads")
        hidden = read_int(config, "d_model")
        check_multiple(config, "d_model", f"{name}_attention_heads")
        layers = read_layers(config, f"{name}_layers", lowest=0)
        inner = read_int(config, f"{name}_ffn_dim")
        return StackConfig(layers, AttentionHeads(heads, heads, hidden // heads), inner)

    return declare.computed(read, f"{name}_attention_heads", f"{name}_layers", f"{name}_ffn_dim")


@dataclass(frozen=True, slots=True)
class BartConfig(declare.ConfigFields):
    """The fields of config.json that shape the model.

    Attributes:
        sources, targets: sizes of the vocabularies.
        first_position: number of the first position where they are computed.
    """

    options: Options = declare.computed(_read_options, *_ALIASES)
    shares_tables: bool = declare.computed(_read_shares_tables)
    first_position: int = declare.computed(_read_first_position)
    positions: int = declare.computed(_read_positions, "max_position_embeddings")
    hidden: int = declare.size("d_model")
    sources: int = declare.size("vocab_size")
    targets: int = declare.computed(_read_targets)
    encoder: StackConfig = _declare_stack("encoder")
    decoder: StackConfig = _declare_stack("decoder")
    activation: Activation = declare.computed(
        lambda config: read_choice(
            config, "activation_function", ACTIVATIONS, default=_options(config).activation
        ),
        "activation_function",
    )
    scales_embedding: bool = declare.computed(
        lambda config: read_flag(
            config, "scale_embedding", default=_options(config).scales_embedding
        ),
        "scale_embedding",
    )
    is_tied: bool = declare.flag("tie_word_embeddings", default=True)

    def table_names(self, present: Container[str]) -> TableNames:
        shared = "model.shared.weight"
        own = TableNames(
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
            "lm_head.weight",
        )
        tied: tuple[str, ...] = ()
        if self.is_tied and self.shares_tables:
            tied = (shared, own.source, own.target, own.output)
        elif self.is_tied:
            tied = (own.target, own.output)
        return own.find(tied, present)


def load(read: LayerReader, fields: Json, head: HeadConfig) -> Bart:
    """Return the BART or relative of a checkpoint; see `Family`."""
    config = BartConfig.read(fields)
    encoder, decoder = config.encoder, config.decoder
    encoder_heads, decoder_heads = read.heads(encoder.heads), read.heads(decoder.heads)
    parts = _BartReader(config, read)
    tables = read_tables(
        read,
        config.table_names(read),
        config.hidden,
        sources=config.sources,
        targets=config.targets,
    )
    bias = parts.output_bias()
    return Bart(
        source_embedding=parts.embedding("encoder", tables.source),
        encoder_layers=read.layers(
            encoder.num_layers,
            lambda reader, index: _BartReader(config, reader).encoder_layer(index),
            is_for_first_stage=True,
        ),
        encoder_norm=parts.last_norm("encoder"),
        encoder_heads=encoder_heads,
        target_embedding=parts.embedding("decoder", tables.target),
        layers=read.layers(
            decoder.num_layers,
            lambda reader, index: _BartReader(config, reader).decoder_layer(index),
        ),
        decoder_norm=parts.last_norm("decoder"),
        attention_heads=decoder_heads,
        output=read.computed(
            lambda: suppress_tokens(
                Linear(tables.output_weight, _unless_zero(bias)),
                head.masked_tokens,
                read.rank.bounds(config.targets)[0],
            )
        ),
    )


class _BartReader:
    def __init__(self, config: BartConfig, read: LayerReader) -> None:
        self._config = config
        self._read = read

    def embedding(self, stack: str, table: TokenTable) -> BartEmbedding:
        config = self._config
        name = f"model.{stack}.layernorm_embedding"
        has_norm = config.options.has_embedding_norm
        return BartEmbedding(
            token_table=table,
            position_table=self._positions(stack, table),
            scale=config.hidden**0.5 if config.scales_embedding else 1.0,
            norm=self._read.norm(name, config.hidden) if has_norm else None,
        )

    def encoder_layer(self, index: int) -> EncoderLayer:
        at, stack = f"model.encoder.layers.{index}", self._config.encoder
        return EncoderLayer(self.attention(at, stack), self.mlp(at, stack))

    def decoder_layer(self, index: int) -> DecoderLayer:
        at, stack = f"model.decoder.layers.{index}", self._config.decoder
        attention, source = self.attention(at, stack), self.source_attention(at)
        return DecoderLayer(attention, source, self.mlp(at, stack))

    def attention(self, layer: str, stack: StackConfig) -> SelfAttention:
        name = f"{layer}.self_attn"
        qkv = self._inputs(name, stack, "q_proj", "k_proj", "v_proj")
        return SelfAttention(qkv, self._output(name), self._norm(name))

    def source_attention(self, layer: str) -> SourceAttention:
        name, stack = f"{layer}.encoder_attn", self._config.decoder
        return SourceAttention(
            query=self._inputs(name, stack, "q_proj"),
            kv=self._inputs(name, stack, "k_proj", "v_proj"),
            output=self._output(name),
            norm=self._norm(name),
        )

    def mlp(self, layer: str, stack: StackConfig) -> NormedFeedForward:
        hidden, inner = self._config.hidden, stack.inner
        part = FeedForward(
            self._read.linear([f"{layer}.fc1"], hidden, [inner], split="outputs"),
            self._read.linear([f"{layer}.fc2"], inner, [hidden], split="inputs"),
            is_gated=False,
        )
        return NormedFeedForward(part, self._norm(f"{layer}.final"), self._config.activation)

    def last_norm(self, stack: str) -> Norm | None:
        if not self._config.options.is_pre_norm:
            return None
        return self._read.norm(f"model.{stack}.layer_norm", self._config.hidden)

    def output_bias(self) -> Tensor | None:
        # a checkpoint may leave out a bias of zeros
        name, size = "final_logits_bias", self._config.targets
        if not self._config.options.has_output_bias or name not in self._read:
            return None
        return self._read.vocabulary_bias(name, 1, size)

    def _positions(self, stack: str, table: TokenTable) -> Tensor:
        config, read = self._config, self._read
        rows, hidden, first = config.positions, config.hidden, config.first_position
        match config.options.positions:
            case "learned":
                name = f"model.{stack}.embed_positions.weight"
                learned = read.tensor(name, rows + LEARNED_OFFSET, hidden)
                return read.computed(lambda: learned[LEARNED_OFFSET:])
            case "marian":
                make = partial(_marian_positions, rows, hidden)
            case "m2m":
                make = partial(_m2m_positions, rows, hidden, first=first)
        # on the device and in the dtype of the embeddings, to which it is added
        return read.computed(lambda: make().to(table.device, table.weight.dtype))

    def _inputs(self, at: str, stack: StackConfig, *parts: str) -> Linear:
        hidden, names = self._config.hidden, [f"{at}.{part}" for part in parts]
        units = [stack.heads.queries] * len(names)
        return self._read.linear(names, hidden, [hidden] * len(names), split="outputs", units=units)

    def _output(self, at: str) -> Linear:
        hidden = self._config.hidden
        return self._read.linear([f"{at}.out_proj"], hidden, [hidden], split="inputs")

    def _norm(self, of: str) -> Norm:
        return self._read.norm(f"{of}_layer_norm", self._config.hidden)


def _unless_zero(bias: Tensor | None) -> Tensor | None:
    return bias if bias is not None and bool(bias.any()) else None


# Tables of computed positions, which old releases saved.
_COMPUTED = frozenset(
    f"model.{stack}.embed_positions.{tensor}"
    for stack in ("encoder", "decoder")
    for tensor in ("weight", "weights")
)


def _marian_positions(positions: int, hidden: int) -> Tensor:
    """Return Marian's table, `[positions, hidden]` fp32: sines of all angles, then cosines.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5; the orders of features follow transformers.
    """
    import torch

    feature = torch.arange(0, hidden, 2, dtype=torch.float64)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (feature / hidden)
    # an odd number of features has one cosine less
    return torch.cat([angles.sin(), angles.cos()[:, : hidden // 2]], dim=1).float()


def _m2m_positions(positions: int, hidden: int, *, first: int) -> Tensor:
    """Return the table of M2M-100, `[positions, hidden]` fp32: sines of all angles, then cosines.

    Args:
        hidden: features of a token, at least 4; a last odd one is 0.
    """
    import torch

    half = hidden // 2
    # fp32 throughout, as transformers computes them
    steps = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(first, first + positions).float()[:, None] * steps
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(table, (0, hidden % 2))


def _family(name: str, tokenizer_class: str) -> Family[Bart]:
    options = OPTIONS[name]
    computed = () if options.positions == "learned" else _COMPUTED
    return Family(
        architectures={options.head: "translate"},
        heads={"translate": options.head},
        fields=declare.ENCODER_DECODER.plus(
            BartConfig.names() | options.fields,
            # of heads that are not served
            ("id2label", "num_labels"),
            options.fixed_fields,
        ),
        read_sizes=BartConfig.read,
        load=load,
        # copies of one table
        is_unused=lambda name, _: name == "model.shared.weight" or name in computed,
        tokenizer_class=tokenizer_class,
        kind="encoder_decoder",
        is_divisible=True,
    )


FAMILIES: Mapping[str, Family[Bart]] = {
    "bart": _family("bart", "BartTokenizer"),
    "mbart": _family("mbart", "MBartTokenizer"),
    "marian": _family("marian", "MarianTokenizer"),
    "m2m_100": _family("m2m_100", "M2M100Tokenizer"),
}
