"""Makes tokenizer.json of spm.model, the SentencePiece model of DeBERTa versions 2 and 3.

It has the rules of normalization in that model, with which the checkpoints were trained. transformers 4 read them, and
5.23 leaves them out.
Source: `DebertaV2Converter` of transformers.
"""

from pathlib import Path

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

from varlen.models.checkpoint.config_file import read_flag, read_optional_object
from varlen.models.checkpoint.files import has_file
from varlen_tools.marian_tokenizer import ConversionError
from varlen_tools.sentencepiece_model import CONTROL, NORMAL, UNKNOWN, USER, read_unigram_model

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
