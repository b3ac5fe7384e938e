"""Makes tokenizer.json of the older files that some checkpoints have in its place.

Files of Marian and DeBERTa are converted by code of our own, all others by transformers, if it is installed. The
library SentencePiece checks the results of transformers: 5.23 leaves rules of normalization out for some classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import TOKENIZER, check_readable, has_file
from varlen_tools.messages import one_line
from varlen_tools.sample_texts import TEXTS
from varlen_tools.sentencepiece_model import (
    MODEL,
    ConversionError,
    SentencePieceError,
    convert_deberta,
    convert_marian,
    has_deberta_files,
    has_marian_files,
)

# Names of SentencePiece models.
SENTENCEPIECE = ("sentencepiece.bpe.model", "spiece.model", MODEL, "tokenizer.model")
# Files that are read to make tokenizer.json, and are not served.
SOURCE_FILES = ("source.spm", *SENTENCEPIECE)
# Packages that a conversion needs.
_NEEDED = ("transformers",)
_NEEDED_FOR_SENTENCEPIECE = (*_NEEDED, "sentencepiece")


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
        _check_packages(_NEEDED_FOR_SENTENCEPIECE, pieces)
        tokenizer = _convert(folder, (pieces,))
        _check_pieces(tokenizer, folder / pieces)
        return MadeTokenizer(tokenizer, (pieces,))
    for sources in (("vocab.json", "merges.txt"), ("vocab.txt",)):
        if all((folder / name).is_file() for name in sources):
            _check_packages(_NEEDED, " and ".join(sources))
            return MadeTokenizer(_convert(folder, sources), sources)
    return None


def _check_files(folder: Path) -> None:
    """Raise ConversionError unless `check_readable` passes what libraries read."""
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
    """Return the fast tokenizer that transformers makes of files; no code of the folder runs."""
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
    """Raise ConversionError unless the tokenizer splits texts as the SentencePiece model does."""
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
