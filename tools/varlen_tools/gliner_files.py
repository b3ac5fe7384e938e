"""Completes a model of GLiNER that has no tokenizer, or no configuration of its encoder.

The library reads both from the model that gliner_config.json names (the backbone), and adds tokens for labels. An
encoder of labels has a backbone of its own, and no such tokens.
Source: `BaseGLiNER` and `Transformer` of the library gliner 0.2.29.
"""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

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
    has_file,
    locate,
    read_bytes,
    read_int,
    read_object,
    show,
)
from varlen_tools.make_tokenizer import SOURCE_FILES, make_tokenizer

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
