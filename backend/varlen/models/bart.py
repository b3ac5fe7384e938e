"""BART and its relatives: an encoder and a decoder with cross-attention, over packed tokens.

mBART, Marian, M2M-100 and NLLB are this model with other norms and positions.
Source: Lewis et al. 2019, arXiv:1910.13461; Liu et al. 2020, arXiv:2001.08210 (mBART); Junczys-Dowmunt et al. 2018,
arXiv:1804.00344 (Marian); Fan et al. 2020, arXiv:2010.11125 (M2M-100); tensor names as Hugging Face transformers
saves them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.embedding_tables import read_tables
from varlen.models.blocks.output import record_output, suppress_tokens
from varlen.models.blocks.residual import ResidualStream
from varlen.models.blocks.sinusoidal import m2m_positions, marian_positions
from varlen.models.checkpoint import declared_fields as declare
from varlen.models.checkpoint import seq2seq_fields
from varlen.models.checkpoint.config_file import (
    ACTIVATIONS,
    Json,
    check_multiple,
    read_choice,
    read_computed_positions,
    read_flag,
    read_int,
    read_layers,
)
from varlen.models.checkpoint.family import Family, HeadConfig, ModelSizes
from varlen.models.checkpoint.layers import Linear, Norm, Reader
from varlen.models.checkpoint.table_names import TableNames
from varlen.program.heads import AttentionHeads
from varlen_kernels import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.blocks.attention import Attention, CrossAttention
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

Positions = Literal["learned", "marian", "m2m"]

# Epsilon of all norms, which config.json does not name.
_NORM_EPS = 1e-5
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
        head: the class that translates.
        positions: how positions are embedded.
        is_pre_norm: whether norms are before sublayers, with one more after the last.
        has_embedding_norm: whether embeddings are normed.
        has_output_bias: whether logits have a bias.
        activation: where config.json names none, by transformers' name.
        scales_embedding: where config.json does not say it.
        fields: more fields that it reads.
    """

    head: str
    positions: Positions
    is_pre_norm: bool
    has_embedding_norm: bool
    has_output_bias: bool = True
    activation: str = "gelu"
    scales_embedding: bool = False
    fields: frozenset[str] = field(default_factory=frozenset)

    @property
    def fixed_fields(self) -> Mapping[str, object]:
        """Fields that are served with one value; only the first releases saved the last four."""
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
    """The sizes of the encoder or of the decoder.

    Attributes:
        vocab_size: rows of its embedding table.
        inner: features inside a feed-forward part.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    inner: int


def _read_options(config: Json) -> Options:
    for alias, name in _ALIASES.items():
        if alias in config and config[alias] != config.get(name):
            raise CheckpointError(
                f"config.json has {alias} {config[alias]!r} and {name} {config.get(name)!r}, which mean the"
                " same; make them agree"
            )
    return OPTIONS[config["model_type"]]


def _read_shares_tables(config: Json) -> bool:
    shares = "share_encoder_decoder_embeddings" not in OPTIONS[
        config["model_type"]
    ].fields or read_flag(config, "share_encoder_decoder_embeddings", default=True)
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
    is_m2m = OPTIONS[config["model_type"]].positions == "m2m"
    return read_int(config, "pad_token_id", lowest=0) + 1 if is_m2m else 0


def _read_positions(config: Json) -> int:
    if OPTIONS[config["model_type"]].positions == "learned":
        return read_int(config, "max_position_embeddings")
    return read_computed_positions(config)


def _declare_stack(name: str, read_vocabulary: Callable[[Json], int]) -> StackConfig:
    """Declare the sizes of a stack."""

    def read(config: Json) -> StackConfig:
        heads = read_int(config, f"{name}_attention_heads")
        read_int(config, "d_model")
        check_multiple(config, "d_model", f"{name}_attention_heads")
        layers = read_layers(config, f"{name}_layers", lowest=0)
        inner = read_int(config, f"{name}_ffn_dim")
        return StackConfig(read_vocabulary(config), layers, heads, inner)

    return declare.computed(
        read, *(f"{name}_{field}" for field in ("attention_heads", "layers", "ffn_dim"))
    )


def _read_scaling(config: Json) -> bool:
    default = OPTIONS[config["model_type"]].scales_embedding
    return read_flag(config, "scale_embedding", default=default)


def _read_activation(config: Json) -> Activation:
    default = OPTIONS[config["model_type"]].activation
    return read_choice(config, "activation_function", ACTIVATIONS, default=default)


@dataclass(frozen=True, slots=True)
class BartConfig(declare.ConfigFields):
    """The fields of config.json that shape the model.

    Attributes:
        positions: longest source, and longest target, in tokens.
        first_position: number of the first position where they are computed.
        shares_tables: whether encoder and decoder have one vocabulary.
        is_tied: whether the output matrix is the embedding table.
    """

    options: Options = declare.computed(_read_options, *_ALIASES)
    shares_tables: bool = declare.computed(_read_shares_tables)
    first_position: int = declare.computed(_read_first_position)
    positions: int = declare.computed(_read_positions, "max_position_embeddings")
    hidden: int = declare.size("d_model")
    encoder: StackConfig = _declare_stack("encoder", lambda config: read_int(config, "vocab_size"))
    decoder: StackConfig = _declare_stack("decoder", _read_targets)
    activation: Activation = declare.computed(_read_activation, "activation_function")
    scales_embedding: bool = declare.computed(_read_scaling, "scale_embedding")
    is_tied: bool = declare.flag("tie_word_embeddings", default=True)

    def table_names(self, present: Container[str]) -> TableNames:
        """Return the names of the tensors that hold the tables, given those of the checkpoint."""
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


def load(read: Reader, fields: Json, head: HeadConfig) -> Bart:
    """Return the BART or relative of a checkpoint; see `Family`."""
    config = BartConfig.read(fields)
    encoder, decoder = config.encoder, config.decoder
    parts = _BartReader(config, read)
    tables = read_tables(
        read,
        config.table_names(read),
        config.hidden,
        sources=encoder.vocab_size,
        targets=decoder.vocab_size,
    )
    bias = parts.output_bias()
    return Bart(
        source_embedding=parts.embedding("encoder", tables.source),
        encoder_layers=tuple(
            BartEncoderLayer(parts.attention(at), parts.mlp(at, encoder))
            for at in _layer_names("encoder", encoder)
        ),
        encoder_norm=parts.last_norm("encoder"),
        encoder_heads=_heads(config, encoder),
        target_embedding=parts.embedding("decoder", tables.target),
        decoder_layers=tuple(
            BartDecoderLayer(
                parts.attention(at), parts.source_attention(at), parts.mlp(at, decoder)
            )
            for at in _layer_names("decoder", decoder)
        ),
        decoder_norm=parts.last_norm("decoder"),
        attention_heads=_heads(config, decoder),
        output=read.computed(
            lambda: suppress_tokens(
                Linear(tables.output_weight, _unless_zero(bias)), head.masked_tokens
            )
        ),
    )


class _BartReader:
    """Reads the parts of the model by their names in a checkpoint."""

    def __init__(self, config: BartConfig, read: Reader) -> None:
        self._config = config
        self._read = read

    def embedding(self, stack: str, table: Tensor) -> BartEmbedding:
        config = self._config
        name = f"model.{stack}.layernorm_embedding"
        has_norm = config.options.has_embedding_norm
        return BartEmbedding(
            token_table=table,
            position_table=self._positions(stack, table),
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
        # a checkpoint may leave out a bias of zeros
        name, size = "final_logits_bias", self._config.decoder.vocab_size
        if not self._config.options.has_output_bias or name not in self._read:
            return None
        return self._read.tensor(name, 1, size)

    def _positions(self, stack: str, table: Tensor) -> Tensor:
        config, read = self._config, self._read
        rows, hidden, first = config.positions, config.hidden, config.first_position
        match config.options.positions:
            case "learned":
                name = f"model.{stack}.embed_positions.weight"
                learned = read.tensor(name, rows + LEARNED_OFFSET, hidden)
                return read.computed(lambda: learned[LEARNED_OFFSET:])
            case "marian":
                return read.computed(lambda: marian_positions(rows, hidden).to(table))
            case "m2m":
                return read.computed(lambda: m2m_positions(rows, hidden, first=first).to(table))

    def _linears(self, at: str, *parts: str) -> Linear:
        hidden = self._config.hidden
        names = [f"{at}.{part}" for part in parts]
        return self._read.linear(names, hidden, [hidden] * len(names))

    def _norm(self, of: str) -> Norm:
        return self._read.norm(f"{of}_layer_norm", self._config.hidden)


def _unless_zero(bias: Tensor | None) -> Tensor | None:
    return bias[0] if bias is not None and bool(bias.any()) else None


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


def _read_sizes(config: Json) -> ModelSizes:
    read = BartConfig.read(config)
    return ModelSizes(read.hidden, read.positions)


# Tables of computed positions, which old releases saved.
_COMPUTED = frozenset(
    f"model.{stack}.embed_positions.{tensor}"
    for stack in ("encoder", "decoder")
    for tensor in ("weight", "weights")
)


def _family(name: str, tokenizer_class: str) -> Family[Bart]:
    options = OPTIONS[name]
    computed = () if options.positions == "learned" else _COMPUTED
    return Family(
        architectures={options.head: "translate"},
        heads={"translate": options.head},
        fields=seq2seq_fields.RULES.plus(
            {*BartConfig.names(), "vocab_size", *options.fields},
            # of training, and of heads that are not served
            "activation_dropout attention_dropout classifier_dropout decoder_layerdrop dropout encoder_layerdrop"
            " id2label init_std num_labels".split(),
            options.fixed_fields,
        ),
        read_sizes=_read_sizes,
        load=load,
        # copies of one table
        is_unused=lambda name, _: name == "model.shared.weight" or name in computed,
        tokenizer_class=tokenizer_class,
        kind="encoder_decoder",
    )


FAMILIES: Mapping[str, Family[Bart]] = {
    "bart": _family("bart", "BartTokenizer"),
    "mbart": _family("mbart", "MBartTokenizer"),
    "marian": _family("marian", "MarianTokenizer"),
    "m2m_100": _family("m2m_100", "M2M100Tokenizer"),
}
