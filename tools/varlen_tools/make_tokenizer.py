"""Makes files that some checkpoints lack: tokenizer.json, and the configuration of an encoder in GLiNER.

Files of Marian and DeBERTa are converted by code of our own, all others by transformers, if it is installed. The
library SentencePiece checks the results of transformers: 5.23 leaves rules of normalization out for some classes.

A SentencePiece model is one message of protobuf.
OPUS-MT checkpoints (source.spm and vocab.json) split sources by one model and targets by another, over one vocabulary.
A source is split by source.spm; a piece that only targets have stands for a character that source.spm does not know.
Tokenizers of DeBERTa 2 and 3 have the rules of normalization in spm.model, with which the checkpoints were trained.
Source: `DebertaV2Converter` of transformers; sentencepiece_model.proto of SentencePiece, arXiv:1808.06226.

The library gliner reads a tokenizer and the configuration of the encoder from the model that gliner_config.json names
(the backbone), and adds tokens for labels. An encoder of labels has a backbone of its own, and no such tokens.
Source: `BaseGLiNER` and `Transformer` of the library gliner 0.2.29.
"""

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from varlen.errors import CheckpointError
from varlen.models.checkpoint.extraction import (
    CONFIG,
    ENCODERS,
    LABELS_TOKENIZER,
    read_marks,
    read_scored,
    reads_labels_apart,
)
from varlen.models.checkpoint.files import (
    TOKENIZER,
    Json,
    check_readable,
    has_file,
    locate,
    read_bytes,
    read_flag,
    read_int,
    read_json,
    read_object,
    read_optional_object,
    show,
)
from varlen_tools.messages import one_line
from varlen_tools.sample_texts import TEXTS

# Types of a piece, and the type of a model; numbers of the file format.
NORMAL, UNKNOWN, CONTROL, USER, _UNUSED = 1, 2, 3, 4, 5
_KINDS = (NORMAL, UNKNOWN, CONTROL, _UNUSED)
_UNIGRAM = 1
# The part of sentencepiece_model.proto that matters, by other names: a space goes before a text, double ones are left
# out, and ▁ stands for one.
_FORM = """
name: "pieces.proto"
message_type { name: "Model"
  field { name: "pieces" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Piece" }
  field { name: "trainer" number: 2 type: TYPE_MESSAGE type_name: "Trainer" }
  field { name: "normalizer" number: 3 type: TYPE_MESSAGE type_name: "Normalizer" } }
message_type { name: "Piece"
  field { name: "text" number: 1 type: TYPE_BYTES }
  field { name: "score" number: 2 type: TYPE_FLOAT }
  field { name: "kind" number: 3 type: TYPE_INT32 default_value: "1" } }
message_type { name: "Trainer"
  field { name: "kind" number: 3 type: TYPE_INT32 default_value: "1" }
  field { name: "splits_words" number: 22 type: TYPE_BOOL default_value: "true" }
  field { name: "ends_in_space" number: 24 type: TYPE_BOOL } }
message_type { name: "Normalizer"
  field { name: "charsmap" number: 2 type: TYPE_BYTES }
  field { name: "adds_space" number: 3 type: TYPE_BOOL default_value: "true" }
  field { name: "cuts_spaces" number: 4 type: TYPE_BOOL default_value: "true" }
  field { name: "marks_spaces" number: 5 type: TYPE_BOOL default_value: "true" } }
"""


class SentencePieceError(Exception):
    """The file is damaged, or its model is of a kind that is not converted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a model.

    Attributes:
        kind: its type, such as `NORMAL`.
    """

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class UnigramModel:
    """A unigram model.

    Attributes:
        charsmap: compiled rules that normalize characters; empty without rules.
        splits_words: whether no piece spans a space.
    """

    pieces: tuple[Piece, ...]
    charsmap: bytes
    splits_words: bool

    @property
    def scores(self) -> dict[str, float]:
        """Log probability of each piece that texts are split into."""
        return {each.text: each.score for each in self.pieces if each.kind == NORMAL}


def read_unigram_model(path: Path, kinds: Collection[int] = _KINDS) -> UnigramModel:
    """Return the model in a file.

    Args:
        kinds: types of pieces that the caller converts.

    Raises:
        SentencePieceError: it is damaged, or a model of another kind.
    """
    try:
        model = read_message(_FORM, "Model", read_bytes(path.parent, path.name))
        pieces = tuple(Piece(each.text.decode(), each.score, each.kind) for each in model.pieces)
    except CheckpointError as error:
        raise SentencePieceError(str(error)) from None
    except (DecodeError, UnicodeDecodeError) as error:
        raise SentencePieceError(f"{path.name} is damaged: {error}") from None
    trainer, normalizer = model.trainer, model.normalizer
    if trainer.kind != _UNIGRAM:
        raise SentencePieceError(f"{path.name} is not a unigram model; no other kind is converted")
    has_others = any(each.kind not in kinds for each in pieces)
    keeps_spaces = not (
        normalizer.adds_space and normalizer.cuts_spaces and normalizer.marks_spaces
    )
    if has_others or trainer.ends_in_space or keeps_spaces:
        raise SentencePieceError(
            f"{path.name} has pieces of bytes or of users, or keeps spaces; such models are not converted"
        )
    return UnigramModel(pieces, normalizer.charsmap, trainer.splits_words)


def read_message(form: str, name: str, data: bytes) -> Any:
    """Return a message of protobuf with the fields that a form names.

    Args:
        form: `FileDescriptorProto` in the text format.
        name: its type in the form.

    Raises:
        DecodeError: the data is no such message.
    """
    pool = DescriptorPool()
    pool.Add(text_format.Parse(form, FileDescriptorProto()))
    return GetMessageClass(pool.FindMessageTypeByName(name)).FromString(data)


_EOS, _UNKNOWN_TEXT, _PAD = "</s>", "<unk>", "<pad>"

# Scores far below the scores of pieces of sources: of a character that only targets have, and of a longer piece.
_TARGET_CHARACTER, _TARGET_PIECE = -1e4, -1e7


class ConversionError(Exception):
    """The files cannot be converted; the message says why."""


def has_marian_files(folder: Path) -> bool:
    """Return whether a checkpoint folder has Marian's files, and no tokenizer.json."""
    return has_file(folder, "source.spm") and not has_file(folder, TOKENIZER)


def convert_marian(folder: Path) -> Tokenizer:
    """Return the tokenizer of sources, which also decodes targets.

    Args:
        folder: checkpoint with source.spm and vocab.json.

    Raises:
        ConversionError: a file is missing, or they do not fit each other.
        SentencePieceError: source.spm cannot be converted.
    """
    vocabulary = _read_vocabulary(folder)
    model = read_unigram_model(folder / "source.spm")
    missing = model.scores.keys() - vocabulary.keys()
    if missing:
        raise ConversionError(
            f"vocab.json lacks {len(missing)} pieces of source.spm, such as {min(missing)!r}"
        )
    tokenizer = Tokenizer(
        models.Unigram(_scored(vocabulary, model), vocabulary[_UNKNOWN_TEXT], False)
    )
    rules = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    tokenizer.normalizer = normalizers.Sequence(
        [*rules, normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=model.splits_words)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {_EOS}", pair=f"$A $B {_EOS}", special_tokens=[(_EOS, vocabulary[_EOS])]
    )
    # the language of the target, before a source of models with several
    languages = [token for token in vocabulary if token.startswith(">>") and token.endswith("<<")]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token in (_EOS, _UNKNOWN_TEXT, _PAD, *languages)
        ]
    )
    return tokenizer


def _read_vocabulary(folder: Path) -> Mapping[str, int]:
    try:
        content: Any = read_json(folder, "vocab.json")
    except CheckpointError as error:
        raise ConversionError(str(error)) from None
    if not isinstance(content, dict) or sorted(content.values()) != list(range(len(content))):
        raise ConversionError("vocab.json does not give ids from 0 to tokens")
    absent = [token for token in (_EOS, _UNKNOWN_TEXT, _PAD) if token not in content]
    if absent:
        raise ConversionError(f"vocab.json has no token {absent[0]}")
    if (folder / "target_vocab.json").is_file():
        raise ConversionError("there is a target_vocab.json; two vocabularies are not converted")
    return content


def _scored(vocabulary: Mapping[str, int], model: UnigramModel) -> list[tuple[str, float]]:
    scores = model.scores

    def score(token: str) -> float:
        if token in scores:
            return scores[token]
        return _TARGET_CHARACTER if len(token) == 1 else _TARGET_PIECE

    return [(token, score(token)) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


MODEL = "spm.model"
# Special tokens; the mask is none of the model's pieces.
_FIRST, _LAST, _MASK = "[CLS]", "[SEP]", "[MASK]"
_CONFIG = "tokenizer_config.json"


def has_deberta_files(folder: Path) -> bool:
    """Return whether a folder has a SentencePiece model of DeBERTa."""
    if not has_file(folder, MODEL):
        return False
    kind = read_optional_object(folder, "config.json").get("model_type")
    name = read_optional_object(folder, _CONFIG).get("tokenizer_class")
    return kind == "deberta-v2" or name in ("DebertaV2Tokenizer", "DebertaV2TokenizerFast")


def convert_deberta(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder with spm.model.

    Raises:
        ConversionError: the model has no special tokens.
        CheckpointError: tokenizer_config.json is damaged.
        SentencePieceError: spm.model is damaged, or a model of another kind.
    """
    model = read_unigram_model(folder / MODEL, (NORMAL, UNKNOWN, CONTROL, USER))
    ids = {each.text: number for number, each in enumerate(model.pieces)}
    unknown = next((ids[each.text] for each in model.pieces if each.kind == UNKNOWN), None)
    if unknown is None or not {_FIRST, _LAST} <= ids.keys():
        raise ConversionError(f"{MODEL} lacks {_FIRST}, {_LAST} or the piece of unknown characters")
    config = read_optional_object(folder, _CONFIG)
    lowercase, splits_marks = (
        read_flag(config, name, default=False, name=_CONFIG)
        for name in ("do_lower_case", "split_by_punct")
    )
    pieces = [(each.text, each.score) for each in model.pieces]
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            *([normalizers.Lowercase()] if lowercase else []),
            normalizers.Strip(),
            *([normalizers.Precompiled(model.charsmap)] if model.charsmap else []),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Punctuation("isolated")] if splits_marks else []),
            pre_tokenizers.Metaspace(split=model.splits_words),
        ]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_FIRST}:0 $A:0 {_LAST}:0",
        pair=f"{_FIRST}:0 $A:0 {_LAST}:0 $B:1 {_LAST}:1",
        special_tokens=[(token, ids[token]) for token in (_FIRST, _LAST)],
    )
    special = [each.text for each in model.pieces if each.kind in (CONTROL, UNKNOWN)]
    names = dict.fromkeys((*special, _FIRST, _LAST, _MASK))
    tokenizer.add_special_tokens(
        [AddedToken(each, normalized=False, special=True) for each in names]
    )
    users = [each.text for each in model.pieces if each.kind == USER]
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in users])
    return tokenizer


SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model", MODEL, "tokenizer.model")
# Files that are read to make tokenizer.json, and are not served.
SOURCE_FILES = ("source.spm", *SENTENCEPIECE)


@dataclass(frozen=True, slots=True)
class MadeTokenizer:
    """A tokenizer, and the files that it was made of."""

    tokenizer: Tokenizer
    sources: tuple[str, ...]


def make_tokenizer(folder: Path) -> MadeTokenizer | None:
    """Return a tokenizer for a folder without tokenizer.json, or None without files for one.

    Raises:
        ConversionError: a package is missing, the files are damaged, or the result splits texts in another way.
    """
    if has_file(folder, TOKENIZER):
        return None
    _check_files(folder)
    try:
        if has_marian_files(folder):
            return MadeTokenizer(convert_marian(folder), ("source.spm", "vocab.json"))
        if has_deberta_files(folder):
            return MadeTokenizer(convert_deberta(folder), (MODEL,))
    except (CheckpointError, SentencePieceError) as error:
        raise ConversionError(str(error)) from None
    pieces = next((name for name in SENTENCEPIECE if (folder / name).is_file()), None)
    if pieces is not None:
        _check_packages(("transformers", "sentencepiece"), pieces)
        tokenizer = _convert(folder, (pieces,))
        _check_pieces(tokenizer, folder / pieces)
        return MadeTokenizer(tokenizer, (pieces,))
    for sources in (("vocab.json", "merges.txt"), ("vocab.txt",)):
        if all((folder / name).is_file() for name in sources):
            _check_packages(("transformers",), " and ".join(sources))
            return MadeTokenizer(_convert(folder, sources), sources)
    return None


def _check_files(folder: Path) -> None:
    for path in sorted(folder.glob("*")):
        if path.name in SOURCE_FILES or path.suffix in (".json", ".txt", ".jinja"):
            try:
                check_readable(folder, path.name)
            except CheckpointError as error:
                raise ConversionError(str(error)) from None


def _check_packages(names: Sequence[str], source: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConversionError(
            f"{source} can be converted with {' and '.join(names)}:"
            f" pip install {' '.join(missing)}, then fetch again"
        )


def _convert(folder: Path, sources: Sequence[str]) -> Tokenizer:
    import transformers

    # it reports converters that fail, and tries others
    transformers.logging.set_verbosity_error()
    try:
        made = transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise ConversionError(
            f"transformers does not convert {' and '.join(sources)} ({one_line(error)}); copy tokenizer.json of the"
            " model that the checkpoint was made of, or save its tokenizer with AutoTokenizer.from_pretrained(MODEL)"
            ".save_pretrained(FOLDER)"
        ) from None
    tokenizer = getattr(made, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise ConversionError(f"{type(made).__name__} of transformers has no fast form")
    return tokenizer


def _check_pieces(tokenizer: Tokenizer, path: Path) -> None:
    import sentencepiece

    try:
        original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ConversionError(f"{path.name} cannot be read: {error}") from None

    def known(pieces: Sequence[str]) -> list[str | None]:
        unknown = original.unk_id()
        return [None if original.piece_to_id(piece) == unknown else piece for piece in pieces]

    for text in TEXTS:
        expected = known(original.encode(text, out_type=str))
        actual = known(tokenizer.encode(text, add_special_tokens=False).tokens)
        if actual != expected:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(actual, expected, strict=False))
            at = len(list(same))
            raise ConversionError(
                f"transformers makes of {path.name} a tokenizer that splits {text!r} into {actual[at : at + 4]},"
                f" where SentencePiece has {expected[at : at + 4]}; if that is what you want, save it with"
                " transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )


_TOKENIZER_CONFIG = "tokenizer_config.json"
BACKBONE_FILES = (
    *("config.json", TOKENIZER, _TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", *SOURCE_FILES),
)
# A token that the library adds before the tokens of prompts, and no prompt has.
_FIRST_ADDED = "[FLERT]"
# The fields that name the backbones of texts and of labels.
TEXTS_FIELD, _LABELS_FIELD = ENCODERS
# Where the library writes neither the id of the mark nor the number of tokens.
_UNSET = -1


def backbone_fields(folder: Path) -> tuple[str, ...]:
    """Return the fields of gliner_config.json that name the backbones of a model.

    Raises:
        CheckpointError: it is not served, whatever is added.
    """
    config = read_object(folder, CONFIG)
    read_scored(config)
    return TEXTS_FIELD, *((_LABELS_FIELD,) if reads_labels_apart(config) else ())


def missing_parts(folder: Path, field: str) -> tuple[str, ...]:
    """Return the names of what a model reads from the backbone that a field names."""
    tokenizer, key = _tokenizer_file(field), ENCODERS[field]
    missing = () if has_file(folder, tokenizer) else (tokenizer,)
    has_config = isinstance(read_object(folder, CONFIG).get(key), dict)
    return missing if has_config else (*missing, key)


def backbone_name(folder: Path, field: str) -> str:
    """Return the name of a backbone.

    Raises:
        CheckpointError: gliner_config.json has none.
    """
    name = read_object(folder, CONFIG).get(field)
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{CONFIG} has {field} {show(name)}; allowed: a text")
    return name


def complete(folder: Path, field: str, backbone: Path | None) -> None:
    """Write what a model of GLiNER lacks of a backbone: files, and fields of gliner_config.json.

    Args:
        folder: a copy of the model, which is changed.
        backbone: folder with `BACKBONE_FILES`; None if there are no `missing_parts`.

    Raises:
        CheckpointError: a file is damaged or absent, or gliner_config.json does not fit the tokenizer.
        ConversionError: the tokenizer cannot be made of the files of the backbone.
    """
    config = read_object(folder, CONFIG)
    written = (_copy_whole if reads_labels_apart(config) else _add_marks)(
        folder, config, field, backbone
    )
    (folder / CONFIG).write_text(json.dumps({**config, **written}, indent=2), encoding="utf-8")


def _copy_whole(folder: Path, config: Json, field: str, backbone: Path | None) -> Json:
    """Return fields of a bi-encoder, whose tokenizers its backbones have."""
    file = _tokenizer_file(field)
    if not has_file(folder, file):
        (folder / file).parent.mkdir(exist_ok=True)
        _read_tokenizer(_given(backbone)).save(str(folder / file))
        _copy_settings(_given(backbone), (folder / file).parent)
    encoder = config.get(ENCODERS[field])
    if not isinstance(encoder, dict):
        encoder = _read_encoder(_given(backbone))
        size = read_int(config, "vocab_size", default=_UNSET, lowest=_UNSET, name=CONFIG)
        if size != _UNSET:
            encoder = {**encoder, "vocab_size": size}
    return {ENCODERS[field]: encoder}


def _add_marks(folder: Path, config: Json, field: str, backbone: Path | None) -> Json:
    mark_id, size = (
        read_int(config, name, default=_UNSET, lowest=_UNSET, name=CONFIG)
        for name in ("class_token_index", "vocab_size")
    )
    has_ids, has_tokenizer = _UNSET not in (mark_id, size), has_file(folder, TOKENIZER)
    if has_ids and backbone is None:
        return {}
    mark, separator = read_marks(config)
    if not (has_ids and has_tokenizer):
        tokenizer = _read_tokenizer(folder if has_tokenizer else _given(backbone))
        tokenizer.add_special_tokens([_FIRST_ADDED, mark, separator])
        if not has_ids:
            size = tokenizer.get_vocab_size()
            mark_id = size - 2
        if tokenizer.token_to_id(mark) != mark_id:
            raise CheckpointError(
                f"{CONFIG} has class_token_index {mark_id}, and the tokenizer gives {mark} the id"
                f" {tokenizer.token_to_id(mark)}: it is the tokenizer of another model"
            )
        tokenizer.save(str(folder / TOKENIZER))
    if not has_tokenizer:
        _copy_settings(_given(backbone), folder)
    encoder = config.get(ENCODERS[field])
    if not isinstance(encoder, dict):
        encoder = {**_read_encoder(_given(backbone)), "vocab_size": size}
    elif not has_ids:
        encoder = {**encoder, "vocab_size": size}
    return {"class_token_index": mark_id, "vocab_size": size, ENCODERS[field]: encoder}


def _tokenizer_file(field: str) -> str:
    return TOKENIZER if field == TEXTS_FIELD else f"{LABELS_TOKENIZER}/{TOKENIZER}"


def _copy_settings(backbone: Path, folder: Path) -> None:
    if has_file(backbone, _TOKENIZER_CONFIG):
        shutil.copyfile(locate(backbone, _TOKENIZER_CONFIG), folder / _TOKENIZER_CONFIG)


def _read_encoder(backbone: Path) -> Json:
    config = read_object(backbone, "config.json")
    if "model_type" not in config:
        # gliner_config.json would then mean DeBERTa
        raise CheckpointError(f"config.json of {backbone} has no model_type")
    return config


def _read_tokenizer(folder: Path) -> Tokenizer:
    made = make_tokenizer(folder)
    if made is not None:
        return made.tokenizer
    try:
        return Tokenizer.from_buffer(read_bytes(folder, TOKENIZER))
    except CheckpointError:
        raise
    # the library raises plain exceptions
    except Exception as error:
        raise CheckpointError(f"{TOKENIZER} cannot be read: {error}") from None


def _given(backbone: Path | None) -> Path:
    assert backbone is not None
    return backbone
