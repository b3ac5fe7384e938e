"""Results that are known before they are asked for.

A function returns each of them, or raises its error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

_T = TypeVar("_T")


def outcome_of(call: Callable[[], _T]) -> Callable[[], _T]:
    """Call a function now; return one that returns its result, or raises its error."""
    try:
        result = call()
    except Exception as error:
        return raising(error)
    return lambda: result


def raising(error: BaseException) -> Callable[[], NoReturn]:
    """Return a function that raises an error."""
    return partial(_raise, error)


def _raise(error: BaseException) -> NoReturn:
    raise error
