"""Writes answers as JSON, large ones in parts, between which other requests go on.

A large answer is never in memory as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

# Bytes of an answer that are written before other requests go on.
_PART_BYTES = 128 << 10
_JSON = "application/json"


# They are no dataclasses, which `to_json` writes as objects where `_pieces` does not find them.
class Rows:
    """A list whose items are made and written one by one; they may hold `Rows`."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


class Blocks:
    """A list whose items are made and written one block at a time."""

    def __init__(self, blocks: Iterable[Sequence[Any]]) -> None:
        self.blocks = blocks


def json_bytes(content: Any) -> bytes:
    """Return an answer as JSON, which has no NaN and no infinity: they are null."""
    return to_json(content, inf_nan_mode="null")


def json_response(content: Mapping[str, Any] | Sequence[Any] | Rows | Blocks) -> Response:
    """Return a response with an answer as JSON; a large one is a stream."""
    parts = _parts(_pieces(content))
    first = next(parts)
    second = next(parts, None)
    if second is None:
        return Response(first, media_type=_JSON)
    return StreamingResponse(_with_pauses(chain((first, second), parts)), media_type=_JSON)


async def _with_pauses(parts: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    for part in parts:
        yield part
        # a fast reader never makes this wait
        await asyncio.sleep(0)


def _parts(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces of JSON together, until they have the bytes of a part."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= _PART_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


def _pieces(content: Any) -> Iterator[bytes]:
    """Yield the JSON of an answer in pieces, one for each row and block."""
    if isinstance(content, Mapping):
        yield from _listed(b"{", (_field(*each) for each in content.items()), b"}")
    elif isinstance(content, Rows):
        yield from _listed(b"[", (_pieces(each) for each in content.items), b"]")
    elif isinstance(content, Blocks):
        # without the brackets of its list
        blocks = (json_bytes(each)[1:-1] for each in content.blocks if len(each))
        yield from _listed(b"[", ((block,) for block in blocks), b"]")
    else:
        yield json_bytes(content)


def _field(name: str, content: Any) -> Iterator[bytes]:
    yield json_bytes(name) + b":"
    yield from _pieces(content)


def _listed(opening: bytes, items: Iterable[Iterable[bytes]], closing: bytes) -> Iterator[bytes]:
    yield opening
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
    yield closing
