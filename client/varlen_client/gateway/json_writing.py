"""Writes answers as JSON, large ones in parts, between which other requests go on.

A large answer is never in memory as a whole.
"""

from __future__ import annotations

import asyncio
import time
import uuid
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


def json_response(content: Mapping[str, Any] | Sequence[Any] | Rows | Blocks | bytes) -> Response:
    """Return a response with an answer as JSON; a large one is a stream."""
    parts = _parts(_pieces(content))
    first = next(parts)
    second = next(parts, None)
    if second is None:
        return Response(first, media_type=_JSON)
    return StreamingResponse(_with_pauses(chain((first, second), parts)), media_type=_JSON)


def listed(
    model: str, data: Iterable[Any], tokens: int | None, *, prefix: str | None = None
) -> Response:
    """Return a list in OpenAI's form, or vLLM's, whose id has a `prefix`."""
    answer: dict[str, Any] = {"object": "list", "model": model, "data": Rows(data)}
    if prefix is not None:
        answer |= {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
    return json_response(answer | usage_of(tokens))


def usage_of(prompt_tokens: int | None, completion_tokens: int | None = None) -> dict[str, Any]:
    """Return the field `usage` of an answer, if its tokens are known."""
    if prompt_tokens is None:
        return {}
    counts = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + (completion_tokens or 0),
    }
    if completion_tokens is not None:
        counts["completion_tokens"] = completion_tokens
    return {"usage": counts}


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
        fields = (
            chain((json_bytes(name) + b":",), _pieces(each)) for name, each in content.items()
        )
        yield from _joined(b"{", fields, b"}")
    elif isinstance(content, Rows):
        yield from _joined(b"[", (_pieces(each) for each in content.items), b"]")
    elif isinstance(content, Blocks):
        # without the brackets of its list
        blocks = (json_bytes(each)[1:-1] for each in content.blocks if len(each))
        yield from _joined(b"[", ((block,) for block in blocks), b"]")
    elif isinstance(content, bytes):
        # the server wrote it
        yield content
    else:
        yield json_bytes(content)


def _joined(opening: bytes, items: Iterable[Iterable[bytes]], closing: bytes) -> Iterator[bytes]:
    yield opening
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
    yield closing
