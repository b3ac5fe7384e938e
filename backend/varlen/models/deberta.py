"""DeBERTa, versions 1 to 3, over packed tokens.

Post-norm layers whose scores have products with distances ("disentangled attention"): of a query with the key of its
distance to a token, and of the token's key with the query of that distance. Keys and queries of distances are
projections of learned embeddings, so they are computed when the model is loaded. Large models of version 2 also have a
convolution beside their first layer.
Source: He et al. 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.heads import HeadActivation, Heads
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.family import (
    BERT_MASKED_LM,
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
    read_computed_positions,
    read_flag,
    read_int,
    show,
)
from varlen.models.checkpoint.layers import LayerReader, Linear, Norm, TokenTable
from varlen.program.rank import AttentionHeads
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


# What a distance is multiplied with: a query (content to position), or a key (position to content).
DistanceTerm: TypeAlias = Literal["c2p", "p2c"]

_TERMS: tuple[DistanceTerm, ...] = ("c2p", "p2c")
# The linear layer that makes the table of a term: of a layer's own, or shared with tokens.
_PROJECTIONS: Mapping[DistanceTerm, tuple[str, str]] = {
    "c2p": ("pos_key_proj", "key_proj"),
    "p2c": ("pos_query_proj", "query_proj"),
}
# The layers that make them in the first version; the one for keys has no bias.
_FIRST_PROJECTIONS: Mapping[DistanceTerm, str] = {"c2p": "pos_proj", "p2c": "pos_q_proj"}
# The head of masked language models that DeBERTa was trained with; others have the head of BERT ("legacy").
_OWN_HEAD = MaskedLMNames(
    dense="lm_predictions.lm_head.dense",
    norm="lm_predictions.lm_head.LayerNorm",
    decoder="deberta.embeddings.word_embeddings",
    biases=("lm_predictions.lm_head.bias",),
)
# Heads of other tasks, and of pretraining.
_ACTIVATIONS: Mapping[str, HeadActivation] = {**ACTIVATIONS, "tanh": "tanh"}
_HEADS = ("pooler.", "classifier.", "cls.", "lm_predictions.", "mask_predictions.", "qa_outputs.")
# Beside the layers, what only some configurations read.
_OPTIONAL = tuple(
    f"{prefix}{name}."
    for prefix in ("deberta.", "")
    for name in ("embeddings.position_embeddings", "encoder.rel_embeddings", "encoder.LayerNorm")
)


def _read_heads(config: Json) -> int:
    hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    check_multiple(config, "hidden_size", "num_attention_heads")
    _check_size(config, "attention_head_size", hidden // heads)
    _check_size(config, "pooler_hidden_size", hidden)
    return heads


def _check_size(config: Json, key: str, allowed: int) -> None:
    if config.get(key) not in (None, allowed):
        raise CheckpointError(f"config.json has {key} {show(config[key])}; allowed: {allowed}")


def _read_max_distance(config: Json) -> int:
    furthest = read_int(config, "max_relative_positions", default=-1, lowest=-1)
    return read_computed_positions(config) if furthest < 1 else furthest


def _read_buckets(config: Json) -> int:
    furthest = _read_max_distance(config)
    buckets = max(0, read_int(config, "position_buckets", default=-1, lowest=-1))
    if buckets and not 1 < buckets // 2 < furthest - 1:
        raise CheckpointError(
            f"config.json has position_buckets {buckets}; allowed: -1 (none), or 4 to {2 * furthest - 3} for distances"
            f" up to {furthest}"
        )
    return buckets


def _read_terms(config: Json) -> tuple[DistanceTerm, ...]:
    given = config.get("pos_att_type") or []
    names = given.lower().split("|") if isinstance(given, str) else given
    names = [str(name).strip() for name in names] if isinstance(names, list) else [""]
    if not set(names) <= set(_TERMS):
        raise CheckpointError(
            f"config.json has pos_att_type {show(given)}; allowed: {', '.join(_TERMS)}"
        )
    return tuple(term for term in _TERMS if term in names)


def _read_used_terms(config: Json) -> tuple[DistanceTerm, ...]:
    terms = _read_terms(config)
    return terms if read_flag(config, "relative_attention", default=False) else ()


def _read_scale(config: Json) -> float:
    # the terms count without relative positions too
    head_dim = config["hidden_size"] // _read_heads(config)
    return float((head_dim * (1 + len(_read_terms(config)))) ** -0.5)


def _read_distance_norm(config: Json) -> bool:
    given = config.get("norm_rel_ebd") or "none"
    names = {name.strip() for name in str(given).lower().split("|")}
    if not names <= {"none", "layer_norm"}:
        raise CheckpointError(
            f"config.json has norm_rel_ebd {show(given)}; allowed: none, layer_norm"
        )
    return "layer_norm" in names


def _read_window(config: Json) -> int:
    # null is none
    size = read_int(
        {"conv_kernel_size": config.get("conv_kernel_size") or 0}, "conv_kernel_size", lowest=0
    )
    if size and not size % 2:
        raise CheckpointError(
            f"config.json has conv_kernel_size {size}; allowed: 0 (no convolution), or odd numbers"
        )
    return size


@dataclass(frozen=True, slots=True)
class DebertaConfig(declare.ConfigFields):
    """What config.json says of a model.

    Attributes:
        embedding: features of the tables; there is a projection if they are not `hidden`.
        max_distance: distances from there on are alike.
        buckets: near distances have a row each, and farther ones share rows, by their logarithm; 0: all have one.
        window: tokens of a window of the convolution; 0: it has none.
    """

    heads: int = declare.computed(
        _read_heads, "num_attention_heads", "attention_head_size", "pooler_hidden_size"
    )
    positions: int = declare.computed(read_computed_positions, "max_position_embeddings")
    max_distance: int = declare.computed(_read_max_distance, "max_relative_positions")
    buckets: int = declare.computed(_read_buckets, "position_buckets")
    terms: tuple[DistanceTerm, ...] = declare.computed(
        _read_used_terms, "pos_att_type", "relative_attention"
    )
    vocabulary: int = declare.size("vocab_size")
    hidden: int = declare.size("hidden_size")
    embedding: int = declare.computed(
        lambda config: read_int(config, "embedding_size", default=config["hidden_size"]),
        "embedding_size",
    )
    inner: int = declare.size("intermediate_size")
    layers: int = declare.layers("num_hidden_layers")
    has_position_table: bool = declare.flag("position_biased_input", default=True)
    shares_projections: bool = declare.flag("share_att_key")
    has_distance_norm: bool = declare.computed(_read_distance_norm, "norm_rel_ebd")
    scale: float = declare.computed(_read_scale)
    activation: Activation = declare.activation("hidden_act")
    classifier_activation: HeadActivation = declare.choice(
        "pooler_hidden_act", _ACTIVATIONS, "gelu"
    )
    window: int = declare.computed(_read_window, "conv_kernel_size")
    window_activation: HeadActivation = declare.choice("conv_act", _ACTIVATIONS, "tanh")
    norm_eps: float = declare.epsilon("layer_norm_eps", 1e-7)

    @property
    def span(self) -> int:
        """Half of the rows of the table of distances."""
        return self.buckets or self.max_distance


def load(
    read: LayerReader, fields: Json, head: HeadConfig, *, is_first_version: bool = False
) -> Deberta:
    """Return the DeBERTa of a checkpoint; see `Family`."""
    reader = _FirstReader if is_first_version else _Reader
    return reader(read, DebertaConfig.read(fields)).model(head)


def distance_rows(config: DebertaConfig) -> Tensor:
    """Return the row of each distance in a table of distances, `[2 * positions - 1]` int32.

    Entry positions - 1 + d belongs to a key d tokens after its query.
    """
    import torch

    # row 0 belongs to the furthest key after a query
    before = -torch.arange(1 - config.positions, config.positions)
    if config.buckets:
        middle = config.buckets // 2
        # in fp32, as transformers: rounding decides the bucket of distance max_distance - 1
        whole = torch.log(torch.tensor((config.max_distance - 1) / middle))
        part = torch.log((before.abs() / middle).clamp_min(1)) / whole
        bucket = (torch.ceil(part * (middle - 1)) + middle).long() * before.sign()
        before = torch.where(before.abs() <= middle, before, bucket)
    return (before + config.span).clamp(0, 2 * config.span - 1).int()


class _Reader:
    def __init__(self, read: LayerReader, config: DebertaConfig) -> None:
        self._read = read
        self._config = config
        is_inside = "deberta.embeddings.word_embeddings.weight" in read
        self._prefix = "deberta." if is_inside else ""

    def model(self, head: HeadConfig) -> Deberta:
        config, at = self._config, f"{self._prefix}embeddings"
        hidden, embedding = config.hidden, config.embedding

        tokens = self._read.token_table(
            f"{at}.word_embeddings.weight", config.vocabulary, embedding
        )
        positions = None
        if config.has_position_table:
            name = f"{at}.position_embeddings.weight"
            positions = self._read.tensor(name, config.positions, embedding)
        projection = None
        if embedding != hidden:
            projection = self._read.linear([f"{at}.embed_proj"], embedding, [hidden], bias=False)
        return Deberta(
            token_table=tokens,
            position_table=positions,
            projection=projection,
            embedding_norm=self._read.norm(f"{at}.LayerNorm", hidden),
            layers=self._layers(tokens.weight),
            convolution=self._convolution() if config.window else None,
            attention_heads=AttentionHeads(config.heads, config.heads, hidden // config.heads),
            activation=config.activation,
            norm_eps=config.norm_eps,
            scale=config.scale,
            heads=self._heads(head),
        )

    def _layers(self, tokens: Tensor) -> tuple[DebertaLayer, ...]:
        config = self._config
        names = [f"{self._prefix}encoder.layer.{index}" for index in range(config.layers)]
        if not config.terms:
            return tuple(self._layer(at, None, is_last=at == names[-1]) for at in names)
        embeddings = self._distance_embeddings()
        rows = self._read.computed(lambda: distance_rows(config).to(tokens.device))

        def table(at: str, term: DistanceTerm) -> Tensor | None:
            if term not in config.terms:
                return None
            layer = self._projection(f"{at}.attention.self", term)
            return self._read.computed(lambda: _projected(embeddings, layer).to(tokens.dtype))

        def distances(at: str) -> Distances:
            keys, queries = table(at, "c2p"), table(at, "p2c")
            return self._read.computed(lambda: _distances(rows, keys, queries))

        return tuple(self._layer(at, distances(at), is_last=at == names[-1]) for at in names)

    def _layer(self, at: str, distances: Distances | None, *, is_last: bool) -> DebertaLayer:
        hidden, inner, read = self._config.hidden, self._config.inner, self._read
        # the norm of the convolution follows the only layer
        is_last = is_last and not (self._config.window and self._config.layers == 1)
        return DebertaLayer(
            qkv=self._heads_of(f"{at}.attention.self"),
            distances=distances,
            attention_output=read.linear([f"{at}.attention.output.dense"], hidden, [hidden]),
            attention_norm=read.norm(f"{at}.attention.output.LayerNorm", hidden),
            up=read.linear([f"{at}.intermediate.dense"], hidden, [inner]),
            down=read.linear([f"{at}.output.dense"], inner, [hidden]),
            output_norm=(read.last if is_last else read).norm(f"{at}.output.LayerNorm", hidden),
        )

    def _heads_of(self, at: str) -> Linear:
        hidden = self._config.hidden
        names = [f"{at}.{name}_proj" for name in ("query", "key", "value")]
        return self._read.linear(names, hidden, [hidden] * 3)

    def _projection(self, at: str, term: DistanceTerm) -> Linear:
        hidden = self._config.hidden
        name = _PROJECTIONS[term][self._config.shares_projections]
        return self._read.fp32.linear([f"{at}.{name}"], hidden, [hidden])

    def _convolution(self) -> Convolution:
        config, read, at = self._config, self._read, f"{self._prefix}encoder.conv"
        hidden = config.hidden
        weight = read.tensor(f"{at}.conv.weight", hidden, hidden, config.window)
        return Convolution(
            linear=Linear(
                # [out, in, row] to [row, in, out]
                read.computed(lambda: weight.permute(2, 1, 0).reshape(-1, hidden).contiguous()),
                read.tensor(f"{at}.conv.bias", hidden),
            ),
            size=config.window,
            activation=config.window_activation,
            norm=(read.last if config.layers == 1 else read).norm(f"{at}.LayerNorm", hidden),
        )

    def _distance_embeddings(self) -> Tensor:
        """Return the embeddings of distances, `[2 * span, hidden]` fp32."""
        # products of weights are rounded once
        config, exact, at = self._config, self._read.fp32, f"{self._prefix}encoder"
        embeddings = exact.tensor(f"{at}.rel_embeddings.weight", 2 * config.span, config.hidden)
        if not config.has_distance_norm:
            return embeddings
        norm = exact.norm(f"{at}.LayerNorm", config.hidden)
        return self._read.computed(lambda: _normed(embeddings, norm, config.norm_eps))

    def _heads(self, head: HeadConfig) -> Heads:
        hidden, read = self._config.hidden, self._read.last
        if head.task not in ("classify", "token_classify", "question_answer"):
            return Heads()
        name = "qa_outputs" if head.task == "question_answer" else "classifier"
        dense = None
        if head.task == "classify":
            dense = read.linear(["pooler.dense"], hidden, [hidden])
        return Heads(
            dense=dense,
            activation=self._config.classifier_activation,
            classifier=read.linear([name], hidden, [head.num_labels]),
        )


class _FirstReader(_Reader):
    """Reads a DeBERTa of version 1, whose heads have one layer for all."""

    def _heads_of(self, at: str) -> Linear:
        hidden, heads, read = self._config.hidden, self._config.heads, self._read
        stored = read.tensor(f"{at}.in_proj.weight", 3 * hidden, hidden)
        queries, values = (read.tensor(f"{at}.{name}_bias", hidden) for name in ("q", "v"))
        return read.computed(lambda: _by_kind(stored, queries, values, heads))

    def _projection(self, at: str, term: DistanceTerm) -> Linear:
        hidden, name = self._config.hidden, f"{at}.{_FIRST_PROJECTIONS[term]}"
        return self._read.fp32.linear([name], hidden, [hidden], bias=term == "p2c")


def _by_kind(weight: Tensor, query_bias: Tensor, value_bias: Tensor, heads: int) -> Linear:
    """Return the layer of all queries, then all keys, then all values.

    Args:
        weight: `[3 * hidden, hidden]`: the queries of a head, its keys, its values; then the next head.
        query_bias, value_bias: `[hidden]`; keys have none.
    """
    import torch

    hidden = weight.shape[1]
    by_kind = weight.view(heads, 3, -1, hidden).transpose(0, 1).reshape(3 * hidden, hidden)
    bias = torch.cat([query_bias, torch.zeros_like(query_bias), value_bias])
    return Linear(by_kind.t().contiguous(), bias)


def _distances(rows: Tensor, keys: Tensor | None, queries: Tensor | None) -> Distances:
    from varlen_kernels.reference.attention import Distances

    return Distances(rows, keys, queries)


def _normed(x: Tensor, norm: Norm, eps: float) -> Tensor:
    from torch.nn.functional import layer_norm

    return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)


def _projected(x: Tensor, layer: Linear) -> Tensor:
    from torch.nn.functional import linear

    return linear(x, layer.weight.t(), layer.bias)


def _masked_lm(config: Json) -> MaskedLMLayout:
    read = DebertaConfig.read(config)
    is_legacy = read_flag(config, "legacy", default=True)
    return MaskedLMLayout(
        BERT_MASKED_LM if is_legacy else _OWN_HEAD,
        read.hidden,
        read.embedding,
        read.vocabulary,
        read.activation,
        read.norm_eps,
        is_tied=not is_legacy or read_flag(config, "tie_word_embeddings", default=True),
    )


_MASKED_LM_FIELDS = frozenset({"legacy", "tie_word_embeddings"})
_FIXED = {"is_decoder": False, "is_encoder_decoder": False, "type_vocab_size": 0}
# Fields that version 1 does not read.
_LATER_FIELDS = frozenset(
    "attention_head_size conv_act conv_kernel_size norm_rel_ebd position_buckets share_att_key".split()
)

_ARCHITECTURES, _HEAD_CLASSES = encoder_classes("DebertaV2")
FAMILY = Family(
    names_layers=True,
    architectures=_ARCHITECTURES,
    heads=_HEAD_CLASSES,
    fields=declare.ENCODER.plus(
        DebertaConfig.names() | _MASKED_LM_FIELDS, (), {**_FIXED, "conv_groups": 1}
    ),
    read_sizes=DebertaConfig.read,
    load=load,
    is_unused=lambda name, _: (
        name.startswith((*_HEADS, *_OPTIONAL)) or name.endswith("embeddings.position_ids")
    ),
    tokenizer_class="DebertaV2Tokenizer",
    masked_lm=_masked_lm,
    # the layers of queries and keys also make tables of distances when they are loaded
    takes_adapters=False,
    # its mask hides a token both as a key and as a query
    may_have_unattended_tokens=False,
)

_FIRST_ARCHITECTURES, _FIRST_HEAD_CLASSES = encoder_classes("Deberta")
FIRST_FAMILY = replace(
    FAMILY,
    architectures=_FIRST_ARCHITECTURES,
    heads=_FIRST_HEAD_CLASSES,
    fields=declare.ENCODER.plus(
        (DebertaConfig.names() | _MASKED_LM_FIELDS) - _LATER_FIELDS,
        (),
        {**_FIXED, "talking_head": False},
    ),
    load=partial(load, is_first_version=True),
    tokenizer_class="DebertaTokenizer",
)
