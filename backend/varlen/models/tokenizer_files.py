"""tokenizer.json and tokenizer_config.json, checked against each other.

varlen tokenizes with tokenizer.json. In transformers, some fields of tokenizer_config.json override it
for BertTokenizer, so a disagreement is refused.
"""

from pathlib import Path

from varlen.errors import CheckpointError
from varlen.models.config_file import Json, read_object, read_optional_object, show

_CONFIG = "tokenizer_config.json"
# Classes whose fields override tokenizer.json; a BERT checkpoint that names none gets the first.
_BERT_CLASSES = ("BertTokenizer", "BertTokenizerFast")


def read_tokenizer_limit(folder: Path, *, lowercase: bool) -> int | None:
    """Return model_max_length, at which transformers truncates; None if no file has it.

    Args:
        folder: of the checkpoint.
        lowercase: whether sentence-transformers asks for lowercased texts.

    Raises:
        CheckpointError: a file is missing or damaged, or the two disagree on what changes token ids.
    """
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; save the checkpoint with its fast tokenizer"
        )
    normalizer = read_object(folder, "tokenizer.json").get("normalizer")
    if lowercase and not _lowercases(normalizer):
        raise CheckpointError(
            "sentence_bert_config.json has do_lower_case true, and tokenizer.json does not lowercase;"
            " save tokenizer.json with a normalizer that does"
        )
    if not (folder / _CONFIG).is_file():
        return None
    config = read_optional_object(folder, _CONFIG)
    if config.get("truncation_side") not in (None, "right"):
        raise CheckpointError(
            f"{_CONFIG} has truncation_side {show(config['truncation_side'])}; allowed: right"
        )
    if config.get("tokenizer_class") in (None, *_BERT_CLASSES):
        _check_normalizer(config, normalizer)
    limit = config.get("model_max_length")
    if limit is None:
        return None
    # transformers writes 1e30 for "no limit"
    if not isinstance(limit, int | float) or isinstance(limit, bool) or limit < 1:
        raise CheckpointError(
            f"{_CONFIG} has model_max_length {limit!r}; allowed: whole numbers from 1"
        )
    return int(limit)


def _check_normalizer(config: Json, normalizer: object) -> None:
    """Raise CheckpointError unless BertTokenizer would normalize text as tokenizer.json does."""
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
        raise CheckpointError(
            f"tokenizer.json has the normalizer {show(kind)}, and {_CONFIG} the class BertTokenizer,"
            " which replaces it; set tokenizer_class to PreTrainedTokenizerFast to keep it"
        )
    lowercase = config.get("do_lower_case", True)
    strip_accents = config.get("strip_accents")
    wanted = {
        "do_lower_case": (lowercase, normalizer.get("lowercase")),
        # null strips accents if text is lowercased
        "strip_accents": (
            lowercase if strip_accents is None else strip_accents,
            normalizer.get("lowercase")
            if normalizer.get("strip_accents") is None
            else normalizer["strip_accents"],
        ),
        "tokenize_chinese_chars": (
            config.get("tokenize_chinese_chars", True),
            normalizer.get("handle_chinese_chars"),
        ),
    }
    for key, (theirs, ours) in wanted.items():
        if bool(theirs) != bool(ours):
            raise CheckpointError(
                f"{_CONFIG} has {key} {show(theirs)}{'' if key in config else ' (its default)'},"
                f" and the normalizer of tokenizer.json {show(ours)}; make them agree"
            )


def _lowercases(normalizer: object) -> bool:
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowercases(part) for part in normalizer.get("normalizers") or [])
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))
