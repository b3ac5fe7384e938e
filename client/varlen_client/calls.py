"""Calls of rows and of generation: bounded concurrency, results in order, one timeout.

The first failure cancels the other requests. Errors name rows of the whole call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing
from typing import Any, TypeVar

from varlen_client.errors import InvalidRequest, RequestTimeout, ServerError, VarlenClientError
from varlen_client.generation import (
    GeneratedPart,
    Generation,
    GenerationPrompt,
    Response,
    Translation,
    generate_request,
    read_generations,
    read_parts,
    read_translation,
)
from varlen_client.tasks.answers import Output, RowAnswers
from varlen_client.tasks.row_task import Options, RowTask, parameters_of
from varlen_client.transport.session import Session
from varlen_client.waits import all_or_first_error, with_timeout
from varlen_client.wire import InferRequest, Inputs, ModelInfo, Pairs, TokenIds, read_inputs

DEFAULT_ROWS_PER_REQUEST = 32

_Request = TypeVar("_Request")
_T = TypeVar("_T")


class RowCall:
    """One call of a public method, and its progress."""

    def __init__(
        self,
        method: str,
        rows: int,
        *,
        timeout: float | None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._method = method
        self._rows = rows
        self._timeout = timeout
        self._on_progress = on_progress
        self._rows_answered = 0
        self.deadline = deadline_of(timeout)
        """End of the call on the event loop's clock; None without a timeout."""

    async def within_timeout(self, coroutine: Coroutine[object, object, _T]) -> _T:
        """Return the coroutine's result.

        Raises:
            RequestTimeout: the timeout passed; requests in flight are cancelled.
        """
        try:
            return await with_timeout(coroutine, self._timeout)
        except TimeoutError:
            raise RequestTimeout(
                f"{self._method} did not end within {self._timeout:g} s; "
                f"{self._rows_answered} of {self._rows} rows were answered",
                rows=range(self._rows),
            ) from None

    async def send_all(
        self,
        requests: Iterable[tuple[range, _Request]],
        send: Callable[[_Request], Awaitable[_T]],
        *,
        concurrency: int,
    ) -> list[_T]:
        """Return the result of each request, in order.

        Args:
            requests: pairs of rows and their request; iterated as requests are sent.
        """
        results: dict[int, _T] = {}
        queue = enumerate(requests)
        count = min(concurrency, self._rows)
        if count == 1:
            await self._work(queue, send, results)
        elif count:
            await all_or_first_error(
                [asyncio.ensure_future(self._work(queue, send, results)) for _ in range(count)]
            )
        return [results[index] for index in range(len(results))]

    async def _work(
        self,
        queue: Iterator[tuple[int, tuple[range, _Request]]],
        send: Callable[[_Request], Awaitable[_T]],
        results: dict[int, _T],
    ) -> None:
        """Send requests from the shared queue, one at a time, until it is empty."""
        for index, (rows, request) in queue:
            try:
                results[index] = await send(request)
            except VarlenClientError as error:
                raise _with_rows(error, rows, self._rows) from error
            self._rows_answered += len(rows)
            if self._on_progress is not None:
                self._on_progress(self._rows_answered)


class RequestSender:
    """Sends the requests of calls to one model.

    Args:
        rows_per_request: None is 32, or the model's max_batch_size if that is less.
    """

    def __init__(self, session: Session, rows_per_request: int | None, concurrency: int) -> None:
        self._session = session
        self._rows_per_request = rows_per_request
        self._concurrency = concurrency

    def _request_rows(self, info: ModelInfo) -> int:
        """Return the number of rows in a request."""
        # An explicit rows_per_request above max_batch_size is sent as it is: the server refuses it
        # with its own message.
        default = min(DEFAULT_ROWS_PER_REQUEST, max(info.max_batch_size, 1))
        return self._rows_per_request or default


class RowSender(RequestSender):
    """Sends rows to one model."""

    async def send(
        self,
        task: RowTask[Any],
        inputs: Inputs | Pairs,
        options: Options,
        *,
        counts_tokens: bool = False,
    ) -> RowAnswers:
        """Return the outputs of all requests of a call.

        Args:
            counts_tokens: whether the number of tokens is requested, if the model has it.

        Raises:
            TypeError: there is no such option.
            VarlenClientError: see errors.py.
        """
        requested = task.requested(options)
        rows = read_inputs(inputs, takes_pairs=task.takes_pairs)
        parameters = parameters_of(task.method, task.options, options, task.not_sent)
        call = RowCall(
            task.method,
            len(rows),
            timeout=options.get("timeout"),
            on_progress=options.get("on_progress"),
        )

        async def send_all() -> RowAnswers:
            info = await self._session.model_info(call.deadline)
            outputs = task.of_model(requested, info, counts_tokens=counts_tokens)
            size = 1 if task.row_by_row else self._request_rows(info)

            async def send(request: InferRequest) -> dict[str, Output]:
                arrays = await self._session.infer(info, request, call.deadline)
                return {
                    output.name: output.checked(arrays.get(output.name), len(request.rows))
                    for output in outputs
                }

            names = tuple(output.name for output in outputs)
            # the tensors of a request are built only when it is sent, to save memory
            requests = (
                (each, InferRequest(each, rows.tensors(each), names, parameters))
                for each in rows.split(size)
            )
            found = await call.send_all(requests, send, concurrency=self._concurrency)
            return RowAnswers(outputs, options, found)

        return await call.within_timeout(send_all())


def deadline_of(timeout: float | None) -> float | None:
    """Return the end of a call that begins now, on the event loop's clock."""
    return None if timeout is None else asyncio.get_running_loop().time() + timeout


def _with_rows(error: VarlenClientError, rows: range, total: int) -> VarlenClientError:
    """Return the same error, with row numbers of the whole call.

    The server numbers the rows of one request ("row 3: text has 700 tokens"), the caller the rows of
    the whole input.
    """
    message = str(error)
    if len(rows) < total:
        message = re.sub(r"^row (\d+)", lambda row: f"row {int(row[1]) + rows.start}", message)
        named = f"rows {rows.start}-{rows.stop - 1}" if len(rows) > 1 else f"row {rows.start}"
        if not message.startswith(f"{named}:"):
            message = f"{named} of {total}: {message}"
    return type(error)(message, rows=rows)


def check_one_sample(sampling: Mapping[str, Any], message: str) -> None:
    """Raise InvalidRequest with this message if `n` asks for several samples."""
    if sampling.get("n", 1) != 1:
        raise InvalidRequest(f"n is {sampling['n']!r}; {message}")


async def whole_answers(
    session: Session, prompt: GenerationPrompt, sampling: Mapping[str, Any], timeout: float | None
) -> list[Generation]:
    """Return the answer of each sample."""
    request = generate_request(prompt, sampling, stream=False)
    deadline = deadline_of(timeout)

    async def collect() -> list[Generation]:
        info = await session.model_info(deadline)
        info.check_generates()
        responses = await session.all_responses(info, request, deadline)
        return read_generations(responses, request.rows)

    return await _until(collect(), deadline, timeout)


async def parts_of_answers(
    session: Session, prompt: GenerationPrompt, sampling: Mapping[str, Any], timeout: float | None
) -> AsyncGenerator[list[GeneratedPart], None]:
    """Yield the next part of each sample as they come.

    Raises:
        RequestTimeout: `timeout` seconds have passed.
        ServerError: a sample has no last part.
    """
    request = generate_request(prompt, sampling, stream=True)
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
) -> list[Translation]:
    """Return the translation of each text, in order."""

    async def translate_all() -> list[Translation]:
        info = await session.model_info(call.deadline)
        info.check_translates()

        async def send(text: str | TokenIds) -> Translation:
            request = generate_request(text, sampling, stream=False, returns_score=True)
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
