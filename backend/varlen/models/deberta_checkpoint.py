"""Checks of a DeBERTa-v2 or -v3 checkpoint: fields of config.json, names and shapes of tensors.

Source: He et al. 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543; names as Hugging Face transformers saves them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.blocks.heads import HeadActivation
from varlen.models.checkpoint import encoder_fields
from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.config_file import (
    ACTIVATIONS,
    Json,
    check_multiple,
    read_choice,
    read_computed_positions,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
    read_num_labels,
    show,
)
from varlen.models.checkpoint.family import Family, ModelSizes
from varlen.models.checkpoint.masked_lm_layout import MaskedLMLayout, MaskedLMNames
from varlen.models.checkpoint.tensor_shapes import TensorShapes
from varlen.models.checkpoint.weights import CheckpointWeights, TensorHeader, check_shapes
from varlen.tasks import Task
from varlen_kernels import Activation

# What a distance is multiplied with: a query (content to position), or a key (position to content).
DistanceTerm: TypeAlias = Literal["c2p", "p2c"]

# Fields that this version reads.
READ_FIELDS = frozenset(
    "architectures attention_head_size embedding_size hidden_act hidden_size id2label intermediate_size layer_norm_eps"
    " legacy max_position_embeddings max_relative_positions model_type norm_rel_ebd num_attention_heads"
    " num_hidden_layers num_labels pooler_hidden_act pooler_hidden_size pos_att_type position_biased_input"
    " position_buckets relative_attention share_att_key tie_word_embeddings vocab_size".split()
)
# Fields that transformers reads, and that change no logit and no hidden state.
HARMLESS_FIELDS = encoder_fields.HARMLESS_FIELDS | frozenset(
    # training, and the convolution that is refused
    "attention_probs_dropout_prob cls_dropout conv_act conv_groups hidden_dropout_prob"
    " pooler_dropout".split()
)
FIXED_FIELDS: Mapping[str, object] = {
    "conv_kernel_size": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "type_vocab_size": 0,
}

PREFIX = "deberta."
_WORDS = "embeddings.word_embeddings.weight"
_TERMS: tuple[DistanceTerm, ...] = ("c2p", "p2c")
# The linear layer that makes the table of a term: of a layer's own, or shared with tokens.
_PROJECTIONS: Mapping[DistanceTerm, tuple[str, str]] = {
    "c2p": ("pos_key_proj", "key_proj"),
    "p2c": ("pos_query_proj", "query_proj"),
}
# The head of masked language models: that of BERT ("legacy"), or the one that DeBERTa was trained with.
_LEGACY_HEAD = MaskedLMNames(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    biases=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
_OWN_HEAD = MaskedLMNames(
    dense="lm_predictions.lm_head.dense",
    norm="lm_predictions.lm_head.LayerNorm",
    decoder="deberta.embeddings.word_embeddings",
    biases=("lm_predictions.lm_head.bias",),
)
# Heads of other tasks, and of pretraining.
_HEADS = ("pooler.", "classifier.", "cls.", "lm_predictions.", "mask_predictions.", "qa_outputs.")
# Beside the layers, what only some configurations read.
_OPTIONAL = tuple(
    f"{prefix}{name}."
    for prefix in (PREFIX, "")
    for name in ("embeddings.position_embeddings", "encoder.rel_embeddings", "encoder.LayerNorm")
)


@dataclass(frozen=True, slots=True)
class DebertaConfig:
    """What config.json says of a model.

    Attributes:
        embedding: features of the tables; there is a projection if they are not `hidden`.
        positions: longest sequence.
        has_position_table: whether embeddings of positions are added to those of tokens.
        terms: what is added to scores by distance.
        max_distance: distances from there on are alike.
        buckets: near distances have a row each, and farther ones share rows, by their logarithm; 0: all have one.
        shares_projections: whether distances are projected by the layers of tokens.
        has_distance_norm: whether the embeddings of distances are normalized.
        scale: multiplies the scores.
        classifier_activation: between the two layers of a classifier of sequences.
    """

    vocabulary: int
    hidden: int
    embedding: int
    inner: int
    heads: int
    layers: int
    positions: int
    has_position_table: bool
    terms: tuple[DistanceTerm, ...]
    max_distance: int
    buckets: int
    shares_projections: bool
    has_distance_norm: bool
    scale: float
    activation: Activation
    classifier_activation: HeadActivation
    norm_eps: float

    @classmethod
    def read(cls, config: Json) -> "DebertaConfig":
        """Return the fields; raise CheckpointError for a configuration that is not served."""
        hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        check_multiple(config, "hidden_size", "num_attention_heads")
        _check_size(config, "attention_head_size", hidden // heads)
        _check_size(config, "pooler_hidden_size", hidden)
        positions = read_computed_positions(config)
        max_distance, buckets = _read_distances(config, positions)
        terms = _read_terms(config)
        is_relative = read_flag(config, "relative_attention", default=False)
        return cls(
            vocabulary=read_int(config, "vocab_size"),
            hidden=hidden,
            embedding=read_int(config, "embedding_size", default=hidden),
            inner=read_int(config, "intermediate_size"),
            heads=heads,
            layers=read_layers(config, "num_hidden_layers"),
            positions=positions,
            has_position_table=read_flag(config, "position_biased_input", default=True),
            terms=terms if is_relative else (),
            max_distance=max_distance,
            buckets=buckets,
            shares_projections=read_flag(config, "share_att_key", default=False),
            has_distance_norm=_read_distance_norm(config),
            # without relative positions too
            scale=(hidden // heads * (1 + len(terms))) ** -0.5,
            activation=read_choice(config, "hidden_act", ACTIVATIONS, default="gelu"),
            classifier_activation=read_choice(
                config, "pooler_hidden_act", {**ACTIVATIONS, "tanh": "tanh"}, default="gelu"
            ),
            norm_eps=read_norm_eps(config, "layer_norm_eps", default=1e-7),
        )

    @property
    def span(self) -> int:
        """Half of the rows of the table of distances."""
        return self.buckets or self.max_distance

    @property
    def sizes(self) -> ModelSizes:
        """The sizes that every family has."""
        return ModelSizes(self.hidden, self.positions)

    def projection_of(self, term: DistanceTerm) -> str:
        """Return the name of the linear layer that makes the table of a term."""
        return _PROJECTIONS[term][self.shares_projections]


def tensor_shapes(
    config: DebertaConfig, prefix: str, task: Task, *, num_labels: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that loading reads, by name.

    Args:
        config: of the checkpoint.
        prefix: of the encoder's tensors.
        task: of the checkpoint's architecture, whose head is read.
        num_labels: outputs of that head.
    """
    hidden, inner = config.hidden, config.inner
    shapes = TensorShapes({f"{prefix}{_WORDS}": (config.vocabulary, config.embedding)})

    if config.has_position_table:
        table = f"{prefix}embeddings.position_embeddings.weight"
        shapes[table] = (config.positions, config.embedding)
    if config.embedding != hidden:
        shapes[f"{prefix}embeddings.embed_proj.weight"] = (hidden, config.embedding)
    shapes.add_norm(f"{prefix}embeddings.LayerNorm", hidden)
    if config.terms:
        shapes[f"{prefix}encoder.rel_embeddings.weight"] = (2 * config.span, hidden)
        if config.has_distance_norm:
            shapes.add_norm(f"{prefix}encoder.LayerNorm", hidden)
    for index in range(config.layers):
        layer = f"{prefix}encoder.layer.{index}"
        projections = ["query_proj", "key_proj", "value_proj"]
        projections += [config.projection_of(term) for term in config.terms]
        for projection in projections:
            shapes.add_linear(f"{layer}.attention.self.{projection}", hidden, hidden)
        shapes.add_linear(f"{layer}.attention.output.dense", hidden, hidden)
        shapes.add_norm(f"{layer}.attention.output.LayerNorm", hidden)
        shapes.add_linear(f"{layer}.intermediate.dense", hidden, inner)
        shapes.add_linear(f"{layer}.output.dense", inner, hidden)
        shapes.add_norm(f"{layer}.output.LayerNorm", hidden)
    if task == "classify":
        shapes.add_linear("pooler.dense", hidden, hidden)
    if task != "embed":
        shapes.add_linear("classifier", hidden, num_labels)
    return shapes


def prefix_of(tensors: Mapping[str, TensorHeader] | CheckpointWeights) -> str:
    """Return the prefix of the encoder's tensor names; models with a head have one."""
    return PREFIX if f"{PREFIX}{_WORDS}" in tensors else ""


def _read_sizes(config: Json) -> ModelSizes:
    return DebertaConfig.read(config).sizes


def _check_tensors(
    headers: Mapping[str, TensorHeader],
    config: Json,
    architecture: str,
    task: Task,  # noqa: ARG001  # its head belongs to the architecture
) -> None:
    own_task = FAMILY.architectures[architecture]
    labels = 0 if own_task == "embed" else read_num_labels(config)
    expected = tensor_shapes(
        DebertaConfig.read(config), prefix_of(headers), own_task, num_labels=labels
    )
    unused = (*_HEADS, *_OPTIONAL)
    check_shapes(
        headers,
        expected,
        lambda name: name.startswith(unused) or name.endswith("embeddings.position_ids"),
    )


def _masked_lm(config: Json) -> MaskedLMLayout:
    read = DebertaConfig.read(config)
    is_legacy = read_flag(config, "legacy", default=True)
    return MaskedLMLayout(
        _LEGACY_HEAD if is_legacy else _OWN_HEAD,
        read.hidden,
        read.embedding,
        read.vocabulary,
        read.activation,
        read.norm_eps,
        is_tied=not is_legacy or read_flag(config, "tie_word_embeddings", default=True),
    )


def _check_size(config: Json, key: str, allowed: int) -> None:
    if config.get(key) not in (None, allowed):
        raise CheckpointError(f"config.json has {key} {show(config[key])}; allowed: {allowed}")


def _read_distances(config: Json, positions: int) -> tuple[int, int]:
    """Return the largest distance of its own, and the number of buckets or 0."""
    furthest = read_int(config, "max_relative_positions", default=-1, lowest=-1)
    furthest = positions if furthest < 1 else furthest
    buckets = max(0, read_int(config, "position_buckets", default=-1, lowest=-1))
    if buckets and not 1 < buckets // 2 < furthest - 1:
        raise CheckpointError(
            f"config.json has position_buckets {buckets}; allowed: -1 (none), or 4 to {2 * furthest - 3} for distances"
            f" up to {furthest}"
        )
    return furthest, buckets


def _read_terms(config: Json) -> tuple[DistanceTerm, ...]:
    given = config.get("pos_att_type") or []
    names = given.lower().split("|") if isinstance(given, str) else given
    names = [str(name).strip() for name in names] if isinstance(names, list) else [""]
    if not set(names) <= set(_TERMS):
        raise CheckpointError(
            f"config.json has pos_att_type {show(given)}; allowed: {', '.join(_TERMS)}"
        )
    return tuple(term for term in _TERMS if term in names)


def _read_distance_norm(config: Json) -> bool:
    given = config.get("norm_rel_ebd") or "none"
    names = {name.strip() for name in str(given).lower().split("|")}
    if not names <= {"none", "layer_norm"}:
        raise CheckpointError(
            f"config.json has norm_rel_ebd {show(given)}; allowed: none, layer_norm"
        )
    return "layer_norm" in names


FAMILY = Family(
    architectures={
        "DebertaV2Model": "embed",
        "DebertaV2ForMaskedLM": "embed",
        "DebertaV2ForSequenceClassification": "classify",
        "DebertaV2ForTokenClassification": "token_classify",
    },
    heads={
        "classify": "DebertaV2ForSequenceClassification",
        "rerank": "DebertaV2ForSequenceClassification",
        "token_classify": "DebertaV2ForTokenClassification",
        "sparse_embed": "DebertaV2ForMaskedLM",
        "fill_mask": "DebertaV2ForMaskedLM",
    },
    fields=FieldRules(READ_FIELDS, HARMLESS_FIELDS, FIXED_FIELDS),
    read_sizes=_read_sizes,
    check=_check_tensors,
    tokenizer_class="DebertaV2Tokenizer",
    masked_lm=_masked_lm,
    # its mask hides a token both as a key and as a query
    has_unread_tokens=False,
)
