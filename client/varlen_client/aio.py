"""The asyncio client. The sync client in sync.py runs this one, so there is one implementation.

A call becomes requests of `rows_per_request` rows; `concurrency` of them are in flight at a time;
results come back in the order of the input. The first failure stops the rest of the call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

from varlen_client.endpoint import Endpoint
from varlen_client.errors import (
    InvalidRequest,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.retry import RetryPolicy, with_retries
from varlen_client.transport import ServerIdentity, Transport
from varlen_client.wire import (
    Floats,
    InferRequest,
    Inputs,
    ModelInfo,
    ModelState,
    Pairs,
    Rows,
    only_ready_model,
    read_inputs,
    read_inputs_or_pairs,
    read_query_and_documents,
    requests,
)

DEFAULT_ROWS_PER_REQUEST = 32
DEFAULT_CONCURRENCY = 4
METADATA_TIMEOUT_SECONDS = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Status:
    """What the server says about itself and its models."""

    server: ServerIdentity
    server_ready: bool
    models: tuple[ModelState, ...]
    model: str | None
    """The model of this client; None when none was chosen and none is ready."""
    model_ready: bool


class AsyncClient:
    """Embeds, classifies and ranks texts at a server, from one event loop.

    Use it as an async context manager, or call `close`.

    Args:
        url: `grpc://host:port`, `http://host:port`, or `grpcs://` and `https://` with TLS.
        model: the model's name; by default the only ready model of the server.
        rows_per_request: by default 32, or the model's max_batch_size where that is less.
        concurrency: requests of one call in flight.
        retry: see retry.py.
        ca_file: certificates to trust with TLS, instead of the default ones.

    Raises:
        InvalidUrl: `url` cannot be read.
        ValueError: rows_per_request or concurrency is less than 1.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        rows_per_request: int | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        retry: RetryPolicy | None = None,
        ca_file: str | Path | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; at least 1")
        if rows_per_request is not None and rows_per_request < 1:
            raise ValueError(f"rows_per_request is {rows_per_request}; at least 1")
        self._endpoint = Endpoint.parse(url)
        self._model = model
        self._rows_per_request = rows_per_request
        self._concurrency = concurrency
        self._retry = retry or RetryPolicy()
        self._ca_file = None if ca_file is None else Path(ca_file)
        self._transport: Transport | None = None
        self._info: ModelInfo | None = None

    async def embed(
        self,
        inputs: Inputs,
        *,
        normalize: bool | None = None,
        truncate: bool | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Floats:
        """Return one vector per row, [rows, hidden] fp32, in the order of `inputs`.

        Args:
            inputs: texts, or lists of token ids of any lengths.
            normalize: scale each vector to length 1; by default as the checkpoint says.
            truncate: cut rows that are too long instead of refusing them; by default refuse.
            deadline_ms: milliseconds within which each request is to be answered, its retries
                included; the server refuses what it cannot answer in time. By default no limit.
            priority: 0 to 9, larger runs sooner; by default 0.
            timeout: seconds for the whole call, retries included; by default no limit.
            on_progress: called with the number of rows answered so far. It runs in the event loop,
                so it must be quick.

        Raises:
            VarlenClientError: see errors.py. `rows` names the rows of the request that failed.
        """
        call = _Call(
            "embed", "sentence_embedding", rank=1, timeout=timeout, on_progress=on_progress
        )
        parameters = _parameters(truncate, deadline_ms, priority, normalize)
        return await self._matrix(call, read_inputs(inputs), parameters)

    async def classify(
        self,
        inputs: Inputs | Pairs,
        *,
        truncate: bool | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> Floats:
        """Return the logits of each text, pair of texts or list of token ids, [rows, labels] fp32.

        Arguments and errors are those of `embed`.
        """
        call = _Call("classify", "logits", rank=1, timeout=timeout)
        return await self._matrix(
            call, read_inputs_or_pairs(inputs), _parameters(truncate, deadline_ms, priority)
        )

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> Floats:
        """Return one score per document, [documents] fp32: the raw logit, more is more relevant.

        Arguments and errors are those of `embed`; a model with more than one label is an
        InvalidRequest.
        """
        call = _Call("rerank", "logits", rank=1, timeout=timeout, needs_width=1)
        rows = read_query_and_documents(query, documents)
        return (await self._matrix(call, rows, _parameters(truncate, deadline_ms, priority)))[:, 0]

    async def token_classify(
        self,
        inputs: Inputs | Pairs,
        *,
        truncate: bool | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> list[Floats]:
        """Return the logits of each row's tokens, one [tokens, labels] fp32 per row.

        Each row is a request of its own: in a request of several rows the server would pad them to
        the longest. Arguments and errors are those of `embed`.
        """
        call = _Call("token_classify", "logits", rank=2, timeout=timeout)
        return await self._ragged(
            call, read_inputs_or_pairs(inputs), _parameters(truncate, deadline_ms, priority)
        )

    async def hidden(
        self,
        inputs: Inputs | Pairs,
        *,
        truncate: bool | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> list[Floats]:
        """Return the last hidden states, one [tokens, hidden] fp32 per row.

        Each row is a request of its own, as in `token_classify`. Arguments and errors are those of
        `embed`.
        """
        call = _Call("hidden", "last_hidden_state", rank=2, timeout=timeout)
        return await self._ragged(
            call, read_inputs_or_pairs(inputs), _parameters(truncate, deadline_ms, priority)
        )

    async def ready(self) -> bool:
        """Return whether the server and the model take requests; False when nothing answers.

        Raises:
            ModelNotFound: no model was chosen and the server has several.
        """
        try:
            return await self._asked(self._is_ready())
        except (ServerUnavailable, RequestTimeout):
            return False

    async def status(self) -> Status:
        """Return what the server says about itself and its models, without retries.

        Raises:
            VarlenClientError: see errors.py; ModelNotFound when no model was chosen and the server
                has several.
        """
        return await self._asked(self._read_status())

    async def models(self) -> list[ModelState]:
        """Return the server's models and their states, ready or not."""
        return await self._asked(self._connected().models())

    async def close(self) -> None:
        """Close the connections. Calls still running fail."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _matrix(
        self, call: _Call, rows: Rows, parameters: dict[str, bool | float | None]
    ) -> Floats:
        """Return the outputs of all rows under each other, [rows, width]."""
        outputs = await self._within(call, rows, self._run(call, rows, parameters))
        if not outputs:
            return np.empty((0, max(call.width, 0)), dtype=np.float32)
        return np.concatenate(outputs)

    async def _ragged(
        self, call: _Call, rows: Rows, parameters: dict[str, bool | float | None]
    ) -> list[Floats]:
        """Return the output of each row without its batch dimension."""
        outputs = await self._within(call, rows, self._run(call, rows, parameters, size=1))
        return [output[0].copy() for output in outputs]

    async def _within(self, call: _Call, rows: Rows, running: Coroutine[object, object, _T]) -> _T:
        """Await a call for at most its timeout; what is in flight then is cancelled."""
        if call.timeout is not None:
            call.deadline = asyncio.get_running_loop().time() + call.timeout
        try:
            return await _limited(running, call.timeout)
        except TimeoutError:
            raise RequestTimeout(
                f"{call.method} did not end within {call.timeout:g} s; "
                f"{call.rows_answered} of {len(rows)} rows were answered",
                rows=range(len(rows)),
            ) from None

    async def _run(
        self,
        call: _Call,
        rows: Rows,
        parameters: dict[str, bool | float | None],
        *,
        size: int | None = None,
    ) -> list[Floats]:
        """Return the output of each request in order; the first failure ends all."""
        info = await with_retries(self._model_info, self._retry, deadline=call.deadline)
        call.width = info.width(call.method, call.output, rank=call.rank)
        if call.needs_width not in (None, call.width):
            raise InvalidRequest(
                f"model {info.name!r} gives {call.width} values per row; "
                f"{call.method} needs {call.needs_width}"
            )
        # An explicit rows_per_request above the model's limit is the server's to refuse, with its
        # own message.
        default = min(DEFAULT_ROWS_PER_REQUEST, info.max_batch_size)
        ranges = rows.split(size or self._rows_per_request or default)
        outputs: list[Floats | None] = [None] * len(ranges)
        queue = enumerate(requests(rows, ranges, call.output, parameters))
        workers = [
            asyncio.ensure_future(self._work(call, info, queue, outputs, total=len(rows)))
            for _ in range(min(self._concurrency, len(ranges)))
        ]
        if workers:
            await _all_or_first_error(workers)
        return [output for output in outputs if output is not None]

    async def _work(
        self,
        call: _Call,
        info: ModelInfo,
        queue: Iterator[tuple[int, InferRequest]],
        outputs: list[Floats | None],
        *,
        total: int,
    ) -> None:
        """Send requests from the shared queue, one after the other, until it is empty."""
        for at, request in queue:
            outputs[at] = await self._send(call, info, request, total=total)
            call.rows_answered += len(request.rows)
            if call.on_progress is not None:
                call.on_progress(call.rows_answered)

    async def _send(
        self, call: _Call, info: ModelInfo, request: InferRequest, *, total: int
    ) -> Floats:
        """Return the output of one request; its errors name the rows of the whole call."""
        transport = self._connected()
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            output = await with_retries(
                lambda: transport.infer(info.name, request.after(clock() - start)),
                self._retry,
                deadline=_sooner(call.deadline, start, request.parameters.get("deadline_ms")),
            )
            return _checked_output(output, request, call)
        except VarlenClientError as error:
            raise _about_rows(error, request.rows, total) from error

    async def _model_info(self) -> ModelInfo:
        """Return the model's config, asked once."""
        if self._info is None:
            self._info = await self._asked(self._read_model_info())
        return self._info

    async def _read_model_info(self) -> ModelInfo:
        transport = self._connected()
        model = self._model or only_ready_model(await transport.models())
        if model is None:
            raise ServerUnavailable("the server has no ready model")
        return ModelInfo.from_config(await transport.model_config(model))

    async def _is_ready(self) -> bool:
        transport = self._connected()
        if not await transport.server_ready():
            return False
        model = self._model or only_ready_model(await transport.models())
        return model is not None and await transport.model_ready(model)

    async def _read_status(self) -> Status:
        transport = self._connected()
        models = await transport.models()
        model = self._model or only_ready_model(models)
        return Status(
            server=await transport.server_identity(),
            server_ready=await transport.server_ready(),
            models=tuple(models),
            model=model,
            model_ready=model is not None and await transport.model_ready(model),
        )

    async def _asked(self, question: Coroutine[object, object, _T]) -> _T:
        """Await an answer about the server, which it gives at once or not at all."""
        try:
            return await _limited(question, METADATA_TIMEOUT_SECONDS)
        except TimeoutError:
            raise RequestTimeout(
                f"{self._endpoint.target} did not answer within {METADATA_TIMEOUT_SECONDS:g} s"
            ) from None

    def _connected(self) -> Transport:
        if self._transport is None:
            self._transport = _connect(self._endpoint, self._ca_file)
        return self._transport


@dataclass(slots=True)
class _Call:
    """One call of a public method: what it asks for, and how far it is. Owned by the event loop."""

    method: str
    output: str
    rank: int
    timeout: float | None
    needs_width: int | None = None
    on_progress: Callable[[int], None] | None = None
    deadline: float | None = None
    width: int = 0
    rows_answered: int = 0


def _connect(endpoint: Endpoint, ca_file: Path | None) -> Transport:
    """Return the endpoint's transport; call it inside the event loop that will use it."""
    # Imported here: each protocol costs a few hundred milliseconds of imports, and a process rarely
    # needs both.
    if endpoint.protocol == "grpc":
        from varlen_client.grpc_transport import GrpcTransport

        return GrpcTransport(endpoint, ca_file)
    from varlen_client.http_transport import HttpTransport

    return HttpTransport(endpoint, ca_file)


async def _limited(running: Coroutine[object, object, _T], timeout: float | None) -> _T:
    """Await for at most `timeout` seconds, then cancel, wait for the end and raise TimeoutError.

    Not asyncio.wait_for: before Python 3.12 it can lose a cancellation that meets the end of the
    inner task.
    """
    task = asyncio.ensure_future(running)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if task.done():
            return task.result()
    finally:
        await _stopped([task])
    raise TimeoutError


async def _all_or_first_error(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Await all; when one fails, cancel and await the others and raise its error."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _stopped(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _stopped(tasks: Sequence[asyncio.Future[_T]]) -> None:
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _parameters(
    truncate: bool | None,
    deadline_ms: float | None,
    priority: int | None,
    normalize: bool | None = None,
) -> dict[str, bool | float | None]:
    """Return the request parameters under their names on the wire; the server checks them."""
    return {
        "normalize": normalize,
        "truncate": truncate,
        "deadline_ms": deadline_ms,
        "request_priority": priority,
    }


def _sooner(deadline: float | None, start: float, milliseconds: float | None) -> float | None:
    """Return the sooner of a deadline and one so many milliseconds after `start`."""
    deadlines = [] if deadline is None else [deadline]
    if milliseconds is not None:
        deadlines.append(start + milliseconds / 1e3)
    return min(deadlines, default=None)


def _checked_output(output: object, request: InferRequest, call: _Call) -> Floats:
    """Return the output as [rows, …] fp32, or say in what it differs from the wire."""
    if not isinstance(output, np.ndarray):
        raise ServerError(f"the answer has no output {call.output}")
    rows = len(request.rows)
    fits = output.ndim == call.rank + 1 and (output.shape[0], output.shape[-1]) == (
        rows,
        call.width,
    )
    if not fits or output.dtype != np.float32:
        raise ServerError(
            f"{call.output} came as {output.dtype} {list(output.shape)}; expected float32 with "
            f"{rows} rows of {call.width} values in {call.rank + 1} dimensions"
        )
    return output


def _about_rows(error: VarlenClientError, rows: range, total: int) -> VarlenClientError:
    """Return the same error, counted in rows of the whole call.

    The server counts rows inside its request ("row 3: text has 700 tokens"); the caller counts over
    all requests.
    """
    message = str(error)
    if len(rows) < total:
        message = re.sub(r"^row (\d+)", lambda row: f"row {int(row[1]) + rows.start}", message)
        named = f"rows {rows.start}-{rows.stop - 1}" if len(rows) > 1 else f"row {rows.start}"
        if not message.startswith(f"{named}:"):
            message = f"{named} of {total}: {message}"
    return type(error)(message, rows=rows)
