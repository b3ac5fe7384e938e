"""One parameter and its checks: a setting of a model, or option of a request.

A dataclass declares its parameters as fields, with `parameter_field`. All of them share these checks and messages, and
docs/reference has tables of them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, get_args

import numpy as np

from varlen.errors import RequestError, VarlenError, shorten
from varlen.tasks import Task

MAX_INT32 = 2**31 - 1
_MAX_JSON_DEPTH = 100
# Choices of a flag, as texts. The values are true and false.
FLAG = ("true", "false")

_MAX_DIGITS = 18  # fit an int64
# No parameter has a name of this length, nor is a longer one a near miss of one.
LONGEST_NEAR_MISS = 32
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits of a JSON text.

    Attributes:
        max_bytes: longest text in UTF-8.
        max_marks: largest number of commas and opening brackets, at least the number of its values. In texts they count
            too. None is no limit beside `max_bytes`.
    """

    max_bytes: int
    max_marks: int | None = None


MAX_JSON_MARKS = 20_000
# Limits of options. The longest grammar is half as long, without white space, and has fewer values.
OPTION_JSON = JsonLimits(131_072, MAX_JSON_MARKS)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Description and allowed values of one parameter.

    Attributes:
        default: value without the parameter. None leaves the value to the checkpoint, or asks for nothing.
        when: advice on when to change a setting, for the reference page.
        choices: allowed words; `true` and `false` stand for flags.
        lowest, highest: smallest and largest allowed number, without a limit where it is None.
        is_whole: whether only whole numbers are allowed.
        pattern: regular expression of other allowed texts.
        max_items: largest length of a tuple; None allows no tuple. The other fields then hold for its items.
        allowed_text: the allowed values in words, where the fields above do not say them well.
        read: reader of values of requests, which come in a form of their own.
    """

    default: object
    description: str
    when: str = ""
    choices: tuple[str, ...] = ()
    lowest: float | None = None
    highest: float | None = None
    is_whole: bool = True
    pattern: str | None = None
    max_items: int | None = None
    allowed_text: str = ""
    read: Callable[[object], object] | None = None
    tasks: tuple[Task, ...] = get_args(Task)

    @property
    def allowed(self) -> str:
        if self.allowed_text:
            return self.allowed_text
        if self.choices:
            return ", ".join(self.choices)
        kind = "whole numbers" if self.is_whole else "numbers"
        numbers = " ".join(
            f"{word} {limit if self.is_whole else format(limit, 'g')}"
            for word, limit in (("from", self.lowest), ("to", self.highest))
            if limit is not None
        )
        if self.max_items is not None:
            return f"a list of {kind} {numbers}, at most {self.max_items}"
        return f"{kind} {numbers}"

    def up_to(self, highest: int) -> "Parameter":
        """Return the parameter of a model that has an upper limit of its own."""
        return replace(self, highest=highest)

    def allows(self, value: object) -> bool:
        """Return whether the parameter may have this value, or tuple of values of any length."""
        if value is None:
            return self.default is None
        if self.max_items is None:
            # a reader has checked a value of a form of its own
            return self.read is not None or self._allows_item(value)
        return isinstance(value, tuple) and all(map(self._allows_item, value))

    def check(self, name: str, value: object, error: type[VarlenError] = RequestError) -> None:
        """Raise an error that names the parameter, unless it may have this value."""
        # before the items are looked at
        if isinstance(value, tuple) and self.max_items is not None:
            check_number_of_tokens(name, value, self.max_items)
        if not self.allows(value):
            refuse(name, value, self.allowed, error)

    def from_text(self, text: str) -> str | int | bool:
        """Return the value of a setting in config.pbtxt.

        Text without a value for this setting is returned unchanged, and `allows` refuses it.
        """
        if text in FLAG and text in self.choices:
            return text == "true"
        # isdecimal accepts the digits of every script, as int() does, and no sign, point or space
        if self.lowest is not None and text.isdecimal() and len(text) <= _MAX_DIGITS:
            return int(text)
        return text

    def from_json(self, value: object) -> object:
        """Return the value of an option in JSON, whose numbers and flags may be texts.

        Other values are returned unchanged, and `allows` refuses them.
        """
        if isinstance(value, list):
            return tuple(value)
        if "true" in self.choices:
            words = {"true": True, "false": False}
            return words.get(value.lower(), value) if isinstance(value, str) else value
        if self.lowest is None or self.max_items is not None:
            return value
        return _number(value, is_whole=self.is_whole)

    def _allows_item(self, value: object) -> bool:
        if isinstance(value, bool):
            return "true" in self.choices
        if isinstance(value, str):
            is_word = value in self.choices and value not in FLAG
            return is_word or bool(self.pattern and re.fullmatch(self.pattern, value))
        # a whole number is a real one too
        if self.lowest is None or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return self.lowest <= value and (self.highest is None or value <= self.highest)


def parameter_field(default: _T, description: str, **declared: Any) -> _T:
    """Return a dataclass field with its `Parameter`, whose other attributes are given by name."""
    return field(
        default=default, metadata={"parameter": Parameter(default, description, **declared)}
    )


def whole_field(default: _T, lowest: int, highest: int, description: str, **declared: Any) -> _T:
    """Return the field of a whole number."""
    return parameter_field(default, description, lowest=lowest, highest=highest, **declared)


def real_field(default: _T, lowest: float, highest: float, description: str, **declared: Any) -> _T:
    """Return the field of a number."""
    return parameter_field(
        default, description, lowest=lowest, highest=highest, is_whole=False, **declared
    )


def word_field(default: _T, choices: tuple[str, ...], description: str, **declared: Any) -> _T:
    """Return the field of a flag or a word."""
    return parameter_field(default, description, choices=choices, **declared)


def token_field(default: _T, most: int, description: str) -> _T:
    """Return the field of a list of token ids."""
    return parameter_field(default, description, lowest=0, highest=MAX_INT32, max_items=most)


def parameters_of(declaring: type) -> Mapping[str, Parameter]:
    """Return the parameters that a dataclass declares, by name."""
    return MappingProxyType({each.name: each.metadata["parameter"] for each in fields(declaring)})


def check_count(name: str, value: object, most: int) -> None:
    """Raise RequestError unless a value is a whole number from 1 to `most`.

    A whole number of numpy is one.
    """
    if isinstance(value, np.integer):
        value = int(value)
    Parameter(1, "", lowest=1, highest=most).check(name, value)


def check_number_of_tokens(name: str, tokens: tuple[object, ...], most: int) -> None:
    """Raise RequestError if a list of tokens is too long."""
    if len(tokens) > most:
        raise RequestError(f"{name} has {len(tokens)} tokens; allowed: up to {most}")


def read_json(name: str, text: str, limits: JsonLimits = OPTION_JSON) -> object:
    """Return the value of a JSON text from a request.

    The time is linear in the limits, which are checked before the text is parsed.

    Raises:
        RequestError: the text is too long or not JSON, or has too many values, or its lists and objects are nested too
            deeply.
    """
    # characters of a text are bytes, or more
    if len(text) > limits.max_bytes or not text.isascii():
        check_bytes(name, len(text.encode(errors="surrogatepass")), limits.max_bytes)
    brackets = text.count("[") + text.count("{")
    marks = brackets + text.count(",")
    if limits.max_marks is not None and marks > limits.max_marks:
        raise RequestError(
            f"{name} has {marks} commas and opening brackets; allowed: up to {limits.max_marks}"
        )
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        refuse(name, text, "JSON")
    if brackets > _MAX_JSON_DEPTH:
        _check_depth(name, value)
    return value


def check_bytes(name: str, num_bytes: int, most: int) -> None:
    """Raise RequestError if a text is too long."""
    if num_bytes > most:
        raise RequestError(f"{name} has {num_bytes} bytes; allowed: up to {most}")


def items_of(value: object) -> Iterable[object]:
    """Return the elements of a JSON list or object, or nothing."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def refuse(
    name: str, value: object, allowed: str, error: type[VarlenError] = RequestError
) -> NoReturn:
    """Raise the error of a value that is not allowed.

    Raises:
        VarlenError: always; names the parameter, the value and what is allowed.
    """
    try:
        # half a surrogate pair is no text of an error
        shown = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except (TypeError, ValueError, RecursionError):
        # an in-process caller may pass any object
        shown = f"a {type(value).__name__}"
    raise error(f"{name} is {shorten(shown)}; allowed: {allowed}")


def unknown_parameter(*unknown: str, allowed: Iterable[str]) -> str:
    """Return the message of unknown names, each with the closest one that is allowed."""
    names = list(allowed)
    messages = []
    for name in unknown:
        close = get_close_matches(name, names, n=1) if len(name) <= LONGEST_NEAR_MISS else []
        hint = f' Did you mean "{close[0]}"?' if close else ""
        messages.append(f'unknown parameter "{shorten(name)}".{hint}')
    return f"{' '.join(messages)} Allowed: {', '.join(names)}"


def _check_depth(name: str, value: object) -> None:
    """Raise RequestError if lists and objects are nested too deeply."""
    # lists and objects of one depth
    level: Sequence[object] = [value]
    for _ in range(_MAX_JSON_DEPTH):
        inner = (each for outer in level for each in items_of(outer))
        level = [each for each in inner if isinstance(each, (list, dict))]
        if not level:
            return
    raise RequestError(
        f"{name} is nested more than {_MAX_JSON_DEPTH} deep; send a flatter object or list"
    )


def _number(value: object, *, is_whole: bool) -> object:
    """Return the number in a text, else the value unchanged."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        is_digits = value.lstrip("+-").isdigit()
        value = int(value) if is_whole and is_digits else float(value)
    # JSON writers of some languages know no whole numbers
    if is_whole and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
