"""Calls of a model that generates: whole answers, streams, or translations of many texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from varlen_client.errors import InvalidRequest, RequestTimeout, ServerError
from varlen_client.generation import (
    GeneratedPart,
    GenerateRequest,
    Generation,
    Response,
    Translation,
    generate_request,
    read_generations,
    read_parts,
    read_translation,
)
from varlen_client.row_call import RowCall, deadline_of
from varlen_client.transport.session import Session
from varlen_client.waits import with_timeout
from varlen_client.wire import Inputs, TokenIds

_T = TypeVar("_T")


def check_one_sample(sampling: Mapping[str, Any], message: str) -> None:
    """Raise InvalidRequest with this message if `n` asks for several samples."""
    if sampling.get("n", 1) != 1:
        raise InvalidRequest(f"n is {sampling['n']!r}; {message}")


async def whole_answers(
    session: Session, request: GenerateRequest, timeout: float | None
) -> list[Generation]:
    """Return the answer of each sample.

    Raises:
        RequestTimeout: `timeout` seconds have passed.
    """
    deadline = deadline_of(timeout)

    async def collect() -> list[Generation]:
        info = await session.model_info(deadline)
        info.check_generates()
        responses = await session.all_responses(info, request, deadline)
        return read_generations(responses, request.rows)

    return await _until(collect(), deadline, timeout)


async def parts_of_answers(
    session: Session, request: GenerateRequest, timeout: float | None
) -> AsyncGenerator[list[GeneratedPart], None]:
    """Yield the next part of each sample as they come.

    Raises:
        RequestTimeout: `timeout` seconds have passed.
        ServerError: a sample has no last part.
    """
    deadline = deadline_of(timeout)
    info = await _until(session.model_info(deadline), deadline, timeout)
    info.check_generates()
    parts: list[GeneratedPart] = []
    async with aclosing(session.responses(info, request, deadline)) as responses:
        while response := await _until(_next(responses), deadline, timeout):
            parts = read_parts(response, request.rows)
            yield parts
    if not parts or any(part.finish_reason is None for part in parts):
        raise ServerError("the server ended an answer before its last part")


async def translations(
    session: Session,
    call: RowCall,
    texts: Inputs,
    sampling: Mapping[str, Any],
    concurrency: int,
    **options: Any,
) -> list[Translation]:
    """Return the translation of each text, in order.

    Args:
        session: connection to the model.
        call: whose rows are the texts.
        texts: sent one by one.
        sampling, options: arguments of `generate_request`.
        concurrency: maximum requests in flight.
    """

    async def translate_all() -> list[Translation]:
        info = await session.model_info(call.deadline)
        info.check_translates()

        async def send(text: str | TokenIds) -> Translation:
            request = generate_request(text, sampling, stream=False, returns_score=True, **options)
            responses = await session.all_responses(info, request, call.deadline)
            return read_translation(responses, request.rows)

        rows = ((range(row, row + 1), text) for row, text in enumerate(texts))
        return await call.send_all(rows, send, concurrency=concurrency)

    return await call.within_timeout(translate_all())


async def _next(responses: AsyncGenerator[Response, None]) -> Response | None:
    """Return the next response; None after the last."""
    return await anext(responses, None)


async def _until(
    awaitable: Coroutine[object, object, _T], deadline: float | None, timeout: float | None
) -> _T:
    """Return the result of a part of a call, which ends within `timeout` seconds."""
    if deadline is None:
        return await awaitable
    try:
        left = deadline - asyncio.get_running_loop().time()
        return await with_timeout(awaitable, max(left, 0.0))
    except TimeoutError:
        raise RequestTimeout(f"the answer was not complete within {timeout:g} s") from None
