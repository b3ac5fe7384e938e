"""Calls of rows, of generation and of what runs no model.

They have bounded concurrency, results in order, and one timeout. The first failure cancels the other requests. Errors
name rows of the whole call.

What runs no model is tokens of texts and chats, texts of token ids, and adapters. An answer is a JSON object for each
row, under the name of any output of the model. Models that generate take one prompt in a request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from varlen_client.errors import InvalidRequest, RequestTimeout, ServerError, VarlenClientError
from varlen_client.generation import (
    GeneratedPart,
    Generation,
    GenerationPrompt,
    Messages,
    OperationRequest,
    Response,
    Translation,
    generate_request,
    json_text,
    read_generations,
    read_parts,
    read_translation,
)
from varlen_client.tasks.answers import Output, RowAnswers
from varlen_client.tasks.row_task import (
    CallOptions,
    InputType,
    Options,
    RowOptions,
    RowTask,
    parameters_of,
)
from varlen_client.transport.session import Session
from varlen_client.waits import all_or_first_error, with_timeout
from varlen_client.wire import (
    InferRequest,
    Inputs,
    ModelInfo,
    Pairs,
    Parameters,
    Rows,
    TokenIds,
    read_inputs,
)

DEFAULT_ROWS_PER_REQUEST = 32

_Request = TypeVar("_Request")
_T = TypeVar("_T")
# What is tokenized: texts, or chats.
Tokenizable: TypeAlias = Sequence[str] | Sequence[Messages]
# The JSON object of a row.
_Object: TypeAlias = Mapping[str, Any]
_Result = TypeVar("_Result")
_GENERATED = "text_output"


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


class TokenizeOptions(RowOptions, total=False):
    """Options of tokenization.

    add_special_tokens: add special tokens; by default to texts, not to chats, whose template has them.
    chat_template_kwargs: variables of the chat template, for chats.
    """

    prompt_name: str | None
    input_type: InputType | None
    add_special_tokens: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


class DetokenizeOptions(CallOptions, total=False):
    """Options of detokenization.

    skip_special_tokens: leave special tokens out, the default.
    """

    skip_special_tokens: bool | None


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text.

    Attributes:
        tokens: tokens as the vocabulary has them, such as "##ing" or "Ġcat".
        special: whether the tokenizer added the token.
        offsets: first character of each token, and the first one behind it, in `prompt` and the text behind it.
        prompt: prompt of the checkpoint that is put before the text; often empty.
        max_tokens: length of the model's longest sequence, in tokens.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    offsets: tuple[tuple[int, int], ...]
    prompt: str
    max_tokens: int


class TokenizerSender(RequestSender):
    """Sends texts to the tokenizer of one model."""

    async def tokenize(self, inputs: Tokenizable, options: Options) -> list[TokenizedText]:
        """Return the tokens of each text or chat."""
        is_chat = not isinstance(inputs, str) and any(map(_is_chat, inputs))
        rows = Rows(tuple(map(_chat, inputs))) if is_chat else read_inputs(inputs)  # type: ignore[arg-type]
        if rows.ids:
            raise InvalidRequest("got token ids; tokenize takes texts or chats")
        parameters = parameters_of("tokenize", TokenizeOptions, options)
        json_text("the parameters", parameters)
        if "chat_template_kwargs" in parameters and not is_chat:
            raise InvalidRequest("got chat_template_kwargs without chats; leave it out")
        found = await self._send("tokenize", rows, parameters, options, is_chat=is_chat)
        return [await _after_others(_tokenized, each) for each in found]

    async def detokenize(self, inputs: Sequence[TokenIds], options: Options) -> list[str]:
        """Return the text of each row of token ids."""
        rows = read_inputs(inputs)
        if rows.texts:
            raise InvalidRequest("got texts; detokenize takes lists of token ids")
        texts = Rows(tuple((json.dumps(ids.tolist()).encode(),) for ids in rows.ids))
        parameters = parameters_of("detokenize", DetokenizeOptions, options)
        found = await self._send("detokenize", texts, parameters, options)
        return [_field(each, "text") for each in found]

    async def adapters(self, timeout: float | None) -> dict[str, str]:
        """Return why each adapter is refused, by name; empty for one that is served."""
        # some text: the server ignores it
        [found] = await self._send("adapters", Rows(((b"a",),)), {}, {"timeout": timeout})
        adapters: dict[str, str] = _field(found, "adapters")
        return adapters

    async def _send(
        self,
        operation: str,
        rows: Rows,
        parameters: Parameters,
        options: Options,
        *,
        is_chat: bool = False,
    ) -> list[_Object]:
        """Return the JSON object of each row."""
        parameters = {"operation": operation, **parameters}
        timeout, on_progress = options.get("timeout"), options.get("on_progress")
        call = RowCall(operation, len(rows), timeout=timeout, on_progress=on_progress)

        async def send_all() -> list[_Object]:
            info = await self._session.model_info(call.deadline)
            # of outputs that are arrays any will do, and this one exists
            output = next(iter(info.outputs))

            async def ask(request: OperationRequest) -> list[_Object]:
                [response] = await self._session.all_responses(info, request, call.deadline)
                return await _objects(response.get(_GENERATED, ()), 1)

            async def infer(request: InferRequest) -> list[_Object]:
                found = (await self._session.infer(info, request, call.deadline)).get(output)
                if not isinstance(found, np.ndarray) or found.dtype != np.object_:
                    raise ServerError(
                        f"{output} has no texts; the server is older than this client"
                    )
                return await _objects(found.ravel().tolist(), len(request.rows))

            if info.generates:
                name: Literal["messages", "text_input"] = "messages" if is_chat else "text_input"
                prompts = (
                    (
                        range(row, row + 1),
                        OperationRequest((name, text.decode()), parameters, stream=False),
                    )
                    for row, (text,) in enumerate(rows.texts)
                )
                parts = await call.send_all(prompts, ask, concurrency=self._concurrency)
            elif is_chat:
                raise InvalidRequest(
                    f"model {info.name!r} does not generate; chats need a model that does"
                )
            else:
                texts = rows
                if info.requires_pairs:
                    texts = Rows(tuple((text, b"") for (text,) in rows.texts))
                requests = (
                    (each, InferRequest(each, texts.tensors(each), (output,), parameters))
                    for each in texts.split(self._request_rows(info))
                )
                parts = await call.send_all(requests, infer, concurrency=self._concurrency)
            return [each for part in parts for each in part]

        return await call.within_timeout(send_all())


def _is_chat(row: object) -> bool:
    # the characters of a text are texts
    if isinstance(row, str) or not isinstance(row, Sequence):
        return False
    return any(isinstance(each, Mapping) for each in row)


def _chat(row: Any) -> tuple[bytes]:
    """Return the JSON text of chat messages.

    Raises:
        InvalidRequest: JSON has no form for them.
    """
    if not _is_chat(row):
        raise InvalidRequest(
            "some rows are chats and others are not; send them in calls of their own"
        )
    return (json_text("the messages", list(row)).encode(),)


async def _after_others(read: Callable[[_T], _Result], given: _T) -> _Result:
    """Return what is read of a row, which may be large, after other tasks ran."""
    await asyncio.sleep(0)
    return read(given)


async def _objects(texts: Sequence[str | bytes], rows: int) -> list[_Object]:
    """Return the JSON object of each row.

    Raises:
        ServerError: a row has none.
    """
    try:
        found = [await _after_others(json.loads, text) for text in texts]
        assert len(found) == rows
        assert all(isinstance(each, dict) for each in found)
    except (ValueError, AssertionError) as error:
        raise ServerError(f"the response cannot be read: {error!r}") from error
    return found


def _tokenized(found: _Object) -> TokenizedText:
    return TokenizedText(
        token_ids=tuple(_field(found, "token_ids")),
        tokens=tuple(_field(found, "tokens")),
        special=tuple(_field(found, "special")),
        offsets=tuple(map(tuple, _field(found, "offsets"))),
        prompt=_field(found, "prompt"),
        max_tokens=_field(found, "max_tokens"),
    )


def _field(found: _Object, name: str) -> Any:
    if name not in found:
        raise ServerError(f"the response has no {name}")
    return found[name]
