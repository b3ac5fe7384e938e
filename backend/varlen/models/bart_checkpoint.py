"""Checks of a BART, mBART, Marian or M2M-100 checkpoint: config.json and tensors.

NLLB checkpoints are M2M-100 ones.
Source of the names: these models as saved by Hugging Face transformers.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from varlen.errors import CheckpointError
from varlen.models.checkpoint import seq2seq_fields
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
)
from varlen.models.checkpoint.family import Family, ModelSizes
from varlen.models.checkpoint.table_names import TableNames
from varlen.models.checkpoint.tensor_shapes import TensorShapes
from varlen.models.checkpoint.weights import TensorHeader, check_shapes
from varlen.tasks import Task
from varlen_kernels import Activation

Positions = Literal["learned", "marian", "m2m"]

# Fields that every family reads.
READ_FIELDS = seq2seq_fields.READ_FIELDS | frozenset(
    "activation_function d_model decoder_attention_heads decoder_ffn_dim decoder_layers encoder_attention_heads"
    " encoder_ffn_dim encoder_layers max_position_embeddings scale_embedding tie_word_embeddings".split()
)
# Second names of fields, which must agree with them.
ALIASES: Mapping[str, str] = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
# Fields that transformers reads, and that change no logit: of training, and of heads that are not served.
HARMLESS_FIELDS = seq2seq_fields.HARMLESS_FIELDS | frozenset(
    "activation_dropout attention_dropout classifier_dropout decoder_layerdrop dropout encoder_layerdrop id2label"
    " init_std num_labels".split()
)

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
            **seq2seq_fields.FIXED_FIELDS,
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


@dataclass(frozen=True, slots=True)
class BartConfig:
    """The fields of config.json that shape the model.

    Attributes:
        positions: longest source, and longest target, in tokens.
        first_position: number of the first position where they are computed.
        shares_tables: whether encoder and decoder have one vocabulary.
        is_tied: whether the output matrix is the embedding table.
    """

    options: Options
    hidden: int
    encoder: StackConfig
    decoder: StackConfig
    positions: int
    first_position: int
    activation: Activation
    scales_embedding: bool
    shares_tables: bool
    is_tied: bool

    @classmethod
    def read(cls, config: Json) -> "BartConfig":
        """Return the fields; raise CheckpointError for a configuration that is not served."""
        options = OPTIONS[config["model_type"]]
        _check_aliases(config)
        shares = "share_encoder_decoder_embeddings" not in options.fields or read_flag(
            config, "share_encoder_decoder_embeddings", default=True
        )
        sources = targets = read_int(config, "vocab_size")
        if config.get("decoder_vocab_size") is not None:
            targets = read_int(config, "decoder_vocab_size")
        if shares and sources != targets:
            raise CheckpointError(
                f"config.json has decoder_vocab_size {targets} and vocab_size {sources}, which the shared"
                " embeddings of encoder and decoder need to be equal"
            )
        # positions of M2M-100 are counted from the padding token's id
        first = read_int(config, "pad_token_id", lowest=0) + 1 if options.positions == "m2m" else 0
        if options.positions == "learned":
            positions = read_int(config, "max_position_embeddings")
        else:
            positions = read_computed_positions(config)
        return cls(
            options=options,
            hidden=read_int(config, "d_model"),
            encoder=_read_stack(config, "encoder", sources),
            decoder=_read_stack(config, "decoder", targets),
            positions=positions,
            first_position=first,
            activation=read_choice(
                config, "activation_function", ACTIVATIONS, default=options.activation
            ),
            scales_embedding=read_flag(config, "scale_embedding", default=options.scales_embedding),
            shares_tables=shares,
            is_tied=read_flag(config, "tie_word_embeddings", default=True),
        )

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


def tensor_shapes(config: BartConfig, present: Container[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that loading reads, by name.

    Args:
        config: of the checkpoint.
        present: names of all tensors of the checkpoint.
    """
    hidden, tables = config.hidden, config.table_names(present)
    shapes = TensorShapes(
        {
            tables.source: (config.encoder.vocab_size, hidden),
            tables.target: (config.decoder.vocab_size, hidden),
            tables.output: (config.decoder.vocab_size, hidden),
        }
    )

    for name, stack, attentions in (
        ("encoder", config.encoder, ("self_attn",)),
        ("decoder", config.decoder, ("self_attn", "encoder_attn")),
    ):
        if config.options.positions == "learned":
            rows = config.positions + LEARNED_OFFSET
            shapes[f"model.{name}.embed_positions.weight"] = (rows, hidden)
        if config.options.has_embedding_norm:
            shapes.add_norm(f"model.{name}.layernorm_embedding", hidden)
        for index in range(stack.num_layers):
            layer = f"model.{name}.layers.{index}"
            for attention in attentions:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes.add_linear(f"{layer}.{attention}.{part}", hidden, hidden)
                shapes.add_norm(f"{layer}.{attention}_layer_norm", hidden)
            shapes.add_linear(f"{layer}.fc1", hidden, stack.inner)
            shapes.add_linear(f"{layer}.fc2", stack.inner, hidden)
            shapes.add_norm(f"{layer}.final_layer_norm", hidden)
        if config.options.is_pre_norm:
            shapes.add_norm(f"model.{name}.layer_norm", hidden)
    # a checkpoint may leave out a bias of zeros
    if config.options.has_output_bias and "final_logits_bias" in present:
        shapes["final_logits_bias"] = (1, config.decoder.vocab_size)
    return shapes


def _read_stack(config: Json, name: str, vocab_size: int) -> StackConfig:
    heads = read_int(config, f"{name}_attention_heads")
    read_int(config, "d_model")
    check_multiple(config, "d_model", f"{name}_attention_heads")
    layers = read_layers(config, f"{name}_layers", lowest=0)
    return StackConfig(vocab_size, layers, heads, read_int(config, f"{name}_ffn_dim"))


def _check_aliases(config: Json) -> None:
    for alias, name in ALIASES.items():
        if alias in config and config[alias] != config.get(name):
            raise CheckpointError(
                f"config.json has {alias} {config[alias]!r} and {name} {config.get(name)!r}, which mean the"
                " same; make them agree"
            )


def _read_sizes(config: Json) -> ModelSizes:
    sizes = BartConfig.read(config)
    return ModelSizes(sizes.hidden, sizes.positions)


def _check_tensors(
    headers: Mapping[str, TensorHeader],
    config: Json,
    architecture: str,  # noqa: ARG001  # one is served
    task: Task,  # noqa: ARG001  # one is served
) -> None:
    sizes = BartConfig.read(config)
    # tables of computed positions, which old releases saved; copies of one table
    harmless = {"model.shared.weight"}
    if sizes.options.positions != "learned":
        harmless |= {
            f"model.{name}.embed_positions.{tensor}"
            for name in ("encoder", "decoder")
            for tensor in ("weight", "weights")
        }
    check_shapes(headers, tensor_shapes(sizes, headers), harmless.__contains__)


def _family(options: Options, tokenizer_class: str) -> Family:
    return Family(
        architectures={options.head: "translate"},
        heads={"translate": options.head},
        fields=FieldRules(
            READ_FIELDS | ALIASES.keys() | options.fields, HARMLESS_FIELDS, options.fixed_fields
        ),
        read_sizes=_read_sizes,
        check=_check_tensors,
        tokenizer_class=tokenizer_class,
        kind="encoder_decoder",
    )


FAMILIES: Mapping[str, Family] = {
    "bart": _family(OPTIONS["bart"], "BartTokenizer"),
    "mbart": _family(OPTIONS["mbart"], "MBartTokenizer"),
    "marian": _family(OPTIONS["marian"], "MarianTokenizer"),
    "m2m_100": _family(OPTIONS["m2m_100"], "M2M100Tokenizer"),
}
