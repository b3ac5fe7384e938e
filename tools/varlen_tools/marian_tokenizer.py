"""Makes tokenizer.json of the files that Marian checkpoints have: source.spm and vocab.json.

OPUS-MT checkpoints split sources by one SentencePiece model and targets by another, over one vocabulary. A source is
split by source.spm; a piece that only targets have stands for a character that source.spm does not know.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from varlen.models.checkpoint.config_file import read_json
from varlen.models.checkpoint.files import TOKENIZER, has_file
from varlen_tools.sentencepiece_model import UnigramModel, read_unigram_model

EOS, UNKNOWN, PAD = "</s>", "<unk>", "<pad>"

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
    tokenizer = Tokenizer(models.Unigram(_scored(vocabulary, model), vocabulary[UNKNOWN], False))
    rules = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    tokenizer.normalizer = normalizers.Sequence(
        [*rules, normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=model.splits_words)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A $B {EOS}", special_tokens=[(EOS, vocabulary[EOS])]
    )
    # the language of the target, before a source of models with several
    languages = [token for token in vocabulary if token.startswith(">>") and token.endswith("<<")]
    tokenizer.add_special_tokens(
        [
            *(AddedToken(token, normalized=False, special=True) for token in (EOS, UNKNOWN, PAD)),
            *(AddedToken(token, normalized=False, special=True) for token in languages),
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
    absent = [token for token in (EOS, UNKNOWN, PAD) if token not in content]
    if absent:
        raise ConversionError(f"vocab.json has no token {absent[0]}")
    if (folder / "target_vocab.json").is_file():
        raise ConversionError("there is a target_vocab.json; two vocabularies are not converted")
    return content


def _scored(vocabulary: Mapping[str, int], model: UnigramModel) -> list[tuple[str, float]]:
    """Return each token and its score, in the order of ids."""
    scores = model.scores

    def score(token: str) -> float:
        if token in scores:
            return scores[token]
        return _TARGET_CHARACTER if len(token) == 1 else _TARGET_PIECE

    return [(token, score(token)) for token in sorted(vocabulary, key=vocabulary.__getitem__)]
