"""Reads forms with a file, multipart/form-data, as they come.

A delimiter may stand across two reads. The file goes to a function; heads of parts and plain fields are limited.

Source: RFC 7578.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from email.parser import Parser

from fastapi import HTTPException, Request

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.connections import BODY_RATE

# The path that takes forms.
FILES_PATH = "/v1/files"
# Most bytes of the head of a part and of a plain field, and most fields.
_MAX_HEAD, _MAX_FIELD, _MAX_FIELDS = 4 << 10, 1 << 10, 16
# Most bytes of a form. OpenAI takes files of 200 MiB.
MAX_FORM_BYTES = (200 << 20) + _MAX_FIELDS * (_MAX_HEAD + _MAX_FIELD)
# Time in which a form has no least rate, and the longest wait for its next bytes.
_SLOW_SECONDS = 10.0
_BOUNDARY = re.compile(r'multipart/form-data;.*boundary="?([^";]{1,200})"?', re.IGNORECASE)


class _Body:
    """Bytes of an upload, which are passed on up to delimiters."""

    def __init__(self, request: Request) -> None:
        # the first delimiter has no line before it
        self._stream, self._held = _parts(request), bytearray(b"\r\n")

    async def until(self, delimiter: bytes, take: Callable[[bytes], object]) -> None:
        """Pass what comes before a delimiter, and drop the delimiter."""
        while (at := self._held.find(delimiter)) < 0:
            if (spare := len(self._held) - len(delimiter) + 1) > 0:
                take(bytes(self._held[:spare]))
                del self._held[:spare]
            data = await anext(self._stream, None)
            if data is None:
                raise InvalidRequest("the body ends before its last part does")
            self._held += data
        take(bytes(self._held[:at]))
        del self._held[: at + len(delimiter)]

    async def short(self, delimiter: bytes, most: int) -> str:
        """Return what comes before a delimiter as text of up to `most` bytes."""
        found = bytearray()

        def take(data: bytes) -> None:
            found.extend(data)
            if len(found) > most:
                raise InvalidRequest(f"a part has a head or field of more than {most} bytes")

        await self.until(delimiter, take)
        return found.decode(errors="replace")


async def _parts(request: Request) -> AsyncIterator[bytes]:
    """Yield the parts of a body, and an end of line that it may lack."""
    parts, size, began = aiter(request.stream()), 0, time.monotonic()
    try:
        while (data := await asyncio.wait_for(anext(parts, None), _SLOW_SECONDS)) is not None:
            size += len(data)
            if size < BODY_RATE * (time.monotonic() - began - _SLOW_SECONDS):
                raise asyncio.TimeoutError
            if size > MAX_FORM_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_FORM_BYTES} bytes")
            yield data
    except asyncio.TimeoutError:
        raise HTTPException(408, f"too slow; allowed: {BODY_RATE} bytes each second") from None
    yield b"\r\n"


async def read_form(request: Request, write: Callable[[bytes], object]) -> dict[str, str]:
    """Pass the part `file` of a form to `write`; return the form's fields.

    The field `file` is the name of the file.

    Raises:
        InvalidRequest: the body is no form with one file.
        HTTPException: it is too large, or comes too slowly.
    """
    found = _BOUNDARY.match(request.headers.get("content-type", ""))
    if found is None:
        raise InvalidRequest("the body is no upload; send multipart/form-data with a boundary")
    body, fields = _Body(request), dict[str, str]()
    boundary = f"\r\n--{found[1]}".encode()
    await body.until(boundary, len)
    # behind the last delimiter comes --
    while not (await body.short(b"\r\n", _MAX_HEAD)).startswith("--"):
        head = Parser().parsestr(await body.short(b"\r\n\r\n", _MAX_HEAD), headersonly=True)
        name = str(head.get_param("name", "", "content-disposition"))
        if name in fields or len(fields) >= _MAX_FIELDS:
            raise InvalidRequest(f"the form has a field twice, or more than {_MAX_FIELDS}")
        if name == "file":
            fields[name] = head.get_filename() or "file"
            await body.until(boundary, write)
        else:
            fields[name] = await body.short(boundary, _MAX_FIELD)
    if "file" not in fields:
        raise InvalidRequest("the form has no field file; send one")
    return fields
