"""Tokenizers of generating models: tokenizer_config.json must agree with tokenizer.json.

Releases of transformers differ in which fields of the first override the second: tokens that are added at the ends
of a text, and a space before it. varlen tokenizes only with tokenizer.json.
"""

from collections.abc import Iterator
from typing import Any

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import Json, show

_CONFIG = "tokenizer_config.json"
# Classes that put no space before a text where tokenizer_config.json does not say it.
_CLASSES_WITHOUT_SPACE = (
    "BartTokenizer",
    "BartTokenizerFast",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "RobertaTokenizer",
    "RobertaTokenizerFast",
)


def check_byte_pair_tokenizer(config: Json, tokenizer: Json, class_name: str) -> None:
    """Raise CheckpointError unless both files give the same token ids."""
    first, last = added_tokens(tokenizer)
    for key, token_key, added in (
        ("add_bos_token", "bos_token", first),
        ("add_eos_token", "eos_token", last),
    ):
        token = token_text(config.get(token_key))
        # transformers adds no token that the tokenizer does not have
        if config.get(key) and token is not None and added != [token]:
            _refuse(config, key, f"tokenizer.json adds {show(added)} there, not {show(token)}")
        if config.get(key) is False and token is not None and token in added:
            _refuse(config, key, f"tokenizer.json adds {show(added)} there")
    asked = config.get("add_prefix_space")
    if asked is None and class_name in _CLASSES_WITHOUT_SPACE:
        asked = False
    if asked is not None and bool(asked) != _adds_space(tokenizer):
        _refuse(
            config,
            "add_prefix_space",
            f"tokenizer.json {'does not add' if asked else 'adds'} a space",
        )


def token_text(token: Any) -> str | None:
    """Return the text of a token, which may be an object with its properties."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _refuse(config: Json, key: str, found: str) -> None:
    default = "" if key in config else " (its default)"
    raise CheckpointError(
        f"{_CONFIG} has {key} {show(config.get(key, False))}{default}, and {found}; make them agree"
    )


def added_tokens(tokenizer: Json) -> tuple[list[str], list[str]]:
    """Return the tokens that tokenizer.json puts before and after a text."""
    before: list[str] = []
    after: list[str] = []
    for part in _parts(tokenizer.get("post_processor"), "processors"):
        if part.get("type") != "TemplateProcessing":
            continue
        into = before
        for piece in part.get("single") or []:
            if "Sequence" in piece:
                into = after
            elif "SpecialToken" in piece:
                into.append(piece["SpecialToken"].get("id"))
    return before, after


def _adds_space(tokenizer: Json) -> bool:
    """Return whether tokenizer.json puts a space before a text."""
    for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "ByteLevel" and part.get("add_prefix_space"):
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    return any(part.get("type") == "Prepend" for part in normalizers)


def _parts(component: Any, key: str) -> Iterator[Json]:
    """Yield the component, or its parts if it is a sequence of them."""
    if not isinstance(component, dict):
        return
    if component.get("type") == "Sequence":
        for part in component.get(key) or []:
            yield from _parts(part, key)
    else:
        yield component
