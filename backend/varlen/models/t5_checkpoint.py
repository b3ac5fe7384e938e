"""Checks of a T5 or mT5 checkpoint: fields of config.json, names and shapes of tensors.

T5 1.1 and Flan-T5 checkpoints are T5 ones.
Source of the names: T5 as saved by Hugging Face transformers.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from varlen.errors import CheckpointError
from varlen.models.checkpoint import encoder_fields, seq2seq_fields
from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.config_file import (
    ACTIVATIONS,
    Json,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
)
from varlen.models.checkpoint.family import Family, ModelSizes
from varlen.models.checkpoint.table_names import TableNames
from varlen.models.checkpoint.weights import TensorHeader, check_shapes
from varlen.tasks import Task
from varlen_kernels import Activation

# Fields that this version reads.
READ_FIELDS = seq2seq_fields.READ_FIELDS | frozenset(
    "d_ff d_kv d_model dense_act_fn feed_forward_proj is_gated_act layer_norm_epsilon num_decoder_layers num_heads"
    " num_layers relative_attention_max_distance relative_attention_num_buckets scale_decoder_outputs".split()
)
_TRAINING_FIELDS = frozenset({"dropout_rate", "initializer_factor"})
# Fields that transformers reads, and that change no logit.
HARMLESS_FIELDS = seq2seq_fields.HARMLESS_FIELDS | _TRAINING_FIELDS

# Longest sequence; relative positions have no limit, but an engine plans memory for it.
LONGEST_SEQUENCE = 32_768

_MAX_DISTANCE, _BUCKETS = "relative_attention_max_distance", "relative_attention_num_buckets"
# Saved by old releases, and not used by any.
_UNUSED_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# Where config.json has no feed_forward_proj.
_FEED_FORWARD = {"t5": "relu", "mt5": "gated-gelu"}


@dataclass(frozen=True, slots=True)
class T5Config:
    """The fields of config.json that shape the model.

    Attributes:
        head_dim: features of a head; all heads together may be wider or narrower than hidden.
        buckets: number of biases by distance.
        max_distance: from this distance on, all share one bias.
        is_gated: whether the feed-forward parts have a gate.
        output_scale: multiplies the last hidden state before the output layer.
    """

    vocab_size: int
    hidden: int
    inner: int
    num_heads: int
    head_dim: int
    encoder_layers: int
    decoder_layers: int
    buckets: int
    max_distance: int
    activation: Activation
    is_gated: bool
    norm_eps: float
    output_scale: float

    @classmethod
    def read(cls, config: Json) -> "T5Config":
        """Return the fields; raise CheckpointError for a configuration that is not served."""
        activation, is_gated = _read_feed_forward(config)
        layers, hidden = read_layers(config, "num_layers"), read_int(config, "d_model")
        has_own_layers = config.get("num_decoder_layers") is not None
        return cls(
            vocab_size=read_int(config, "vocab_size"),
            hidden=hidden,
            inner=read_int(config, "d_ff"),
            num_heads=read_int(config, "num_heads"),
            head_dim=read_int(config, "d_kv"),
            encoder_layers=layers,
            decoder_layers=read_layers(config, "num_decoder_layers") if has_own_layers else layers,
            **_read_buckets(config),
            activation=activation,
            is_gated=is_gated,
            norm_eps=read_norm_eps(config, "layer_norm_epsilon", default=1e-6),
            output_scale=hidden**-0.5 if _scales_output(config) else 1.0,
        )

    @property
    def width(self) -> int:
        """Features of the queries of one token, and of its keys and values."""
        return self.num_heads * self.head_dim


def table_names(present: Container[str]) -> TableNames:
    """Return the names of the tensors that hold the tables, given those of the checkpoint.

    Since release 5, transformers ties them whatever config.json says, unless the checkpoint has several.
    """
    own = TableNames("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    return own.find(("shared.weight", own.source, own.target, own.output), present)


def tensor_shapes(
    config: T5Config, present: Container[str], *, has_decoder: bool = True
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that loading reads, by name.

    Args:
        config: of the checkpoint.
        present: names of all tensors of the checkpoint.
        has_decoder: whether it is more than an encoder.
    """
    hidden, inner, width = config.hidden, config.inner, config.width
    tables = table_names(present)
    stacks: list[tuple[str, int, tuple[str, ...]]] = [
        ("encoder", config.encoder_layers, ("SelfAttention",))
    ]
    names = [tables.source]
    if has_decoder:
        stacks.append(("decoder", config.decoder_layers, ("SelfAttention", "EncDecAttention")))
        names += [tables.target, tables.output]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (config.vocab_size, hidden))
    for stack, layers, attentions in stacks:
        shapes[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (
            config.buckets,
            config.num_heads,
        )
        for index in range(layers):
            layer = f"{stack}.block.{index}.layer"
            for number, attention in enumerate(attentions):
                for part in "qkv":
                    shapes[f"{layer}.{number}.{attention}.{part}.weight"] = (width, hidden)
                shapes[f"{layer}.{number}.{attention}.o.weight"] = (hidden, width)
                shapes[f"{layer}.{number}.layer_norm.weight"] = (hidden,)
            mlp = f"{layer}.{len(attentions)}"
            for name in ("wi_0", "wi_1") if config.is_gated else ("wi",):
                shapes[f"{mlp}.DenseReluDense.{name}.weight"] = (inner, hidden)
            shapes[f"{mlp}.DenseReluDense.wo.weight"] = (hidden, inner)
            shapes[f"{mlp}.layer_norm.weight"] = (hidden,)
        shapes[f"{stack}.final_layer_norm.weight"] = (hidden,)
    return shapes


def _read_feed_forward(config: Json) -> tuple[Activation, bool]:
    """Return the activation of the feed-forward parts, and whether they have a gate."""
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


def _read_buckets(config: Json) -> dict[str, int]:
    fields = {_BUCKETS: 32, _MAX_DISTANCE: 128, **config}
    buckets, distance = read_int(fields, _BUCKETS, lowest=4), read_int(fields, _MAX_DISTANCE)
    if distance <= buckets // 2:
        raise CheckpointError(
            f"config.json has {_MAX_DISTANCE} {distance}; allowed: numbers above {buckets // 2},"
            f" half of {_BUCKETS}"
        )
    return {"buckets": buckets, "max_distance": distance}


def _scales_output(config: Json) -> bool:
    """Return whether hidden states are scaled before the output layer: in T5 before 1.1."""
    if config["model_type"] == "mt5":
        return False
    is_tied = read_flag(config, "tie_word_embeddings", default=True)
    return read_flag(config, "scale_decoder_outputs", default=is_tied)


def _read_sizes(config: Json) -> ModelSizes:
    return ModelSizes(T5Config.read(config).hidden, LONGEST_SEQUENCE)


def _check_tensors(
    headers: Mapping[str, TensorHeader],
    config: Json,
    architecture: str,
    task: Task,  # noqa: ARG001  # it belongs to the architecture
) -> None:
    has_decoder = architecture not in ENCODERS
    expected = tensor_shapes(T5Config.read(config), headers, has_decoder=has_decoder)
    check_shapes(headers, expected, {_UNUSED_BIAS, "shared.weight"}.__contains__)


def _family(head: str) -> Family:
    return Family(
        architectures={head: "translate"},
        heads={"translate": head},
        fields=FieldRules(READ_FIELDS, HARMLESS_FIELDS, seq2seq_fields.FIXED_FIELDS),
        read_sizes=_read_sizes,
        check=_check_tensors,
        tokenizer_class="T5Tokenizer",
        kind="encoder_decoder",
    )


FAMILIES: Mapping[str, Family] = {
    "t5": _family("T5ForConditionalGeneration"),
    "mt5": _family("MT5ForConditionalGeneration"),
}

# Its class in transformers has no decoder, whatever config.json says.
_ENCODER_HARMLESS_FIELDS = (
    encoder_fields.HARMLESS_FIELDS | _TRAINING_FIELDS | {"is_encoder_decoder", "prefix"}
)
_ENCODER_FIXED_FIELDS = {
    name: value
    for name, value in seq2seq_fields.FIXED_FIELDS.items()
    if name != "is_encoder_decoder"
}
# Encoders alone, by architecture.
ENCODERS: Mapping[str, Family] = {
    name: Family(
        architectures={name: "embed"},
        heads={},
        fields=FieldRules(READ_FIELDS, _ENCODER_HARMLESS_FIELDS, _ENCODER_FIXED_FIELDS),
        read_sizes=_read_sizes,
        check=_check_tensors,
        tokenizer_class="T5Tokenizer",
    )
    for name in ("T5EncoderModel", "MT5EncoderModel")
}
