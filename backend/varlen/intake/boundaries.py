"""Places in a text that no token crosses.

The tokens of a text up to such a place are the first tokens of the whole text. With most tokenizers the tokens from
there on are its last ones: where no step changes the beginning of a text, such as by stripping spaces there.

A place is safe if every step of a tokenizer treats the text before it alike, whatever comes after it:

* A letter or digit before a space, if words are split at spaces. The space begins a new character for every Unicode
  normalization: nothing composes with it, and it belongs to no cluster of characters that precede it.
* If words are split at all white space, also a letter or digit of ASCII before a tab or the end of a line.
* With the words of BERT, also a place before a punctuation mark or a Chinese character, each a word of its own.

Tokenizers with parts that are not known here have no safe boundaries. docs/decisions/0045-bounded-reading.md has more.
"""

import json
import re
import string
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

from tokenizers import AddedToken, Tokenizer

Part: TypeAlias = Mapping[str, Any]

# A letter or digit that forms no cluster with a character after it: U+0D4E does, and some above U+FFFF.
_LETTER = r"[^\W_\u0d4e\U00010000-\U0010ffff]"
_ASCII_LETTER = "[A-Za-z0-9]"
_METASPACE = "\u2581"
_SPACE_WITHIN = re.compile(rf"\S[\s{_METASPACE}]")
_CHINESE = "\u4e00-\u9fff"

# Normalizers that treat characters one by one, or in groups that no space belongs to.
_NORMALIZERS = frozenset(
    {
        "BertNormalizer",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Replace",
        "Strip",
        "StripAccents",
    }
)
_SPACES = frozenset({" {2,}", " +", r"\s+", r"\s{2,}"})
# Splitters that no letter before a space looks different to, and that leave a space between words where it is.
_NEUTRAL_SPLITTERS = frozenset({"Digits", "Punctuation"})
# Splitters whose words contain a space at the beginning only.
_SPACE_SPLITTERS = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_WORD_PATTERNS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    # patterns of Qwen 2 and of Llama 3
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)


def safe_boundary(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that ends at safe boundaries; None if the tokenizer has none.

    The tokens of `text[:match.end()]` are the first tokens of `text`, special tokens aside.
    """
    added = list(tokenizer.get_added_tokens_decoder().values())
    normalizer, splitter = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    is_safe = (
        not getattr(tokenizer.model, "dropout", None)
        and not any(_SPACE_WITHIN.search(token.content) for token in added)
        and all(map(_is_safe_normalizer, _parts(normalizer)))
        and _splits_at_spaces(
            _parts(splitter), as_metaspace=any(map(_is_metaspace, _parts(normalizer)))
        )
    )
    if not is_safe:
        return None
    return _pattern(normalizer, splitter, added, has_lines=_splits_at_lines(normalizer, splitter))


def safe_start(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that ends where texts can begin; None without such places.

    The tokens of `text[match.end():]` are the last tokens of `text`, special tokens aside.
    """
    added = list(tokenizer.get_added_tokens_decoder().values())
    normalizer, splitter = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    if (
        safe_boundary(tokenizer) is None
        or any(map(_changes_beginning, _parts(normalizer)))
        or any(map(_reads_before, added))
    ):
        return None
    has_prefix = any(part.get("add_prefix_space") for part in _parts(splitter))
    has_lines = _splits_at_lines(normalizer, splitter) and not has_prefix
    return _pattern(normalizer, splitter, added, has_lines=has_lines)


def _pattern(
    normalizer: Part, splitter: Part, added: list[AddedToken], *, has_lines: bool
) -> re.Pattern[str]:
    """Return the pattern of a tokenizer with safe boundaries.

    Args:
        has_lines: whether tabs and the ends of lines are boundaries too.
    """
    normalizers = {part["type"] for part in _parts(normalizer)}
    before, after = _LETTER, " "
    if splitter["type"] == "BertPreTokenizer" and "Replace" not in normalizers:
        marks = re.escape("".join(_free_marks(added)))
        if marks:
            before, after = f"(?:{_LETTER}|[{marks}])", f" {marks}"
        if normalizer.get("handle_chinese_chars") and not _mixes_with_chinese(added):
            after += _CHINESE
    lines = rf"|{_ASCII_LETTER}(?=[\t\n\r])" if has_lines else ""
    return re.compile(f"{before}(?=[{after}]){lines}")


def _state(part: Any) -> Part:
    """Return a part of a tokenizer as tokenizer.json has it; empty if there is none."""
    return {} if part is None else cast(Part, json.loads(part.__getstate__()))


def _parts(part: Part) -> list[Part]:
    if not part:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    return [each for one in inner for each in _parts(one)]


def _is_safe_normalizer(part: Part) -> bool:
    if part["type"] != "Replace":
        return part["type"] in _NORMALIZERS
    text, pattern = part["pattern"].get("String"), part["pattern"].get("Regex")
    if text is not None and not re.search(r"\s", text):
        return True
    # a space stays one, or becomes the space of SentencePiece
    return (part["content"] == " " and pattern in _SPACES) or _is_metaspace(part)


def _changes_beginning(part: Part) -> bool:
    return part["type"] == "Prepend" or bool(part["type"] == "Strip" and part["strip_left"])


def _reads_before(token: AddedToken) -> bool:
    """Return whether an added token reads across a boundary that begins a text."""
    takes_spaces = token.rstrip and re.search(r"\w$", token.content)
    return bool(takes_spaces or (token.single_word and token.content[:1].isspace()))


def _splits_at_lines(normalizer: Part, splitter: Part) -> bool:
    """Return whether a tokenizer that splits at spaces does so at the ends of lines."""
    # a table of characters may leave them out
    if any(part["type"] == "Precompiled" for part in _parts(normalizer)):
        return False
    kinds: list[str] = [part["type"] for part in _parts(splitter)]
    return next(kind for kind in kinds if kind not in _NEUTRAL_SPLITTERS) != "Metaspace"


def _is_metaspace(part: Part) -> bool:
    """Return whether a normalizer replaces every space as SentencePiece does."""
    return part.get("pattern") == {"String": " "} and part.get("content") == _METASPACE


def _splits_at_spaces(splitters: Iterable[Part], *, as_metaspace: bool) -> bool:
    """Return whether splitters, one after another, split before a space that follows a letter."""
    for part in splitters:
        kind = part["type"]
        if kind == "Metaspace" and part["replacement"] == _METASPACE and part.get("split", True):
            return True
        if not as_metaspace and (
            kind in _SPACE_SPLITTERS
            or (kind == "ByteLevel" and part.get("use_regex", True))
            or (kind == "Split" and _is_word_pattern(part))
        ):
            # splitters after this one see words
            return True
        if kind not in _NEUTRAL_SPLITTERS:
            return False
    return False


def _is_word_pattern(part: Part) -> bool:
    is_isolated = part["behavior"] == "Isolated" and not part["invert"]
    return is_isolated and part["pattern"].get("Regex") in _WORD_PATTERNS


def _free_marks(added: Iterable[AddedToken]) -> list[str]:
    used = set("".join(unicodedata.normalize("NFKC", token.content) for token in added))
    # an underscore is part of a word to an added token that has to be a word
    return [mark for mark in string.punctuation if mark not in used and mark != "_"]


def _mixes_with_chinese(added: Iterable[AddedToken]) -> bool:
    return any(token.single_word or re.search(f"[{_CHINESE}]", token.content) for token in added)
