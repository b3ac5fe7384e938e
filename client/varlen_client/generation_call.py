"""A call of a model that generates: its responses as they come, within one timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from varlen_client.errors import InvalidRequest, RequestTimeout
from varlen_client.generation import GenerateRequest, Response
from varlen_client.session import Session
from varlen_client.tasks import with_timeout

_T = TypeVar("_T")


def check_one_sample(sampling: Mapping[str, Any], message: str) -> None:
    """Raise InvalidRequest with this message if `n` asks for several samples."""
    if sampling.get("n", 1) != 1:
        raise InvalidRequest(f"n is {sampling['n']!r}; {message}")


async def checked_responses(
    session: Session, request: GenerateRequest, deadline: float | None
) -> AsyncGenerator[Response, None]:
    """Yield the responses to a request to a model that generates."""
    info = await session.model_info(deadline)
    info.check_generates()
    async with aclosing(session.responses(info, request, deadline)) as responses:
        async for response in responses:
            yield response


async def next_response(responses: AsyncGenerator[Response, None]) -> Response | None:
    """Return the next response; None after the last."""
    return await anext(responses, None)


async def until(
    awaitable: Coroutine[object, object, _T], deadline: float | None, timeout: float | None
) -> _T:
    """Return the result of a step of a generation, which ends within `timeout` seconds.

    Raises:
        RequestTimeout: the deadline passed; the step is cancelled.
    """
    if deadline is None:
        return await awaitable
    try:
        left = deadline - asyncio.get_running_loop().time()
        return await with_timeout(awaitable, max(left, 0.0))
    except TimeoutError:
        raise RequestTimeout(f"the answer was not complete within {timeout:g} s") from None
