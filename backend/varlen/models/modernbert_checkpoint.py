"""Checks of a ModernBERT checkpoint: fields of config.json, names and shapes of tensors.

Source: Warner et al. 2024, arXiv:2412.13663; names as Hugging Face transformers saves them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from varlen.errors import CheckpointError
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
    read_number,
    show,
)
from varlen.models.checkpoint.family import Family, ModelSizes
from varlen.models.checkpoint.masked_lm_layout import MaskedLMLayout, MaskedLMNames
from varlen.models.checkpoint.rotary_config import RotaryConfig, read_rotary
from varlen.models.checkpoint.tensor_shapes import TensorShapes
from varlen.models.checkpoint.weights import CheckpointWeights, TensorHeader, check_shapes
from varlen.tasks import Task
from varlen_kernels import Activation

LayerKind: TypeAlias = Literal["full_attention", "sliding_attention"]

# Fields that this version reads.
READ_FIELDS = frozenset(
    "architectures attention_bias classifier_activation classifier_bias classifier_pooling global_attn_every_n_layers"
    " global_rope_theta hidden_activation hidden_size id2label intermediate_size layer_types local_attention"
    " local_rope_theta max_position_embeddings mlp_bias model_type norm_bias norm_eps num_attention_heads"
    " num_hidden_layers num_labels rope_parameters vocab_size".split()
)
# Fields that transformers reads, and that change no logit and no hidden state.
HARMLESS_FIELDS = encoder_fields.HARMLESS_FIELDS | frozenset(
    # training, the masked-language-model head, and how transformers runs
    "attention_dropout decoder_bias deterministic_flash_attn embedding_dropout initializer_cutoff_factor"
    " mlp_dropout reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction"
    " tie_word_embeddings layer_norm_eps position_embedding_type".split()
)
FIXED_FIELDS: dict[str, object] = {"is_encoder_decoder": False, "rope_scaling": None}

# The theta of each kind of layer: its field in older files, and its default.
_THETAS: Mapping[LayerKind, tuple[str, float]] = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
_MASKED_LM = MaskedLMNames("head.dense", "head.norm", "decoder", ("decoder.bias",))
_POOLINGS: Mapping[str, Literal["cls", "mean"]] = {"cls": "cls", "mean": "mean"}


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    """What config.json says of a model.

    Attributes:
        kinds: of each layer.
        window: tokens of layers with sliding attention read those at a smaller distance.
        rotary: positions of each kind of layer.
        classifier_pooling: how the classifier makes one row of a sequence.
    """

    vocabulary: int
    hidden: int
    inner: int
    heads: int
    kinds: tuple[LayerKind, ...]
    window: int
    rotary: Mapping[LayerKind, RotaryConfig]
    positions: int
    activation: Activation
    norm_eps: float
    has_norm_bias: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    classifier_pooling: Literal["cls", "mean"]
    classifier_activation: Activation
    has_classifier_bias: bool

    @classmethod
    def read(cls, config: Json) -> "ModernBertConfig":
        """Return the fields; raise CheckpointError for a configuration that is not served."""
        hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        check_multiple(config, "hidden_size", "num_attention_heads")
        if hidden // heads % 2:
            raise CheckpointError(
                f"heads have {hidden // heads} features; allowed: even numbers, for rotary positions"
            )

        def flag(name: str) -> bool:
            return read_flag(config, name, default=False)

        return cls(
            vocabulary=read_int(config, "vocab_size"),
            hidden=hidden,
            inner=read_int(config, "intermediate_size"),
            heads=heads,
            kinds=_read_kinds(config),
            window=read_int(config, "local_attention", default=128) // 2 + 1,
            rotary=_read_rotary(config),
            positions=read_int(config, "max_position_embeddings"),
            activation=read_choice(config, "hidden_activation", ACTIVATIONS, default="gelu"),
            norm_eps=read_norm_eps(config, "norm_eps", default=1e-5),
            has_norm_bias=flag("norm_bias"),
            has_attention_bias=flag("attention_bias"),
            has_mlp_bias=flag("mlp_bias"),
            classifier_pooling=read_choice(config, "classifier_pooling", _POOLINGS, default="cls"),
            classifier_activation=read_choice(
                config, "classifier_activation", ACTIVATIONS, default="gelu"
            ),
            has_classifier_bias=flag("classifier_bias"),
        )

    @property
    def sizes(self) -> ModelSizes:
        """The sizes that every family has."""
        return ModelSizes(self.hidden, self.positions)

    def window_of(self, kind: LayerKind) -> int:
        """Return the window of a layer; 0 where it holds every sequence that is served."""
        is_whole = kind == "full_attention" or self.window >= self.positions
        return 0 if is_whole else self.window


def tensor_shapes(
    config: ModernBertConfig, prefix: str, task: Task, *, num_labels: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that loading reads, by name.

    Args:
        config: of the checkpoint.
        prefix: of the encoder's tensors.
        task: of the checkpoint's architecture, whose head is read.
        num_labels: outputs of that head.
    """
    hidden, inner = config.hidden, config.inner
    shapes = TensorShapes()

    shapes[f"{prefix}embeddings.tok_embeddings.weight"] = (config.vocabulary, hidden)
    shapes.add_norm(f"{prefix}embeddings.norm", hidden, bias=config.has_norm_bias)
    for index in range(len(config.kinds)):
        layer = f"{prefix}layers.{index}"
        if index:
            # the first layer reads the norm of the embeddings
            shapes.add_norm(f"{layer}.attn_norm", hidden, bias=config.has_norm_bias)
        shapes.add_linear(f"{layer}.attn.Wqkv", hidden, 3 * hidden, bias=config.has_attention_bias)
        shapes.add_linear(f"{layer}.attn.Wo", hidden, hidden, bias=config.has_attention_bias)
        shapes.add_norm(f"{layer}.mlp_norm", hidden, bias=config.has_norm_bias)
        shapes.add_linear(f"{layer}.mlp.Wi", hidden, 2 * inner, bias=config.has_mlp_bias)
        shapes.add_linear(f"{layer}.mlp.Wo", inner, hidden, bias=config.has_mlp_bias)
    shapes.add_norm(f"{prefix}final_norm", hidden, bias=config.has_norm_bias)
    if task != "embed":
        shapes.add_linear("head.dense", hidden, hidden, bias=config.has_classifier_bias)
        shapes.add_norm("head.norm", hidden, bias=config.has_norm_bias)
        shapes.add_linear("classifier", hidden, num_labels, bias=True)
    return shapes


def prefix_of(tensors: Mapping[str, TensorHeader] | CheckpointWeights) -> str:
    """Return the prefix of the encoder's tensor names; models with a head have one."""
    return "model." if "model.embeddings.tok_embeddings.weight" in tensors else ""


def _read_sizes(config: Json) -> ModelSizes:
    return ModernBertConfig.read(config).sizes


def _check_tensors(
    headers: Mapping[str, TensorHeader],
    config: Json,
    architecture: str,
    task: Task,  # noqa: ARG001  # its head belongs to the architecture
) -> None:
    own_task = FAMILY.architectures[architecture]
    labels = 0 if own_task == "embed" else read_num_labels(config)
    expected = tensor_shapes(
        ModernBertConfig.read(config), prefix_of(headers), own_task, num_labels=labels
    )
    heads = ("head.", "decoder.", "classifier.")
    check_shapes(headers, expected, lambda name: name.startswith(heads))


def _masked_lm(config: Json) -> MaskedLMLayout:
    read = ModernBertConfig.read(config)
    return MaskedLMLayout(
        _MASKED_LM,
        read.hidden,
        read.hidden,
        read.vocabulary,
        read.classifier_activation,
        read.norm_eps,
        is_tied=read_flag(config, "tie_word_embeddings", default=True),
        has_dense_bias=read.has_classifier_bias,
        has_norm_bias=read.has_norm_bias,
        has_bias=read_flag(config, "decoder_bias", default=True),
    )


def _read_kinds(config: Json) -> tuple[LayerKind, ...]:
    layers = read_layers(config, "num_hidden_layers")
    given = config.get("layer_types")
    if given is None:
        every = read_int(config, "global_attn_every_n_layers", default=3)
        return tuple(
            "sliding_attention" if index % every else "full_attention" for index in range(layers)
        )
    # a value of another type may have no hash
    is_known = isinstance(given, list) and all(each in tuple(_THETAS) for each in given)
    if not is_known or len(given) != layers:
        raise CheckpointError(
            f"config.json has layer_types {show(given)}; allowed: {layers} names, each of {', '.join(_THETAS)}"
        )
    return tuple(given)


def _read_rotary(config: Json) -> dict[LayerKind, RotaryConfig]:
    given = config.get("rope_parameters") or {}
    if not isinstance(given, dict) or not set(given) <= set(_THETAS):
        raise CheckpointError(
            f"config.json has rope_parameters {show(given)}; allowed: an object with {', '.join(_THETAS)}"
        )
    return {
        kind: read_rotary(
            {
                "rope_parameters": given.get(kind),
                "max_position_embeddings": config.get("max_position_embeddings"),
            },
            # null is not the default: releases of transformers differ in what it means
            default_theta=read_number(config, field, default=None if field in config else default),
        )
        for kind, (field, default) in _THETAS.items()
    }


FAMILY = Family(
    architectures={
        "ModernBertModel": "embed",
        "ModernBertForMaskedLM": "embed",
        "ModernBertForSequenceClassification": "classify",
        "ModernBertForTokenClassification": "token_classify",
    },
    heads={
        "sparse_embed": "ModernBertForMaskedLM",
        "fill_mask": "ModernBertForMaskedLM",
        "classify": "ModernBertForSequenceClassification",
        "rerank": "ModernBertForSequenceClassification",
        "token_classify": "ModernBertForTokenClassification",
    },
    fields=FieldRules(READ_FIELDS, HARMLESS_FIELDS, FIXED_FIELDS),
    read_sizes=_read_sizes,
    check_tensors=_check_tensors,
    tokenizer_class="PreTrainedTokenizerFast",
    masked_lm=_masked_lm,
)
