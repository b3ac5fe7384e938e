"""Checks of a request's parameters: ranges of numbers, values in strings, and refusals."""

import json
import re
from dataclasses import dataclass
from typing import NoReturn

from varlen.errors import RequestError, shorten

MAX_INT32 = 2**31 - 1

_NUMBER = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class NumberRange:
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


def whole(low: int, high: int) -> NumberRange:
    """Return the range of whole numbers from `low` to `high`."""
    return NumberRange(int, low, high, f"whole numbers from {low} to {high}")


def real(low: float, high: float) -> NumberRange:
    """Return the range of numbers from `low` to `high`."""
    return NumberRange(float, low, high, f"numbers from {low:g} to {high:g}")


def parse(value: object, kind: type) -> object:
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


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise the error of a value that is not allowed.

    Raises:
        RequestError: always; names the parameter, the value and what is allowed.
    """
    try:
        shown = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # an in-process caller may pass any object
        shown = f"a {type(value).__name__}"
    raise RequestError(f"{name} is {shorten(shown)}; allowed: {allowed}")
