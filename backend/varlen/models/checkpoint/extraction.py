"""Settings of a model that extracts spans for labels of a request (GLiNER).

Labels are tokens before the text. Such a folder has `gliner_config.json` instead of config.json; the configuration of
its encoder is a part of it.
Source: Zaratiana et al. 2023, arXiv:2311.08526; the fields follow the library gliner, which ignores unknown ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import (
    Json,
    read_choice,
    read_flag,
    read_int,
    read_object,
    show,
)
from varlen.models.checkpoint.files import has_file

CONFIG = "gliner_config.json"
# What a model scores with each label: spans of words, or words that begin, end or continue a span.
Scored: TypeAlias = Literal["spans", "words"]
# The token that stands for a word of several.
Subtoken: TypeAlias = Literal["first", "last"]

_SCORED: Mapping[str, Scored] = {"markerV0": "spans", "token_level": "words"}
_SUBTOKENS: Mapping[str, Subtoken] = {"first": "first", "last": "last"}
_ENCODERS = ("deberta-v2", "modernbert", "bert")
# Fields that make another model, and what they add.
_FIXED: tuple[tuple[str, str], ...] = (
    ("labels_encoder", "an encoder of its own for labels (a bi-encoder)"),
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
class ExtractionConfig:
    """How texts and labels become tokens, and what the model scores.

    Attributes:
        scored: things that it scores with each label.
        hidden: features of a word and of a label.
        encoder_hidden: features of a token.
        max_width: words of the longest span, if it scores spans.
        max_words: words of the longest text.
        lstm_layers: layers of the LSTM over words; 0 for none.
        label_mark: text of the token before each label.
        label_token: id of that token.
        separator: text between labels and words.
        reads_mark: whether the token before a label stands for it; else the one after.
        subtoken: token that stands for a word of several.
    """

    scored: Scored
    hidden: int
    encoder_hidden: int
    max_width: int
    max_words: int
    lstm_layers: int
    label_mark: str
    label_token: int
    separator: str
    reads_mark: bool
    subtoken: Subtoken

    @property
    def columns(self) -> int:
        """Scores of a word and a label."""
        return self.max_width if self.scored == "spans" else 3


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
    encoder = _read_encoder(config)
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
    max_width = _read(config, "max_width", 12)
    if max_width > _MOST_WIDTH:
        raise CheckpointError(f"{CONFIG} has max_width {max_width}; allowed: up to {_MOST_WIDTH}")
    mark, separator = read_marks(config)
    return encoder, ExtractionConfig(
        scored=scored,
        hidden=hidden,
        encoder_hidden=read_int(encoder, "hidden_size", name=CONFIG),
        max_width=max_width,
        max_words=_read(config, "max_len", 384),
        lstm_layers=lstm_layers,
        label_mark=mark,
        label_token=read_int(config, "class_token_index", lowest=0, name=CONFIG),
        separator=separator,
        reads_mark=read_flag(config, "embed_ent_token", default=True, name=CONFIG),
        subtoken=read_choice(config, "subtoken_pooling", _SUBTOKENS, default="first", name=CONFIG),
    )


def read_scored(config: Json) -> Scored:
    """Return what a model scores with each label.

    Args:
        config: content of gliner_config.json.

    Raises:
        CheckpointError: it is a model of another kind, which is not served.
    """
    for name, what in _FIXED:
        if config.get(name):
            raise CheckpointError(
                f"{CONFIG} has {name} {show(config[name])}, {what}, which is not served; take a model without it, such"
                " as those of GLiNER v2.1"
            )
    read_choice(
        config, "words_splitter_type", {"whitespace": None}, default="whitespace", name=CONFIG
    )
    return read_choice(config, "span_mode", _SCORED, default="markerV0", name=CONFIG)


def _read_encoder(config: Json) -> Json:
    """Return the configuration of the encoder, with positions for a text and its labels."""
    given = config.get("encoder_config")
    if not isinstance(given, dict):
        raise CheckpointError(
            f"{CONFIG} has no encoder_config, only the name of a model"
            f" ({show(config.get('model_name'))}), whose files `varlen fetch` reads and adds"
        )
    kind = given.get("model_type", "deberta-v2")
    if kind not in _ENCODERS:
        raise CheckpointError(
            f"encoder_config of {CONFIG} has model_type {show(kind)}; allowed: {', '.join(_ENCODERS)}"
        )
    # the class of the encoder alone, whatever it was saved as
    encoder = {**given, "model_type": kind, "architectures": None}
    if kind == "deberta-v2" and not read_flag(given, "position_biased_input", default=True):
        # it has no table of positions, and the library sets no limit; distances stay as they are
        positions = read_int(given, "max_position_embeddings", default=512, name=CONFIG)
        furthest = read_int(given, "max_relative_positions", default=-1, lowest=-1, name=CONFIG)
        encoder["max_relative_positions"] = positions if furthest < 1 else furthest
        encoder["max_position_embeddings"] = max(positions, _MOST_TOKENS)
    return encoder


def read_marks(config: Json) -> tuple[str, str]:
    """Return the texts of the tokens before each label and behind the last.

    Raises:
        CheckpointError: one is no text.
    """
    return _read_text(config, "ent_token", "<<ENT>>"), _read_text(config, "sep_token", "<<SEP>>")


def _read(config: Json, key: str, default: int, lowest: int = 1) -> int:
    return read_int(config, key, default=default, lowest=lowest, name=CONFIG)


def _read_text(config: Json, key: str, default: str) -> str:
    text = config.get(key, default)
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{CONFIG} has {key} {show(text)}; allowed: a text")
    return text
