"""Settings of a model that extracts spans for labels of a request (GLiNER and GLiNER2).

Labels are tokens before the text, or an encoder of their own reads each (a bi-encoder). A folder of GLiNER has
`gliner_config.json` instead of config.json, and the configurations of its encoders are parts of it. One of GLiNER2 has
a config.json of its own, and `encoder_config`.
Sources: Zaratiana et al. 2023, arXiv:2311.08526, and 2025, arXiv:2507.18546; the fields follow the libraries gliner
and gliner2, which ignore unknown ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    Json,
    has_file,
    read_choice,
    read_flag,
    read_int,
    read_object,
    show,
)
from varlen.request.spans import Scored

CONFIG = "gliner_config.json"
# `model_type` of GLiNER2, and the file of its encoder.
SCHEMA_MODEL = "extractor"
ENCODER_CONFIG = "encoder_config/config.json"
# The folder with the tokenizer of labels, if an encoder of their own reads them.
LABELS_TOKENIZER = "labels_tokenizer"
# The layers that labels of GLiNER2 pass, by `counting_layer`.
CountLayer: TypeAlias = Literal["projected", "attended"]
# The token that stands for a word of several.
Subtoken: TypeAlias = Literal["first", "last"]

# The encoders of a model of GLiNER: the field with the name of a model, and the field with the configuration.
ENCODERS = {"model_name": "encoder_config", "labels_encoder": "labels_encoder_config"}

_SCORED: Mapping[str, Scored] = {"markerV0": "spans", "token_level": "words"}
_SUBTOKENS: Mapping[str, Subtoken] = {"first": "first", "last": "last"}
_ENCODERS = ("deberta-v2", "modernbert", "bert")
_COUNT_LAYERS: Mapping[str, CountLayer] = {
    "count_lstm": "projected",
    "count_lstm_v2": "attended",
}
# Fields that make another model, and what they add.
_FIXED: tuple[tuple[str, str], ...] = (
    ("labels_decoder", "a decoder that generates labels"),
    ("relations_layer", "relations between spans"),
    ("post_fusion_schema", "attention between words and labels"),
    ("span_encoder_config", "an encoder of spans"),
    ("fuse_layers", "a sum over the layers of the encoder"),
    ("represent_spans", "spans that words propose"),
    ("precomputed_prompts_mode", "labels that are fixed in the checkpoint"),
)
# The furthest token that counts as apart in an encoder of distances, and the longest sequence.
_MOST_TOKENS = 2048
# Layers of an LSTM, and words of the longest span: far more than any model has.
_MOST_LAYERS, _MOST_WIDTH = 16, 256


@dataclass(frozen=True, slots=True)
class LabelEncoderConfig:
    """The encoder that reads each label apart.

    Attributes:
        longest: longest label, in tokens; longer ones are cut.
    """

    config: Json
    hidden: int
    vocab_size: int
    longest: int


@dataclass(frozen=True, slots=True)
class ExtractionConfig:
    """How texts and labels become tokens, and what the model scores.

    Attributes:
        max_width: words of the longest span, if it scores spans.
        lstm_layers: layers of the LSTM over words; 0 for none. A bi-encoder may have them, and does not run them.
        label_mark: text of the token before each label; empty for GLiNER2, where a schema says it.
        label_token: id of that token; None if no token is before labels.
        reads_mark: whether the token before a label stands for it; else the one after.
        count_layer: layers that labels of GLiNER2 pass; None for GLiNER.
    """

    scored: Scored
    hidden: int
    encoder_hidden: int
    max_width: int
    max_words: int
    lstm_layers: int
    label_mark: str
    label_token: int | None
    closing: tuple[str, ...]
    reads_mark: bool
    subtoken: Subtoken
    count_layer: CountLayer | None = None
    labels: LabelEncoderConfig | None = None

    @property
    def reads_schema(self) -> bool:
        """Whether prompts begin with a schema (GLiNER2)."""
        return self.count_layer is not None

    @property
    def columns(self) -> int:
        """Scores of a word and a label."""
        return 3 if self.scored == "words" else self.max_width


def is_extraction(folder: Path) -> bool:
    """Return whether a folder holds a model of GLiNER."""
    return has_file(folder, CONFIG)


def config_name(folder: Path) -> str:
    """Return the name of the file that describes the model in a folder."""
    return CONFIG if is_extraction(folder) else "config.json"


def read_extraction(folder: Path) -> tuple[Json, ExtractionConfig]:
    """Return the configuration of the encoder, as config.json has it, and the settings of extraction.

    Raises:
        CheckpointError: the file is damaged, or asks for something that is not served.
    """
    config = read_object(folder, CONFIG)
    scored = read_scored(config)
    encoder = _encoder_of(config)
    hidden = _read(config, "hidden_size", 512)
    lstm_layers = _read(config, "num_rnn_layers", 1, lowest=0)
    if lstm_layers > _MOST_LAYERS:
        raise CheckpointError(
            f"{CONFIG} has num_rnn_layers {lstm_layers}; allowed: up to {_MOST_LAYERS}"
        )
    if lstm_layers and hidden % 2:
        raise CheckpointError(
            f"{CONFIG} has hidden_size {hidden}; allowed with an LSTM: even numbers"
        )
    mark, separator = read_marks(config)
    has_labels_apart = reads_labels_apart(config)
    return encoder, ExtractionConfig(
        scored=scored,
        hidden=hidden,
        encoder_hidden=read_int(encoder, "hidden_size", name=CONFIG),
        max_width=_read_width(config, 12, CONFIG),
        max_words=_read(config, "max_len", 384),
        lstm_layers=lstm_layers,
        label_mark=mark,
        label_token=None
        if has_labels_apart
        else read_int(config, "class_token_index", lowest=0, name=CONFIG),
        closing=() if has_labels_apart else (separator,),
        reads_mark=read_flag(config, "embed_ent_token", default=True, name=CONFIG),
        subtoken=read_choice(config, "subtoken_pooling", _SUBTOKENS, default="first", name=CONFIG),
        labels=_labels_of(config) if has_labels_apart else None,
    )


def reads_labels_apart(config: Json) -> bool:
    """Return whether gliner_config.json describes a bi-encoder."""
    return config.get("labels_encoder") is not None


def read_schema_model(folder: Path, config: Json) -> tuple[Json, ExtractionConfig]:
    """Return what `read_extraction` does, of a model of GLiNER2.

    Raises:
        CheckpointError: see `read_extraction`.
    """
    # a release without this field has spans of a width
    if config.get("architecture") not in (None, "span"):
        raise CheckpointError(
            f"config.json has architecture {show(config['architecture'])}, a model of GLiNER2 that scores where"
            " spans begin and end, which is not served; allowed: span, as in gliner2-base-v1"
        )
    read_choice(config, "token_pooling", {"first": None}, default="first")
    given = read_object(folder, ENCODER_CONFIG)
    encoder = _encoder_alone(given, given.get("model_type"), ENCODER_CONFIG)
    hidden = read_int(encoder, "hidden_size", name=ENCODER_CONFIG)
    head = config.get("span_head")
    return encoder, ExtractionConfig(
        scored="fields",
        hidden=hidden,
        encoder_hidden=hidden,
        max_width=_read_width({**config, **(head if isinstance(head, dict) else {})}, 8),
        max_words=_MOST_TOKENS,
        lstm_layers=0,
        label_mark="",
        label_token=None,
        closing=(),
        reads_mark=True,
        subtoken="first",
        count_layer=read_choice(config, "counting_layer", _COUNT_LAYERS, default="count_lstm"),
    )


def read_scored(config: Json) -> Scored:
    """Return what a model scores with each label.

    Raises:
        CheckpointError: it is a model of another kind, which is not served.
    """
    for name, what in _FIXED:
        if config.get(name):
            raise CheckpointError(
                f"{CONFIG} has {name} {show(config[name])}, {what}, which is not served; take a model without it, such"
                " as GLiNER v2.1"
            )
    read_choice(
        config, "words_splitter_type", {"whitespace": None}, default="whitespace", name=CONFIG
    )
    return read_choice(config, "span_mode", _SCORED, default="markerV0", name=CONFIG)


def _labels_of(config: Json) -> LabelEncoderConfig:
    """Return the encoder of labels; `Checkpoint` sets what its family and its tokenizer say."""
    encoder = _encoder_of(config, "labels_encoder")
    hidden, vocab_size = (
        read_int(encoder, key, name=CONFIG) for key in ("hidden_size", "vocab_size")
    )
    return LabelEncoderConfig(encoder, hidden, vocab_size, _MOST_TOKENS)


def _encoder_of(config: Json, source: str = "model_name") -> Json:
    """Return the configuration of an encoder of GLiNER.

    Args:
        source: field with the name of the model that the encoder was made of.
    """
    key = ENCODERS[source]
    given = config.get(key)
    if not isinstance(given, dict):
        raise CheckpointError(
            f"{CONFIG} has no {key}, only the name of a model ({show(config.get(source))}), whose files `varlen fetch`"
            " reads and adds"
        )
    return _encoder_alone(given, given.get("model_type", "deberta-v2"), f"{key} of {CONFIG}")


def _encoder_alone(given: Json, kind: object, name: str) -> Json:
    """Return the configuration of an encoder, with positions for a text and its labels.

    Args:
        kind: its `model_type`.
    """
    if kind not in _ENCODERS:
        raise CheckpointError(
            f"{name} has model_type {show(kind)}; allowed: {', '.join(_ENCODERS)}"
        )
    # the class of the encoder alone, whatever it was saved as
    encoder = {**given, "model_type": kind, "architectures": None}
    if kind == "deberta-v2" and not read_flag(given, "position_biased_input", default=True):
        # it has no table of positions, and the library sets no limit; distances stay as they are
        positions = read_int(given, "max_position_embeddings", default=512, name=name)
        furthest = read_int(given, "max_relative_positions", default=-1, lowest=-1, name=name)
        encoder["max_relative_positions"] = positions if furthest < 1 else furthest
        encoder["max_position_embeddings"] = max(positions, _MOST_TOKENS)
    return encoder


def read_marks(config: Json) -> tuple[str, str]:
    """Return the texts of the tokens before each label and behind the last.

    Raises:
        CheckpointError: one is no text.
    """
    return _read_text(config, "ent_token", "<<ENT>>"), _read_text(config, "sep_token", "<<SEP>>")


def _read_width(config: Json, default: int, name: str = "config.json") -> int:
    width = read_int(config, "max_width", default=default, name=name)
    if width > _MOST_WIDTH:
        raise CheckpointError(f"{name} has max_width {width}; allowed: up to {_MOST_WIDTH}")
    return width


def _read(config: Json, key: str, default: int, lowest: int = 1) -> int:
    return read_int(config, key, default=default, lowest=lowest, name=CONFIG)


def _read_text(config: Json, key: str, default: str) -> str:
    text = config.get(key, default)
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{CONFIG} has {key} {show(text)}; allowed: a text")
    return text
