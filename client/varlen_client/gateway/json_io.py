"""Reads JSON bodies, large ones in a thread, and writes answers, large ones in parts.

A small body can ask for much work: two bytes are a value. So the values of a body are counted before they are parsed,
and what remains is short: no step holds the interpreter's lock for more than a few tens of milliseconds, and other
requests go on between the steps, and between the parts of an answer, which is never in memory as a whole.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import MAX_INPUTS, Fields, Ignore, checked
from varlen_client.gateway.models import read_query_model

_T = TypeVar("_T")
_Form = TypeVar("_Form", bound=Fields)

# Values of a body, besides token ids of its prompts or inputs.
MAX_VALUES = 1 << 16
# Names of fields in all objects of a body.
MAX_NAMES = 1 << 16
# Token ids of a body; OpenAI takes 300,000 in a request.
MAX_IDS = 1 << 19
# Larger bodies are read in the thread.
SMALL_BYTES = 16 << 10

# Bytes of an answer that are written before other requests go on.
_PART_BYTES = 128 << 10
_JSON = "application/json"
# Bytes that are counted in one step.
_PIECE_BYTES = 64 << 10
# The message of the parser, pydantic_core.
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


class BodyRoute(APIRoute):
    """A route whose body is read once, by `read_body`.

    FastAPI answers requests without JSON, and describes routes.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request, field = Request(scope, receive), self.body_field
        has_json = _is_json(request.headers.get("content-type", ""))
        if field is None or not has_json or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        body = await request.body()
        if not body:
            await super().handle(scope, _no_body, send)
            return
        form: type[Fields] = field.field_info.annotation  # type: ignore[assignment]
        query = scope["query_string"]
        await read_query_model(request.query_params.get("model") if query else None)
        given = await read_body(form, body, request.app.state.ignore_fields)
        response = await self.endpoint(**{field.name: given})
        await response(scope, receive, send)


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _is_json(content_type: str) -> bool:
    """Return whether FastAPI reads bodies of this type.

    Pages of other sites cannot send them unless the gateway allows it.
    """
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


async def read_body(form: type[_Form], body: bytes, ignore: Ignore | None) -> _Form:
    """Return a body in this form; `ignore` is the argument of `checked`.

    Raises:
        InvalidRequest: it is no JSON, or exceeds the limits.
        RequestValidationError: it has another form.
    """
    if len(body) <= SMALL_BYTES:
        return checked(form, read_json(body), ignore)
    return await in_thread(partial(_read_large, form, body, ignore))


async def in_thread(call: Callable[[], _T]) -> _T:
    """Return the result of a call that holds up no other request."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, call)


def _read_large(form: type[_Form], body: bytes, ignore: Ignore | None) -> _Form:
    size = size_of(body)
    size.check(MAX_VALUES + (MAX_IDS if form.ids_field else 0))
    given = read_json(body)
    if form.ids_field is not None:
        _check_ids(given, form.ids_field, size)
    return checked(form, given, ignore)


def _check_ids(given: Any, name: str, size: JsonSize) -> None:
    """Raise InvalidRequest if a body has too many token ids, or values besides them."""
    rows = given.get(name) if isinstance(given, dict) else None
    ids = 0
    if isinstance(rows, list):
        # rows of texts are counted too, and refused later for their number
        is_long = len(rows) > MAX_INPUTS
        ids = sum(len(each) if isinstance(each, list) and not is_long else 1 for each in rows)
    if size.values - ids > MAX_VALUES:
        raise InvalidRequest(
            f"the body has {size.values - ids} values besides {name}; allowed: up to {MAX_VALUES}"
        )
    if ids > MAX_IDS:
        raise InvalidRequest(
            f"{name} has {ids} values; allowed: up to {MAX_IDS}, so send fewer at once"
        )


def size_of(body: bytes) -> JsonSize:
    """Return the size of a JSON text, in time linear in its bytes."""
    values = names = is_in_string = 0
    for piece in _pieces_of(body):
        parts = piece.split(b'"')
        outside = b"".join(parts[is_in_string::2])
        values += sum(map(outside.count, (b",", b"[", b"{")))
        names += outside.count(b":")
        is_in_string ^= (len(parts) - 1) % 2
    return JsonSize(values, names)


def _pieces_of(body: bytes) -> Iterator[bytes]:
    """Yield a JSON text in pieces, without escaped characters."""
    begin = 0
    while begin < len(body):
        piece = body[begin : begin + _PIECE_BYTES]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2:
            # the escaped character belongs to it
            piece = body[begin : begin + _PIECE_BYTES + 1]
        begin += len(piece)
        yield piece.replace(b"\\\\", b"").replace(b'\\"', b"")


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


def _is_plain(value: Any) -> bool:
    """Return whether nothing of a value is written in pieces."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return not isinstance(value, (Rows, Blocks, bytes))


def _pieces(content: Any) -> Iterator[bytes]:
    """Yield the JSON of an answer in pieces, one for each row and block."""
    if isinstance(content, Mapping):
        before = b"{"
        for is_plain, fields in groupby(content.items(), lambda field: _is_plain(field[1])):
            if is_plain:
                # one call for all: a call takes longer than to write a short field
                yield before + json_bytes(dict(fields))[1:-1]
            else:
                for name, each in fields:
                    yield before + json_bytes(name) + b":"
                    yield from _pieces(each)
                    before = b","
            before = b","
        yield b"}" if content else b"{}"
    elif isinstance(content, Rows):
        before = b"["
        for each in content.items:
            if isinstance(each, bytes):
                yield before + each
            else:
                yield before
                yield from _pieces(each)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    elif isinstance(content, Blocks):
        # without the brackets of its list
        found = (json_bytes(each)[1:-1] for each in content.blocks if len(each))
        yield b"[" + next(found, b"")
        yield from (b"," + each for each in found)
        yield b"]"
    elif isinstance(content, bytes):
        # the server wrote it
        yield content
    else:
        yield json_bytes(content)
