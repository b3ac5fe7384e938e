"""Post-norm encoders, BERT and its relatives: what their checkpoints share, and where they differ.

A family is a `PostNormFamily`: how it names the sizes in config.json, and how it names its tensors. Every field of
config.json that can change a result is either read or refused; see docs/decisions/0014-config-fields.md.
Source of the names: the models as Hugging Face transformers saves them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from varlen.errors import CheckpointError
from varlen.models.blocks.heads import HeadActivation
from varlen.models.checkpoint import encoder_fields
from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.config_file import (
    ACTIVATIONS,
    Json,
    check_multiple,
    read_choice,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
    read_num_labels,
)
from varlen.models.checkpoint.family import Family, ModelSizes
from varlen.models.checkpoint.masked_lm_layout import MaskedLMLayout, MaskedLMNames
from varlen.models.checkpoint.rotary_config import RotaryConfig, read_rotary
from varlen.models.checkpoint.tensor_shapes import TensorShapes
from varlen.models.checkpoint.weights import CheckpointWeights, TensorHeader, check_shapes
from varlen.tasks import Task
from varlen_kernels import Activation

# Fields that transformers reads, and that change no logit and no hidden state.
HARMLESS_FIELDS = encoder_fields.HARMLESS_FIELDS | frozenset(
    # training
    "attention_probs_dropout_prob hidden_dropout_prob tie_word_embeddings".split()
)
# Fields that are served with one value, which is what transformers assumes where they are absent.
FIXED_FIELDS: Mapping[str, object] = {
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "position_embedding_type": "absolute",
    "pruned_heads": {},
}

# Rows of a table of relative positions, and the distance from which on all share the last one.
DISTANCE_BUCKETS = 32
MAX_DISTANCE = 128

ROTARY_FIELDS = frozenset("head_dim rope_parameters rope_scaling rope_theta".split())
_TABLES = ("word", "position", "token_type")
_WORDS = "embeddings.word_embeddings.weight"
# Tensors of other heads, and tables that transformers computes.
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids")
_OTHER_HEADS = tuple(
    f"{layer}.{part}"
    for layer in ("classifier", "classifier.dense", "classifier.out_proj", "qa_outputs")
    for part in ("weight", "bias")
)


@dataclass(frozen=True, slots=True)
class EncoderSizes(ModelSizes):
    """Sizes and settings that config.json gives.

    Attributes:
        inner: features between the two linear layers of a feed-forward part.
        layers: number of layers.
        heads: of each layer.
        vocabulary: rows of the token table.
        types: rows of the table of token types; 0 without one.
        rotary: the rotary positions; None with a position table.
        embedding: features of the tables.
        activation: between the two linear layers.
        norm_eps: added to the variance.
    """

    inner: int
    layers: int
    heads: int
    vocabulary: int
    types: int
    rotary: RotaryConfig | None
    embedding: int
    activation: Activation
    norm_eps: float


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of fields in config.json, empty for one that is absent; and a default."""

    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    types: str = "type_vocab_size"
    embedding: str = ""
    activation: str = "hidden_act"
    norm_eps: str = "layer_norm_eps"
    default_activation: str = "gelu"

    def all(self) -> frozenset[str]:
        """Return the fields that are read."""
        names = {
            self.hidden,
            self.inner,
            self.layers,
            self.heads,
            self.types,
            self.embedding,
            self.activation,
            self.norm_eps,
        } - {""}
        common = "architectures id2label max_position_embeddings model_type num_labels vocab_size"
        return frozenset(names | set(common.split()))


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of the tensors of a layer, below the layer's own name.

    Attributes:
        name: of the layer, with a place for its number unless all share one.
        qkv: queries, keys and values, or one linear layer of all.
        up: in front of the activation: one linear layer; or a gate, whose activation multiplies the second one.
        has_both: whether the one layer of `up` holds its values, then those of a gate.
        without_bias: the linear layers that have none.
    """

    name: str = "encoder.layer.{}"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    has_both: bool = False
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"
    without_bias: tuple[str, ...] = ()

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate."""
        return self.has_both or len(self.up) > 1

    def has_bias(self, name: str) -> bool:
        """Return whether a linear layer has a bias."""
        return name not in self.without_bias


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The classifier of sequences: a dense layer of the first token, then an output layer."""

    dense: str = "classifier.dense"
    output: str = "classifier.out_proj"
    activation: HeadActivation = "tanh"


@dataclass(frozen=True, slots=True)
class PostNormFamily:
    """One family of post-norm encoders.

    Attributes:
        class_name: of its classes in transformers, such as Bert of BertModel.
        prefix: of the encoder's tensors in a model with a head.
        first_prefix: the same in its first releases, if they had another.
        head: the classifier of sequences.
        embedding_norm: the norm of the embeddings.
        layer: names within a layer.
        fields: names in config.json.
        projection: the linear layer from the tables' features to those of the layers, where they may differ.
        always_projects: whether that layer is there even if they do not differ.
        least_types: fewest token types; 0 if there may be no table of them.
        distance_bias: the table of relative positions, `[DISTANCE_BUCKETS, heads]`.
        first_position: row of the first token in the position table; None if it follows `pad_token_id`.
        default_theta: base of rotary positions, for a family without a position table.
        pretraining: prefixes of the tensors of heads for pretraining.
        masked_lm: the head of its masked language models.
        more_architectures: classes with the encoder alone, or with a head that is not served.
        harmless, fixed: fields beside those that all families share.
        tokenizer_class: which transformers takes where tokenizer_config.json names none.
    """

    class_name: str
    prefix: str
    head: HeadNames
    embedding_norm: str = "embeddings.LayerNorm"
    layer: LayerNames = LayerNames()
    fields: FieldNames = FieldNames()
    projection: str = ""
    always_projects: bool = False
    first_prefix: str = ""
    least_types: int = 1
    distance_bias: str = ""
    first_position: int | None = 0
    default_theta: float | None = None
    pretraining: tuple[str, ...] = ("cls.", "lm_head.")
    masked_lm: MaskedLMNames | None = None
    more_architectures: tuple[str, ...] = ()
    harmless: Collection[str] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    tokenizer_class: str = "BertTokenizer"

    @property
    def family(self) -> Family:
        """The checks of its checkpoints."""
        name = self.class_name
        masked = f"{name}ForMaskedLM"
        vectors = (f"{name}Model", masked, *self.more_architectures)
        sequences, tokens = f"{name}ForSequenceClassification", f"{name}ForTokenClassification"
        return Family(
            architectures={
                **dict.fromkeys(vectors, "embed"),
                sequences: "classify",
                tokens: "token_classify",
            },
            heads={
                **({"sparse_embed": masked, "fill_mask": masked} if self.masked_lm else {}),
                "classify": sequences,
                "rerank": sequences,
                "token_classify": tokens,
            },
            fields=self._fields,
            read_sizes=self.read_sizes,
            check=self.check_tensors,
            tokenizer_class=self.tokenizer_class,
            has_token_types=bool(self.fields.types),
            masked_lm=self._masked_lm_layout if self.masked_lm else None,
        )

    @property
    def _fields(self) -> FieldRules:
        """The fields of config.json that it knows."""
        rotary = frozenset[str]() if self.default_theta is None else ROTARY_FIELDS
        return FieldRules(
            self.fields.all() | rotary,
            HARMLESS_FIELDS | frozenset(self.harmless),
            {**FIXED_FIELDS, **self.fixed},
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
        return EncoderSizes(
            hidden=hidden,
            positions=rows - first if rotary is None else rotary.positions,
            inner=read_int(config, names.inner),
            layers=read_layers(config, names.layers, lowest=0),
            heads=heads,
            vocabulary=read_int(config, "vocab_size"),
            types=read_int(config, names.types, lowest=self.least_types) if names.types else 0,
            first_position=first,
            rotary=rotary,
            embedding=read_int(config, names.embedding) if names.embedding else hidden,
            activation=read_choice(
                config, names.activation, ACTIVATIONS, default=names.default_activation
            ),
            norm_eps=read_norm_eps(config, names.norm_eps, default=1e-12),
        )

    def _masked_lm_layout(self, config: Json) -> MaskedLMLayout:
        """Return the head of the masked language model in config.json."""
        assert self.masked_lm is not None
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
        """Return the features of a token and the number of heads."""
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

    def check_tensors(
        self,
        headers: Mapping[str, TensorHeader],
        config: Json,
        architecture: str,
        task: Task,  # noqa: ARG002  # its head belongs to the architecture
    ) -> None:
        """Raise CheckpointError unless the tensors are those of the model in config.json, and no others."""
        prefix = self.prefix_of(headers)
        expected = self.tensor_shapes(config, prefix, self.family.architectures[architecture])
        pooler = "pooler" if f"{prefix}pooler.weight" in headers else "pooler.dense"
        unused = {f"{prefix}{name}" for name in (*_UNUSED, f"{pooler}.weight", f"{pooler}.bias")}
        unused |= set(_OTHER_HEADS)
        check_shapes(
            headers, expected, lambda name: name in unused or name.startswith(self.pretraining)
        )

    def prefix_of(self, tensors: Mapping[str, TensorHeader] | CheckpointWeights) -> str:
        """Return the prefix of the encoder's tensor names; models with a head have one."""
        names = [name for name in (self.prefix, self.first_prefix) if name]
        return next((name for name in names if f"{name}{_WORDS}" in tensors), "")

    def head_dense(self, prefix: str) -> str:
        """Return the classifier's dense layer, which may be a part of the encoder."""
        name = self.head.dense
        is_inside = name.startswith(self.prefix) and bool(prefix)
        return prefix + name.removeprefix(self.prefix) if is_inside else name

    def has_projection(self, sizes: EncoderSizes) -> bool:
        """Return whether there is a linear layer between tables and layers."""
        return bool(self.projection) and (self.always_projects or sizes.embedding != sizes.hidden)

    def layer_names(self, sizes: EncoderSizes) -> list[str]:
        """Return the name of each layer; shared layers have one name."""
        return [self.layer.name.format(index) for index in range(sizes.layers)]

    def tensor_shapes(self, config: Json, prefix: str, task: Task) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that loading reads, by name.

        Args:
            config: of the checkpoint.
            prefix: of the encoder's tensors.
            task: of the checkpoint's architecture, whose head is read.
        """
        sizes, layer = self.read_sizes(config), self.layer
        hidden, inner, embedding = sizes.hidden, sizes.inner, sizes.embedding
        shapes = TensorShapes()

        positions = 0 if sizes.rotary else sizes.first_position + sizes.positions
        rows = (sizes.vocabulary, positions, sizes.types)
        for table, count in zip(_TABLES, rows, strict=True):
            if count:
                shapes[f"{prefix}embeddings.{table}_embeddings.weight"] = (count, embedding)
        shapes.add_norm(f"{prefix}{self.embedding_norm}", embedding)
        if self.has_projection(sizes):
            shapes.add_linear(f"{prefix}{self.projection}", embedding, hidden)
        if self.distance_bias:
            shapes[f"{prefix}{self.distance_bias}.weight"] = (DISTANCE_BUCKETS, sizes.heads)
        for name in self.layer_names(sizes):
            at = f"{prefix}{name}"
            for part in layer.qkv:
                width = 3 * hidden // len(layer.qkv)
                shapes.add_linear(f"{at}.{part}", hidden, width, bias=layer.has_bias(part))
            output = layer.attention_output
            shapes.add_linear(f"{at}.{output}", hidden, hidden, bias=layer.has_bias(output))
            shapes.add_norm(f"{at}.{layer.attention_norm}", hidden)
            for part in layer.up:
                width = 2 * inner if layer.has_both else inner
                shapes.add_linear(f"{at}.{part}", hidden, width, bias=layer.has_bias(part))
            shapes.add_linear(f"{at}.{layer.down}", inner, hidden, bias=layer.has_bias(layer.down))
            shapes.add_norm(f"{at}.{layer.output_norm}", hidden)
        if task == "classify":
            shapes.add_linear(self.head_dense(prefix), hidden, hidden)
            shapes.add_linear(self.head.output, hidden, read_num_labels(config))
        if task == "token_classify":
            shapes.add_linear("classifier", hidden, read_num_labels(config))
        return shapes
