"""Tokens that a request favors or forbids: vLLM's `logit_bias` and `bad_words`."""

import re
from collections.abc import Mapping
from typing import TypeAlias

from varlen.errors import RequestError
from varlen.parameter import MAX_INT32, Parameter, parameter_field, read_json, refuse

LogitBias: TypeAlias = tuple[tuple[int, float], ...]

MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128

_BIAS = "numbers from -100 to 100 by token id"
_WORDS = "a string, or a list of strings"
_NUMBER = Parameter(0.0, "", lowest=-100, highest=100, is_whole=False)
_TOKEN = re.compile(r"0|[1-9][0-9]{0,9}")


def logit_bias_field() -> LogitBias:
    """Return the field of `logit_bias`."""
    return parameter_field(
        (),
        "numbers by token id that are added to the logits of these tokens, before penalties. In a search the scores"
        " come from the changed logits",
        allowed_text=f"an object of {_BIAS}, at most {MAX_BIASED_TOKENS}",
    )


def bad_words_field() -> tuple[str, ...]:
    """Return the field of `bad_words`."""
    return parameter_field(
        (),
        "words that the answer does not contain, in the tokens that the tokenizer gives them. The last token of a word"
        " is forbidden after its other tokens, if these are tokens of the answer",
        allowed_text=f"a string, or up to {MAX_BAD_WORDS} of at most {MAX_BAD_WORD_CHARACTERS} characters",
    )


def read_logit_bias(value: object) -> object:
    """Return the pairs of an object, or of its JSON text, by token id.

    Another value is returned unchanged, and `check_logit_bias` refuses it.

    Raises:
        RequestError: a text is not JSON, there are too many tokens, or a name is no token id.
    """
    if isinstance(value, str):
        value = read_json("logit_bias", value)
    if not isinstance(value, Mapping):
        return value
    _check_number("logit_bias", len(value), "tokens", MAX_BIASED_TOKENS)
    pairs: dict[int, object] = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and _TOKEN.fullmatch(token)) and type(token) is not int:
            raise RequestError(_wrong_token(token))
        if int(token) in pairs:
            raise RequestError(f"logit_bias has the token {token} twice; send it once")
        pairs[int(token)] = _NUMBER.from_json(bias)
    return tuple(sorted(pairs.items(), key=lambda pair: pair[0]))


def check_logit_bias(bias: object) -> None:
    """Raise RequestError unless these are allowed pairs of a token id and a number."""
    if not isinstance(bias, tuple) or not all(isinstance(e, tuple) and len(e) == 2 for e in bias):
        refuse("logit_bias", bias, f"an object of {_BIAS}")
    _check_number("logit_bias", len(bias), "tokens", MAX_BIASED_TOKENS)
    for token, number in bias:
        if type(token) is not int or not 0 <= token <= MAX_INT32:
            raise RequestError(_wrong_token(token))
        _NUMBER.check(f"logit_bias of token {token}", number)


def read_bad_words(value: object) -> object:
    """Return a tuple of words; one string needs no list.

    An empty string asks for nothing: clients of TensorRT-LLM's backend send it.
    """
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(value) if isinstance(value, list) else value


def check_bad_words(words: object) -> None:
    """Raise RequestError unless these are words that can be tokenized."""
    if not isinstance(words, tuple) or not all(isinstance(each, str) for each in words):
        refuse("bad_words", words, _WORDS)
    _check_number("bad_words", len(words), "words", MAX_BAD_WORDS)
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise RequestError(
                f"bad_words has a word of {len(word)} characters; allowed: 1 to {MAX_BAD_WORD_CHARACTERS}"
            )
        if not word.strip():
            refuse("bad_words", word, "words that are not only white space")
        if any("\ud800" <= character <= "\udfff" for character in word):
            refuse("bad_words", word, "valid Unicode")


def _check_number(name: str, number: int, kind: str, most: int) -> None:
    if number > most:
        raise RequestError(f"{name} has {number} {kind}; allowed: up to {most}")


def _wrong_token(token: object) -> str:
    return f"logit_bias has the token {str(token)[:40]!r}; allowed: token ids from 0 to {MAX_INT32}"
