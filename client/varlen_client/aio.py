"""The asyncio client, which the sync client in sync.py runs too.

A call is split into requests of `rows_per_request` rows, and `concurrency` of them are in flight at a
time. Results are in the order of the input. The first failure cancels the rest of the call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from varlen_client.endpoint import Endpoint
from varlen_client.errors import (
    InvalidRequest,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    VarlenClientError,
)
from varlen_client.generation import (
    GeneratedPart,
    GenerateRequest,
    Generation,
    GenerationPrompt,
    Response,
    generate_request,
    read_generations,
    read_parts,
)
from varlen_client.retry import RetryPolicy, with_retries
from varlen_client.tasks import all_or_first_error, with_timeout
from varlen_client.transport import ServerIdentity, Transport
from varlen_client.wire import (
    Floats,
    InferRequest,
    Inputs,
    ModelInfo,
    ModelState,
    Pairs,
    Parameters,
    Rows,
    infer_requests,
    only_ready_model,
    read_inputs,
    read_inputs_or_pairs,
    read_query_and_documents,
    with_remaining_deadline,
)

DEFAULT_ROWS_PER_REQUEST = 32
DEFAULT_CONCURRENCY = 4
METADATA_TIMEOUT_SECONDS = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Status:
    """State of the server and its models, as the server reports it."""

    server: ServerIdentity
    server_ready: bool
    models: tuple[ModelState, ...]
    model: str | None
    """The model that this client uses; None when none was chosen and none is ready."""
    model_ready: bool


class AsyncClient:
    """Asyncio client of one server and one model, for one event loop.

    Use it as an async context manager, or call `close`.

    Args:
        url: `grpc://host:port`, `http://host:port`, or `grpcs://` and `https://` with TLS.
        model: the model's name; by default the only ready model of the server.
        rows_per_request: by default 32, or the model's max_batch_size if that is less.
        concurrency: maximum requests of one call in flight.
        retry: see retry.py.
        ca_file: certificates to trust with TLS, instead of the default ones.

    Raises:
        InvalidUrl: `url` is not a valid server address.
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
            inputs: texts, or lists of token ids; lengths may differ.
            normalize: scale each vector to length 1; by default the checkpoint decides.
            truncate: cut rows that are too long; by default the server refuses them.
            deadline_ms: milliseconds for each request, retries included. The server refuses
                requests that it cannot answer in time. By default no limit.
            priority: 0 to 9, larger runs sooner; by default 0.
            timeout: seconds for the whole call, retries included; by default no limit.
            on_progress: called with the number of rows answered so far. It blocks the event loop,
                so it must return quickly.

        Raises:
            VarlenClientError: see errors.py. `rows` is the range of rows in the failed request.
        """
        parameters = _parameters(truncate, deadline_ms, priority, normalize)
        rows = read_inputs(inputs)
        call = _Call("embed", "sentence_embedding", rank=1, rows=rows, parameters=parameters)
        call.on_progress = on_progress
        return await self._matrix(call, timeout)

    async def classify(
        self,
        inputs: Inputs | Pairs,
        *,
        truncate: bool | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> Floats:
        """Return the logits of each row, [rows, labels] fp32.

        A row is a text, a pair of texts or a list of token ids. Other arguments and errors are those
        of `embed`.
        """
        parameters = _parameters(truncate, deadline_ms, priority)
        rows = read_inputs_or_pairs(inputs)
        call = _Call("classify", "logits", rank=1, rows=rows, parameters=parameters)
        return await self._matrix(call, timeout)

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
        """Return one score per document, [documents] fp32; a higher score is more relevant.

        The score is the raw logit. Other arguments and errors are those of `embed`; InvalidRequest
        also when the model has more than one label.
        """
        parameters = _parameters(truncate, deadline_ms, priority)
        rows = read_query_and_documents(query, documents)
        call = _Call("rerank", "logits", rank=1, rows=rows, parameters=parameters)
        call.needs_width = 1
        return (await self._matrix(call, timeout))[:, 0]

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

        Each row is sent as its own request, since the server pads the rows of one request to the
        longest. Inputs are those of `classify`, other arguments and errors those of `embed`.
        """
        parameters = _parameters(truncate, deadline_ms, priority)
        rows = read_inputs_or_pairs(inputs)
        call = _Call("token_classify", "logits", rank=2, rows=rows, parameters=parameters)
        return await self._arrays(call, timeout)

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

        Each row is sent as its own request, as in `token_classify`. Arguments and errors are those
        of `token_classify`.
        """
        parameters = _parameters(truncate, deadline_ms, priority)
        rows = read_inputs_or_pairs(inputs)
        call = _Call("hidden", "last_hidden_state", rank=2, rows=rows, parameters=parameters)
        return await self._arrays(call, timeout)

    async def generate(
        self,
        prompt: GenerationPrompt,
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Generation:
        """Return the answer to a prompt.

        Args:
            prompt: a text, token ids, or chat messages such as `[{"role": "user", "content": "Hi"}]`.
            deadline_ms: milliseconds until the answer is complete, retries included. The server refuses a request
                that it cannot answer in time. By default no limit.
            priority: 0 to 9, larger runs sooner; by default 0.
            timeout: seconds for the whole call, retries included; by default no limit.
            sampling: sampling parameters with the names of vLLM, such as max_tokens, temperature, top_p, top_k, seed,
                stop, logprobs or structured_outputs. The server checks them.

        Raises:
            VarlenClientError: see errors.py; InvalidRequest also when `n` asks for several samples.
        """
        _check_one_sample(sampling, "generate returns one answer; several come from samples")
        [answer] = await self.samples(
            prompt, 1, deadline_ms=deadline_ms, priority=priority, timeout=timeout, **sampling
        )
        return answer

    async def samples(
        self,
        prompt: GenerationPrompt,
        n: int,
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Return `n` answers to a prompt. Other arguments and errors are those of `generate`."""
        request = generate_request(
            prompt, {**sampling, "n": n}, stream=False, deadline_ms=deadline_ms, priority=priority
        )

        deadline = _deadline(timeout)

        async def collect() -> list[Generation]:
            async with aclosing(self._responses(request, deadline)) as responses:
                return read_generations([each async for each in responses], n)

        return await _until(collect(), deadline, timeout)

    async def stream(
        self,
        prompt: GenerationPrompt,
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[GeneratedPart, None]:
        """Yield the parts of the answer to a prompt as they come.

        Closing the generator cancels the request, so leave a loop early within `contextlib.aclosing`. Only a request
        that has not been answered in part is sent again. Arguments and errors are those of `generate`.
        """
        _check_one_sample(sampling, "stream yields one answer; several come from samples")
        request = generate_request(
            prompt, sampling, stream=True, deadline_ms=deadline_ms, priority=priority
        )
        deadline = _deadline(timeout)
        reason = None
        async with aclosing(self._responses(request, deadline)) as responses:
            while response := await _until(_next(responses), deadline, timeout):
                [part] = read_parts(response, 1)
                reason = part.finish_reason
                yield part
        if reason is None:
            raise ServerError("the server ended an answer before its last part")

    async def ready(self) -> bool:
        """Return whether the server and the model are ready; False without a connection.

        Raises:
            ModelNotFound: no model was chosen and the server has several.
        """
        try:
            return await self._with_metadata_timeout(self._read_ready())
        except (ServerUnavailable, RequestTimeout):
            return False

    async def status(self) -> Status:
        """Return the state of the server and its models, without retries.

        Raises:
            VarlenClientError: see errors.py; ModelNotFound when no model was chosen and the server
                has several.
        """
        return await self._with_metadata_timeout(self._read_status())

    async def models(self) -> list[ModelState]:
        """Return the server's models and their states, ready or not."""
        return await self._with_metadata_timeout(self._connected().models())

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
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

    async def _matrix(self, call: _Call, timeout: float | None) -> Floats:
        """Return the outputs of all rows in one array, [rows, width]."""
        outputs = await self._outputs(call, timeout)
        if not outputs:
            return np.empty((0, max(call.width, 0)), dtype=np.float32)
        return np.concatenate(outputs)

    async def _arrays(self, call: _Call, timeout: float | None) -> list[Floats]:
        """Return the output of each row in its own array, without the batch dimension."""
        outputs = await self._outputs(call, timeout, rows_per_request=1)
        return [output[0].copy() for output in outputs]

    async def _outputs(
        self, call: _Call, timeout: float | None, *, rows_per_request: int | None = None
    ) -> list[Floats]:
        """Return the output of each request, in the order of the rows.

        Raises:
            RequestTimeout: `timeout` passed; requests in flight are cancelled.
        """
        if timeout is not None:
            call.deadline = asyncio.get_running_loop().time() + timeout
        try:
            return await with_timeout(self._send_all(call, rows_per_request), timeout)
        except TimeoutError:
            raise RequestTimeout(
                f"{call.method} did not end within {timeout:g} s; "
                f"{call.rows_answered} of {len(call.rows)} rows were answered",
                rows=range(len(call.rows)),
            ) from None

    async def _send_all(self, call: _Call, rows_per_request: int | None) -> list[Floats]:
        """Return the output of each request; the first failure cancels the other requests."""
        info = await with_retries(self._model_info, self._retry, deadline=call.deadline)
        call.width = info.width(call.method, call.output, rank=call.rank)
        if call.needs_width not in (None, call.width):
            raise InvalidRequest(
                f"model {info.name!r} gives {call.width} values per row; "
                f"{call.method} needs {call.needs_width}"
            )
        # An explicit rows_per_request above max_batch_size is sent as it is: the server refuses it
        # with its own message.
        default = min(DEFAULT_ROWS_PER_REQUEST, info.max_batch_size)
        ranges = call.rows.split(rows_per_request or self._rows_per_request or default)
        outputs: list[Floats | None] = [None] * len(ranges)
        queue = enumerate(infer_requests(call.rows, ranges, call.output, call.parameters))
        workers = [
            asyncio.ensure_future(self._work(call, info, queue, outputs))
            for _ in range(min(self._concurrency, len(ranges)))
        ]
        if workers:
            await all_or_first_error(workers)
        return [output for output in outputs if output is not None]

    async def _work(
        self,
        call: _Call,
        info: ModelInfo,
        queue: Iterator[tuple[int, InferRequest]],
        outputs: list[Floats | None],
    ) -> None:
        """Send requests from the shared queue, one at a time, until it is empty."""
        for index, request in queue:
            outputs[index] = await self._send(call, info, request)
            call.rows_answered += len(request.rows)
            if call.on_progress is not None:
                call.on_progress(call.rows_answered)

    async def _send(self, call: _Call, info: ModelInfo, request: InferRequest) -> Floats:
        """Return the output of one request; errors name rows of the whole call."""
        transport = self._connected()
        clock = asyncio.get_running_loop().time
        start = clock()

        async def attempt() -> object:
            parameters = with_remaining_deadline(request.parameters, clock() - start)
            return await transport.infer(info.name, replace(request, parameters=parameters))

        try:
            output = await with_retries(
                attempt,
                self._retry,
                deadline=_earlier(call.deadline, start, request.parameters.get("deadline_ms")),
            )
            return _checked_output(output, request, call)
        except VarlenClientError as error:
            raise _with_rows(error, request.rows, len(call.rows)) from error

    async def _responses(
        self, request: GenerateRequest, deadline: float | None
    ) -> AsyncGenerator[Response, None]:
        """Yield the responses to a request, which is sent again until the first one comes."""
        info = await with_retries(self._model_info, self._retry, deadline=deadline)
        info.check_generates()
        transport = self._connected()
        clock = asyncio.get_running_loop().time
        start = clock()

        async def begin() -> tuple[Response, AsyncGenerator[Response, None]]:
            sampling = with_remaining_deadline(request.sampling, clock() - start)
            responses = transport.generate(info.name, replace(request, sampling=sampling))
            try:
                return await anext(responses), responses
            except StopAsyncIteration:
                raise ServerError("the server sent no response") from None

        first, rest = await with_retries(
            begin,
            self._retry,
            deadline=_earlier(deadline, start, request.sampling.get("deadline_ms")),
        )
        async with aclosing(rest):
            yield first
            async for response in rest:
                yield response

    async def _model_info(self) -> ModelInfo:
        """Return the model's info, read from the server at the first call."""
        if self._info is None:
            self._info = await self._with_metadata_timeout(self._read_model_info())
        return self._info

    async def _read_model_info(self) -> ModelInfo:
        transport = self._connected()
        model = self._model or only_ready_model(await transport.models())
        if model is None:
            raise ServerUnavailable("the server has no ready model")
        return ModelInfo.from_config(await transport.model_config(model))

    async def _read_ready(self) -> bool:
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

    async def _with_metadata_timeout(self, query: Coroutine[object, object, _T]) -> _T:
        """Return the result of a metadata query, which a working server answers at once."""
        try:
            return await with_timeout(query, METADATA_TIMEOUT_SECONDS)
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
    """One call of a public method, and its progress."""

    method: str
    output: str
    rank: int
    """Dimensions of the output, without the batch dimension."""
    rows: Rows
    parameters: Parameters
    needs_width: int | None = None
    on_progress: Callable[[int], None] | None = None
    # Set while the call runs, in the event loop.
    deadline: float | None = None
    width: int = 0
    rows_answered: int = 0


def _connect(endpoint: Endpoint, ca_file: Path | None) -> Transport:
    """Return a transport for the event loop that runs now."""
    # Imported here: each protocol takes a few hundred milliseconds to import, and a process rarely
    # needs both.
    if endpoint.protocol == "grpc":
        from varlen_client.grpc_transport import GrpcTransport

        return GrpcTransport(endpoint, ca_file)
    from varlen_client.http_transport import HttpTransport

    return HttpTransport(endpoint, ca_file)


def _deadline(timeout: float | None) -> float | None:
    """Return the end of a call, on the event loop's clock."""
    return None if timeout is None else asyncio.get_running_loop().time() + timeout


async def _until(
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


async def _next(responses: AsyncGenerator[Response, None]) -> Response | None:
    """Return the next response; None after the last."""
    return await anext(responses, None)


def _check_one_sample(sampling: Mapping[str, Any], message: str) -> None:
    if sampling.get("n", 1) != 1:
        raise InvalidRequest(f"n is {sampling['n']!r}; {message}")


def _parameters(
    truncate: bool | None,
    deadline_ms: float | None,
    priority: int | None,
    normalize: bool | None = None,
) -> Parameters:
    """Return the request parameters that were given, by their names in the protocol."""
    parameters = {
        "normalize": normalize,
        "truncate": truncate,
        "deadline_ms": deadline_ms,
        "request_priority": priority,
    }
    return {name: value for name, value in parameters.items() if value is not None}


def _earlier(deadline: float | None, start: float, milliseconds: float | None) -> float | None:
    """Return the earlier of `deadline` and `start` plus `milliseconds`, if either is given."""
    deadlines = [] if deadline is None else [deadline]
    if milliseconds is not None:
        deadlines.append(start + milliseconds / 1e3)
    return min(deadlines, default=None)


def _checked_output(output: object, request: InferRequest, call: _Call) -> Floats:
    """Return the output if it has the expected shape, [rows, …] fp32.

    Raises:
        ServerError: it is missing, or has another shape or dtype.
    """
    if not isinstance(output, np.ndarray):
        raise ServerError(f"the response has no output {call.output}")
    rows = len(request.rows)
    fits = output.ndim == call.rank + 1 and (output.shape[0], output.shape[-1]) == (
        rows,
        call.width,
    )
    if not fits or output.dtype != np.float32:
        raise ServerError(
            f"{call.output} is {output.dtype} {list(output.shape)}; expected float32 with "
            f"{rows} rows of {call.width} values in {call.rank + 1} dimensions"
        )
    return output


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
