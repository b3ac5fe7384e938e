"""Post-norm encoders, BERT and its relatives: what their checkpoints share, and where they differ.

A family is a `PostNormFamily`: how it names the sizes in config.json, and how it names its tensors. Every field of
config.json that can change a result is either read or refused; see docs/decisions/0014-config-fields.md. All have the
forward pass of `PostNormEncoder`.
Source: Devlin et al. 2018, arXiv:1810.04805 (post-norm layers of Vaswani et al. 2017, arXiv:1706.03762).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.attention import alibi_by_distance, bias_by_distance, rotary_table
from varlen.models.blocks.heads import HeadActivation, Heads
from varlen.models.blocks.layer_parts import Experts, FeedForward
from varlen.models.checkpoint import config_fields
from varlen.models.checkpoint.family import (
    Family,
    HeadConfig,
    MaskedLMLayout,
    MaskedLMNames,
    encoder_classes,
)
from varlen.models.checkpoint.files import (
    ACTIVATIONS,
    Json,
    check_multiple,
    read_choice,
    read_computed_positions,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
)
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm, TokenTable
from varlen.models.checkpoint.rotary_config import RotaryConfig, read_rotary
from varlen.models.checkpoint.weights import ADAPTER_FIELDS, weight_of_factor
from varlen.program.rank import ALONE, AttentionHeads
from varlen_kernels import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.program.program import Value
    from varlen.program.recorder import Recorder


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of fields in config.json, empty for one that is absent; and defaults."""

    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    types: str = "type_vocab_size"
    embedding: str = ""
    activation: str = "hidden_act"
    norm_eps: str = "layer_norm_eps"
    default_activation: str = "gelu"
    default_norm_eps: float = 1e-12

    def all(self) -> frozenset[str]:
        names = {self.hidden, self.inner, self.layers, self.heads, self.types, self.embedding}
        names = {*names, self.activation, self.norm_eps} - {""}
        return frozenset(names | {"max_position_embeddings", "vocab_size"})


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of the tensors of a layer, below the layer's own name.

    Attributes:
        name: name of the layer, with a place for its number unless all share one.
        qkv: queries, keys and values, or one linear layer of all.
        up: layer in front of the activation: one linear layer; or a gate, whose activation multiplies the second one.
        gate: the half of the one layer of `up` that is a gate for the other half; None if that layer holds no gate.
        query_norm, key_norm: norms over the queries of all heads, and over the keys; empty without them.
        second_norm: norm of the sum of the attention's output and its input again; empty without it.
    """

    name: str = "encoder.layer.{}"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    gate: Literal["first", "second"] | None = None
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"
    without_bias: tuple[str, ...] = ()
    query_norm: str = ""
    key_norm: str = ""
    second_norm: str = ""

    @property
    def is_gated(self) -> bool:
        return self.gate is not None or len(self.up) > 1

    def has_bias(self, name: str) -> bool:
        return name not in self.without_bias


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors of experts, below the layer's own name, and of fields.

    Attributes:
        up, down: tensors of all experts of a layer, each with a row for every feature between the two layers.
        every: the field that says which layers have experts: one of as many, from the second layer on.
    """

    router: str
    up: str
    down: str
    bias: str
    number: str
    count: str
    every: str

    @property
    def fields(self) -> tuple[str, ...]:
        return self.number, self.count, self.every


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The classifier of sequences: a dense layer of the first token, then an output layer."""

    dense: str = "classifier.dense"
    output: str = "classifier.out_proj"
    activation: HeadActivation = "tanh"


_RULES = config_fields.ENCODER.plus(
    (),
    # training
    ("tie_word_embeddings",),
    {
        "add_cross_attention": False,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "position_embedding_type": "absolute",
        "pruned_heads": {},
    },
)
# Rows of a table of relative positions, and the distance from which on all share the last one.
DISTANCE_BUCKETS = 32
MAX_DISTANCE = 128

_ROTARY_FIELDS = frozenset("head_dim rope_parameters rope_scaling rope_theta".split())
_WORDS = "embeddings.word_embeddings.weight"
# Tensors of other heads, and tables that transformers computes.
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids")
_OTHER_HEADS = tuple(
    f"{layer}.{part}"
    for layer in ("classifier", "classifier.dense", "classifier.out_proj", "qa_outputs")
    for part in ("weight", "bias")
)


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """Sizes and settings that config.json gives; see `ModelSizes`.

    Attributes:
        first_position: row of the first token in the position table. Above 0, the row before it belongs to the padding
            token, whose id is the number of that row.
        types: rows of the table of token types; 0 without one.
        rotary: the rotary positions; None with a position table.
        experts: experts of a layer, and experts of a token.
    """

    hidden: int
    positions: int
    first_position: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    types: int
    rotary: RotaryConfig | None
    embedding: int
    activation: Activation
    norm_eps: float
    experts: tuple[int, int] = (0, 0)
    expert_layers: Collection[int] = ()

    @property
    def uncounted_token(self) -> int | None:
        return self.first_position - 1 if self.first_position else None


@dataclass(frozen=True, slots=True)
class PostNormFamily:
    """One family of post-norm encoders.

    Attributes:
        prefix: prefix of the encoder's tensors in a model with a head.
        projection: the linear layer from the tables' features to the features of the layers, where they may differ.
        least_types: fewest token types; 0 if there may be no table of them.
        distance_bias: the table of relative positions, `[DISTANCE_BUCKETS, heads]`.
        has_alibi: whether scores fall with the distance, and there is no position table.
        first_position: row of the first token in the position table; None if it follows `pad_token_id`.
    """

    class_name: str
    prefix: str
    head: HeadNames
    masked_lm: MaskedLMNames
    embedding_norm: str = "embeddings.LayerNorm"
    layer: LayerNames = LayerNames()
    other_layer: LayerNames | None = None
    other_embedding_norm: str = ""
    fields: FieldNames = FieldNames()
    projection: str = ""
    always_projects: bool = False
    first_prefix: str = ""
    least_types: int = 1
    distance_bias: str = ""
    has_alibi: bool = False
    first_position: int | None = 0
    default_theta: float | None = None
    pretraining: tuple[str, ...] = ("cls.", "lm_head.")
    more_architectures: tuple[str, ...] = ()
    experts: ExpertNames | None = None
    has_adapters: bool = False
    harmless: Collection[str] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    tokenizer_class: str = "BertTokenizer"

    @property
    def family(self) -> Family[PostNormEncoder]:
        """What is known of its checkpoints."""
        architectures, heads = encoder_classes(self.class_name, *self.more_architectures)
        rotary = () if self.default_theta is None else _ROTARY_FIELDS
        of_adapters = ADAPTER_FIELDS if self.has_adapters else ()
        of_experts = self.experts.fields if self.experts else ()
        return Family(
            architectures=architectures,
            heads=heads,
            fields=_RULES.plus(
                {*self.fields.all(), *rotary, *of_adapters, *of_experts},
                self.harmless,
                self.fixed,
            ),
            read_sizes=self.read_sizes,
            load=self.load,
            is_unused=self._is_unused,
            tokenizer_class=self.tokenizer_class,
            has_token_types=bool(self.fields.types),
            masked_lm=self._masked_lm_layout,
            own_transformer="custom_st.Transformer" if self.has_adapters else "",
            names_layers=True,
            is_divisible=True,
        )

    def read_sizes(self, config: Json) -> EncoderSizes:
        """Return the sizes; raise CheckpointError unless config.json describes an encoder that is served."""
        names = self.fields
        rotary = None
        if self.default_theta is not None:
            rotary = read_rotary(config, default_theta=self.default_theta)
        hidden, heads = self._read_heads(config)
        first = self.first_position
        if first is None:
            first = read_int(config, "pad_token_id", default=1, lowest=0) + 1
        rows = read_int(config, "max_position_embeddings", lowest=first + 1)
        if self.has_alibi:
            rows = read_computed_positions(config)
        layers = read_layers(config, names.layers, lowest=0)
        experts, expert_layers = self._read_experts(config, layers)
        return EncoderSizes(
            hidden=hidden,
            positions=rows - first if rotary is None else rotary.positions,
            inner=read_int(config, names.inner),
            layers=layers,
            heads=heads,
            vocabulary=read_int(config, "vocab_size"),
            types=read_int(config, names.types, lowest=self.least_types) if names.types else 0,
            first_position=first,
            rotary=rotary,
            embedding=read_int(config, names.embedding) if names.embedding else hidden,
            activation=read_choice(
                config, names.activation, ACTIVATIONS, default=names.default_activation
            ),
            norm_eps=read_norm_eps(config, names.norm_eps, default=names.default_norm_eps),
            experts=experts,
            expert_layers=expert_layers,
        )

    def _read_experts(self, config: Json, layers: int) -> tuple[tuple[int, int], range]:
        names = self.experts
        if names is None:
            return (0, 0), range(0)
        number, count = read_int(config, names.number), read_int(config, names.count)
        if count > number:
            raise CheckpointError(
                f"config.json has {names.count} {count}; allowed: at most {number}, the experts of a layer"
            )
        every = read_int(config, names.every, lowest=2)
        return (number, count), range(1, layers, every)

    def _masked_lm_layout(self, config: Json) -> MaskedLMLayout:
        sizes = self.read_sizes(config)
        return MaskedLMLayout(
            self.masked_lm,
            sizes.hidden,
            sizes.embedding,
            sizes.vocabulary,
            self.masked_lm.activation or sizes.activation,
            sizes.norm_eps,
            is_tied=read_flag(config, "tie_word_embeddings", default=True),
        )

    def _read_heads(self, config: Json) -> tuple[int, int]:
        names = self.fields
        hidden, heads = read_int(config, names.hidden), read_int(config, names.heads)
        check_multiple(config, names.hidden, names.heads)
        head_dim = hidden // heads
        if config.get("head_dim") not in (None, head_dim):
            raise CheckpointError(
                f"config.json has head_dim {config['head_dim']}; allowed: {head_dim}, {names.hidden} / {names.heads}"
            )
        if self.default_theta is not None and head_dim % 2:
            raise CheckpointError(
                f"heads have {head_dim} features; allowed: even numbers, for rotary positions"
            )
        return hidden, heads

    def load(self, read: LayerReader, config: Json, head: HeadConfig) -> PostNormEncoder:
        return _Reader(self._as_stored(read), self.read_sizes(config), read).model(head)

    def _as_stored(self, tensors: Container[str]) -> PostNormFamily:
        other = self.other_layer
        if other is None:
            return self
        last = f"{self.prefix_of(tensors)}{other.name.format(0)}.{other.output_norm}.weight"
        if last not in tensors:
            return self
        norm = self.other_embedding_norm or self.embedding_norm
        return replace(self, layer=other, embedding_norm=norm)

    def _is_unused(self, name: str, stored: Container[str]) -> bool:
        prefix = self.prefix_of(stored)
        pooler = "pooler" if f"{prefix}pooler.weight" in stored else "pooler.dense"
        unused = (*_UNUSED, f"{pooler}.weight", f"{pooler}.bias")
        return (
            name in _OTHER_HEADS
            or (self.has_adapters and weight_of_factor(name) is not None)
            or name.startswith(self.pretraining)
            or name in {f"{prefix}{each}" for each in unused}
        )

    def prefix_of(self, tensors: Container[str]) -> str:
        """Return the prefix of the encoder's tensor names; models with a head have one."""
        names = [name for name in (self.prefix, self.first_prefix) if name]
        return next((name for name in names if f"{name}{_WORDS}" in tensors), "")


class _Reader:
    def __init__(self, family: PostNormFamily, sizes: EncoderSizes, read: LayerReader) -> None:
        self._family = family
        self._sizes = sizes
        self._read = read
        self._prefix = family.prefix_of(read)

    def model(self, head: HeadConfig) -> PostNormEncoder:
        family, sizes, rotary = self._family, self._sizes, self._sizes.rotary
        heads = self._read.heads(
            AttentionHeads(sizes.heads, sizes.heads, sizes.hidden // sizes.heads)
        )
        tokens = self._read.token_table(self._table_name("word"), sizes.vocabulary, sizes.embedding)
        return PostNormEncoder(
            token_table=tokens,
            position_table=None if rotary or family.has_alibi else self._positions(),
            cos_sin=(
                self._read.computed(lambda: rotary_table(rotary, heads.dim, tokens.device))
                if rotary
                else None
            ),
            type_table=(
                self._table("token_type", sizes.types)
                if sizes.types
                else self._read.computed(lambda: tokens.weight.new_zeros(1, sizes.embedding))
            ),
            embedding_norm=self._norm(family.embedding_norm, sizes.embedding),
            projection=self._projection(),
            distance_bias=self._distance_bias(tokens),
            layers=self._layers(),
            attention_heads=heads,
            activation=sizes.activation,
            norm_eps=sizes.norm_eps,
            heads=self._heads(head),
        )

    def _table(self, name: str, rows: int) -> Tensor:
        return self._read.tensor(self._table_name(name), rows, self._sizes.embedding)

    def _table_name(self, name: str) -> str:
        return f"{self._prefix}embeddings.{name}_embeddings.weight"

    def _positions(self) -> Tensor:
        first = self._sizes.first_position
        table = self._table("position", first + self._sizes.positions)
        return self._read.computed(lambda: table[first:])

    def _norm(self, name: str, size: int) -> Norm:
        return self._read.norm(f"{self._prefix}{name}", size)

    def _projection(self) -> Linear | None:
        sizes, family = self._sizes, self._family
        may_differ = bool(family.projection)
        if not may_differ or not (family.always_projects or sizes.embedding != sizes.hidden):
            return None
        name = f"{self._prefix}{family.projection}"
        return self._read.linear([name], sizes.embedding, [sizes.hidden])

    def _distance_bias(self, tokens: TokenTable) -> Tensor | None:
        sizes, name = self._sizes, self._family.distance_bias
        if self._family.has_alibi:
            return self._read.computed(
                lambda: alibi_by_distance(sizes.heads, sizes.positions - 1).to(tokens.device)
            )
        if not name:
            return None
        table = self._read.head_columns(
            f"{self._prefix}{name}.weight", DISTANCE_BUCKETS, sizes.heads
        )
        return self._read.computed(
            lambda: bias_by_distance(table, max_distance=MAX_DISTANCE, is_causal=False)
        )

    def _layers(self) -> tuple[PostNormLayer, ...]:
        family, sizes = self._family, self._sizes
        names = [family.layer.name.format(index) for index in range(sizes.layers)]
        own = list(dict.fromkeys(names))
        read = self._read.layers(
            len(own),
            lambda reader, index: _Reader(family, sizes, reader)._layer(own[index], index),
        )
        layers = [read[own.index(name)] for name in names]
        if layers:
            # not of a shared layer's other uses
            name = f"{self._prefix}{names[-1]}.{family.layer.output_norm}"
            layers[-1] = replace(layers[-1], output_norm=self._read.last.norm(name, sizes.hidden))
        return tuple(layers)

    def _layer(self, name: str, number: int) -> PostNormLayer:
        hidden, inner, names = self._sizes.hidden, self._sizes.inner, self._family.layer
        at = f"{self._prefix}{name}"

        def outputs(features: int, count: int, *parts: str, heads: int | None = None) -> Linear:
            """Return `count` outputs of as many features, in one tensor or more."""
            each = count // len(parts)
            # codes of outputs that change places do not stay
            read = self._read.floats if parts == names.up and names.gate == "second" else self._read
            return read.linear(
                [f"{at}.{part}" for part in parts],
                hidden,
                [each * features] * len(parts),
                bias=names.has_bias(parts[0]),
                split="outputs",
                units=None if heads is None else [heads] * len(parts),
                parts=each,
            )

        def sums(fan_in: int, part: str) -> Linear:
            bias = names.has_bias(part)
            return self._read.linear([f"{at}.{part}"], fan_in, [hidden], bias=bias, split="inputs")

        def norm(name: str) -> Norm | None:
            return self._read.norm(f"{at}.{name}", hidden) if name else None

        query_norm, key_norm = norm(names.query_norm), norm(names.key_norm)
        qkv: Linear | NormedHeads
        if query_norm is None or key_norm is None:
            qkv = outputs(hidden, 3, *names.qkv, heads=self._sizes.heads)
        else:
            query, key, value = (outputs(hidden, 1, part) for part in names.qkv)
            eps = self._sizes.norm_eps
            qkv = NormedHeads(query, key, value, query_norm, key_norm, eps)
        attention_output = sums(hidden, names.attention_output)
        attention_norm = self._read.norm(f"{at}.{names.attention_norm}", hidden)
        mlp: FeedForward | Experts
        if self._family.experts is not None and number in self._sizes.expert_layers:
            mlp = self._experts(self._family.experts, at)
        else:
            up = outputs(inner, 1 + names.is_gated, *names.up)
            up = self._read.computed(lambda: _gate_first(up)) if names.gate == "second" else up
            mlp = FeedForward(up, sums(inner, names.down), names.is_gated)
        return PostNormLayer(
            qkv=qkv,
            attention_output=attention_output,
            attention_norm=attention_norm,
            second_norm=norm(names.second_norm),
            mlp=mlp,
            output_norm=self._read.norm(f"{at}.{names.output_norm}", hidden),
        )

    def _experts(self, names: ExpertNames, at: str) -> Experts:
        read, hidden, inner = self._read, self._sizes.hidden, self._sizes.inner
        number, count = self._sizes.experts
        bias = read.tensor(f"{at}.{names.bias}", hidden)
        return Experts(
            router=read.fp32.linear([f"{at}.{names.router}"], hidden, [number], bias=False),
            up=read.stacked_group_linear(
                f"{at}.{names.up}", number, hidden, inner, split="outputs"
            ),
            down=read.stacked_group_linear(
                f"{at}.{names.down}", number, inner, hidden, split="inputs"
            ),
            count=count,
            normalizes=False,
            is_gated=False,
            # one rank adds it
            bias=None if read.rank.number else bias,
        )

    def _heads(self, head: HeadConfig) -> Heads:
        hidden, read, names = self._sizes.hidden, self._read.last, self._family.head
        if head.task == "classify":
            return Heads(
                dense=read.linear([self._head_dense()], hidden, [hidden]),
                activation=names.activation,
                classifier=read.linear([names.output], hidden, [head.num_labels]),
            )
        if head.task in ("token_classify", "question_answer"):
            name = "classifier" if head.task == "token_classify" else "qa_outputs"
            return Heads(classifier=read.linear([name], hidden, [head.num_labels]))
        return Heads()

    def _head_dense(self) -> str:
        """Return the classifier's dense layer, which may be a part of the encoder."""
        name, inside = self._family.head.dense, self._family.prefix
        is_inside = name.startswith(inside) and bool(self._prefix)
        return self._prefix + name.removeprefix(inside) if is_inside else name


def _gate_first(layer: Linear) -> Linear:
    """Return a linear layer with the halves of its outputs exchanged."""
    half = layer.weight.shape[1] // 2
    bias = None if layer.bias is None else layer.bias.roll(half)
    return replace(layer, weight=layer.weight.roll(half, 1), bias=bias)


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
        bounds = inputs.cu_seqlens(ops)
        context = ops.attention_varlen(qkv, bounds, self.attention_heads, self.distance_bias)
        attended = layer.attention_output.record(ops, context)
        before, x = x, self._add_norm(ops, attended, x, layer.attention_norm)
        if layer.second_norm is not None:
            x = self._add_norm(ops, x, before, layer.second_norm)
        given = layer.mlp.record(ops, x, self.activation)
        return self._add_norm(ops, given, x, layer.output_norm)

    def _add_norm(self, ops: Recorder, x: Value, residual: Value, norm: Norm) -> Value:
        return ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=self.norm_eps)
