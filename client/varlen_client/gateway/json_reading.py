"""Reads the JSON of bodies within limits, and has a thread for large ones.

A small body can ask for much work: two bytes are a value. So the values of a body are counted before they are parsed,
and what remains is short: no step holds the interpreter's lock for more than a few tens of milliseconds, and other
requests go on between the steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from varlen_client.errors import InvalidRequest

_T = TypeVar("_T")

# Values of a body, besides token ids of its prompts or inputs.
MAX_VALUES = 1 << 16
# Names of fields in all objects of a body.
MAX_NAMES = 1 << 16
# Token ids of a body; OpenAI takes 300,000 in a request.
MAX_IDS = 1 << 19
# Larger bodies and answers are read and written in the thread.
SMALL_BYTES = 16 << 10

# Bytes that are looked at in one step.
_PIECE_BYTES = 256 << 10
_QUOTE, _COMMA, _COLON = b'",:'
# `[` and `{` differ in this bit only.
_BRACE, _BRACE_BIT = ord("{"), 0x20
# Of the parser, pydantic_core.
_DEPTH_ERROR = "recursion limit exceeded"
_MAX_LEVELS = 200

# Only one: several would hold the lock for several steps in turn, while the event loop waits for it.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="gateway-json")


@dataclass(frozen=True, slots=True)
class JsonSize:
    """Size of a JSON text.

    Attributes:
        values: number of commas and opening brackets outside of strings; a text of n values has at most n.
        names: number of names of fields in all objects.
    """

    values: int
    names: int

    def check(self, max_values: int) -> None:
        """Raise InvalidRequest if a text of this size takes too long to read."""
        if self.values > max_values:
            raise InvalidRequest(
                f"the body has {self.values} values; allowed: up to {max_values}, so send fewer at once"
            )
        if self.names > MAX_NAMES:
            raise InvalidRequest(
                f"the body has {self.names} names of fields; allowed: up to {MAX_NAMES}"
            )


async def in_thread(call: Callable[[], _T]) -> _T:
    """Return the result of a call that holds up no other request."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, call)


def size_of(body: bytes) -> JsonSize:
    """Return the size of a JSON text, in time linear in its bytes."""
    values = names = 0
    is_in_string = False
    for piece in _pieces(body):
        quotes = np.bitwise_xor.accumulate((piece == _QUOTE).view(np.uint8))
        outside = quotes == is_in_string
        openings = (piece | _BRACE_BIT) == _BRACE
        values += int(np.count_nonzero(((piece == _COMMA) | openings) & outside))
        names += int(np.count_nonzero((piece == _COLON) & outside))
        is_in_string ^= bool(quotes[-1]) if quotes.size else False
    return JsonSize(values, names)


def read_json(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        InvalidRequest: it is no JSON in UTF-8, or has too many levels.
    """
    try:
        return from_json(body)
    except ValueError as error:
        raise InvalidRequest(_why_no_json(body, str(error))) from None


def _why_no_json(body: bytes, error: str) -> str:
    if error.startswith(_DEPTH_ERROR):
        return f"the body has more than {_MAX_LEVELS} levels of objects and lists; send fewer"
    try:
        body.decode()
    except UnicodeDecodeError:
        return "the body cannot be read; send JSON in UTF-8"
    return f"the body is not JSON: {error}"


def _pieces(body: bytes) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield a JSON text in pieces, without escaped characters."""
    begin = 0
    while begin < len(body):
        piece = body[begin : begin + _PIECE_BYTES]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2:
            # the escaped character belongs to it
            piece = body[begin : begin + _PIECE_BYTES + 1]
        begin += len(piece)
        yield np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
