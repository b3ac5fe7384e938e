"""Options of a generation request: how tokens are chosen and when to stop.

Names, defaults and meanings are those of vLLM's sampling parameters, so its clients fit.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

from varlen.errors import RequestError, shorten

MAX_SAMPLES = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 256
MAX_GRAMMAR_CHARACTERS = 65_536

_MAX_INT32 = 2**31 - 1

# vLLM takes a temperature below the first for 0, and raises one below the second to it.
_GREEDY_TEMPERATURE = 1e-5
_LOWEST_TEMPERATURE = 1e-2

_NUMBER = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class _Range:
    """Allowed numbers of one parameter."""

    kind: type[int] | type[float]
    low: float
    high: float
    allowed: str

    def allows(self, value: object) -> bool:
        # a whole number is a float too, but true is no number
        if isinstance(value, bool) or not isinstance(value, (int, self.kind)):
            return False
        return self.low <= value <= self.high


def _whole(low: int, high: int) -> _Range:
    return _Range(int, low, high, f"whole numbers from {low} to {high}")


def _real(low: float, high: float) -> _Range:
    return _Range(float, low, high, f"numbers from {low:g} to {high:g}")


_RANGES: Mapping[str, _Range] = MappingProxyType(
    {
        "max_tokens": _whole(1, _MAX_INT32),
        "min_tokens": _whole(0, _MAX_INT32),
        "n": _whole(1, MAX_SAMPLES),
        "temperature": _real(0, 2),
        "top_k": _whole(-1, _MAX_INT32),
        "top_p": _Range(float, math.nextafter(0, 1), 1, "numbers above 0, up to 1"),
        "min_p": _real(0, 1),
        "repetition_penalty": _real(0.01, 100),
        "presence_penalty": _real(-2, 2),
        "frequency_penalty": _real(-2, 2),
        "seed": _whole(-(2**63), 2**64 - 1),
        "logprobs": _whole(0, MAX_LOGPROBS),
    }
)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_OPTIONAL = ("seed", "logprobs")

# Parameters of vLLM's clients that are not served, each with the only value that asks for nothing.
_NEUTRAL: Mapping[str, object] = MappingProxyType(
    {
        "best_of": 1,
        "detokenize": True,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
    }
)

_STRUCTURED = ("structured_outputs", "guided_decoding")
_GRAMMAR_KINDS = ("json", "regex", "choice", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Checked options of one request.

    Attributes:
        max_tokens, min_tokens: largest and smallest number of generated tokens.
        n: number of samples of each prompt.
        temperature: divides the logits; 0 chooses the most likely token.
        top_k: number of most likely tokens that may be chosen; 0 is all.
        top_p: the smallest set of most likely tokens with at least this probability may be chosen.
        min_p: tokens with less than this share of the largest probability are not chosen.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that prompt or answer hold.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the answer holds, once or for
            each time.
        seed: of the random numbers; None draws one for each sequence.
        stop: strings that end the answer.
        stop_token_ids: tokens that end the answer, beside the checkpoint's own.
        ignore_eos: whether the checkpoint's own end tokens do not end the answer.
        include_stop_str_in_output: whether the answer keeps the string, or the text of the token, that ended it.
        skip_special_tokens: whether the text leaves out special tokens.
        logprobs: number of most likely tokens reported with each token; None reports no probability.
        grammar: what the answer has to match, a JSON object with one of `json`, `regex` and `choice`, which
            `decoding.structured` compiles; None is any text.

    Raises:
        RequestError: a value is not allowed; the message names the parameter, the value and what is allowed.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    num_beams: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            if not allowed.allows(value) and not (value is None and name in _OPTIONAL):
                _refuse(name, value, allowed.allowed)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "true or false")
        _check_stops(self.stop, self.stop_token_ids)
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"up to max_tokens, {self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            _refuse("n", self.n, "1 with temperature 0, as all samples would be equal")
        if self.grammar is not None:
            if len(self.grammar) > MAX_GRAMMAR_CHARACTERS:
                raise RequestError(
                    f"structured_outputs has {len(self.grammar)} characters;"
                    f" allowed: up to {MAX_GRAMMAR_CHARACTERS}"
                )
            if self.ignore_eos:
                _refuse("ignore_eos", True, "false with structured_outputs, which end themselves")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, object]) -> "GenerationOptions":
        """Return the options of a JSON object of vLLM's sampling parameters.

        A null stands for the default. As with NVIDIA's vLLM backend, numbers and flags may come as strings, and
        structured outputs as a string that holds the object.

        Raises:
            RequestError: a name is unknown or a value is not allowed; the message names both, and what is allowed.
        """
        values: dict[str, Any] = {}
        for name, value in parameters.items():
            if name not in _NAMES:
                raise RequestError(_unknown(name))
            if value is None:
                continue
            if name in _STRUCTURED:
                if "grammar" in values:
                    raise RequestError(
                        f"the request has both {' and '.join(_STRUCTURED)}; send one"
                    )
                values["grammar"] = _grammar(name, value)
            elif name in _NEUTRAL:
                wanted = _NEUTRAL[name]
                if _parse(value, type(wanted)) != wanted:
                    _refuse(name, value, json.dumps(wanted))
            else:
                values[name] = _value(name, value)
        return cls(**values)


_NAMES = frozenset(
    {
        *(field.name for field in fields(GenerationOptions) if field.name != "grammar"),
        *_NEUTRAL,
        *_STRUCTURED,
    }
)


def _value(name: str, value: object) -> object:
    """Return the value of an option, in the form that `GenerationOptions` checks."""
    if name in _FLAGS:
        return _parse(value, bool)
    if name == "logprobs" and isinstance(value, bool):
        # OpenAI's flag of chats
        return 1 if value else None
    if name in _RANGES:
        return _number(name, _parse(value, _RANGES[name].kind))
    if isinstance(value, list):
        return tuple(value)
    # `stop` may be one string
    return (value,) if isinstance(value, str) and name == "stop" else value


def _number(name: str, value: object) -> object:
    """Return the number that vLLM takes this one for."""
    if not _RANGES[name].allows(value):
        return value
    if (name, value) == ("top_k", -1):
        return 0
    if (name, value) == ("seed", -1):
        return None
    if name == "temperature" and isinstance(value, (int, float)) and value < _LOWEST_TEMPERATURE:
        return 0.0 if value < _GREEDY_TEMPERATURE else _LOWEST_TEMPERATURE
    return value


def _parse(value: object, kind: type) -> object:
    """Return the number or flag in a string, else the value unchanged."""
    if kind is bool:
        words = {"true": True, "false": False}
        return words.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if kind is float or not value.lstrip("+-").isdigit() else int(value)
    # JSON writers of some languages know no whole numbers
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _check_stops(strings: tuple[str, ...], token_ids: tuple[int, ...]) -> None:
    if not isinstance(strings, tuple) or not all(isinstance(each, str) for each in strings):
        _refuse("stop", strings, "a string, or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings; allowed: up to {MAX_STOP_STRINGS}")
    for each in strings:
        if not 1 <= len(each) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has a string of {len(each)} characters; allowed: 1 to {MAX_STOP_CHARACTERS}"
            )
    ids = _whole(0, _MAX_INT32)
    if not isinstance(token_ids, tuple) or not all(ids.allows(each) for each in token_ids):
        _refuse("stop_token_ids", token_ids, f"a list of {ids.allowed}")
    if len(token_ids) > MAX_STOP_TOKENS:
        raise RequestError(
            f"stop_token_ids has {len(token_ids)} tokens; allowed: up to {MAX_STOP_TOKENS}"
        )


def _grammar(name: str, value: object) -> str | None:
    """Return the text of `GenerationOptions.grammar` for a parameter of structured outputs."""
    if isinstance(value, str):
        value = _json(name, value)
    if not isinstance(value, dict):
        _refuse(name, value, f"an object with one of {', '.join(_GRAMMAR_KINDS)}")
    # clients send all fields of their object: null and false ask for nothing, and the library is ours to choose
    given = {
        key: each for key, each in value.items() if each not in (None, False) and key != "backend"
    }
    if len(given) != 1 or not given.keys() <= set(_GRAMMAR_KINDS):
        raise RequestError(
            f"{name} has {shorten(', '.join(map(str, given))) or 'no field'}; allowed: one of"
            f" {', '.join(_GRAMMAR_KINDS)}"
        )
    [(kind, content)] = given.items()
    if kind == "json_object":
        kind, content = "json", {"type": "object"}
    if kind == "json":
        content = _json(f"{name}.json", content) if isinstance(content, str) else content
        if not isinstance(content, dict):
            _refuse(f"{name}.json", content, "a JSON schema, as an object or a string")
    elif kind == "choice":
        texts = content if isinstance(content, list) else []
        if not texts or not all(isinstance(each, str) for each in texts):
            _refuse(f"{name}.choice", content, "a list of strings, at least one")
    elif not isinstance(content, str):
        _refuse(f"{name}.{kind}", content, "a string")
    try:
        return json.dumps({kind: content}, separators=(",", ":"))
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply") from None


def _json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        _refuse(name, text, "JSON")


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    try:
        shown = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # an in-process caller may pass any object
        shown = f"a {type(value).__name__}"
    raise RequestError(f"{name} is {shorten(shown)}; allowed: {allowed}")


def _unknown(name: str) -> str:
    served = sorted(_NAMES - {*_NEUTRAL, "guided_decoding"})
    close = get_close_matches(name, served, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return f'unknown parameter "{shorten(name)}".{hint} Allowed: {", ".join(served)}'
