"""The asyncio client, which the sync client in sync.py runs too.

A call is split into requests, of `rows_per_request` rows or of one text, and `concurrency` of them are
in flight at a time. Results are in the order of the input. The first failure cancels the rest of the
call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from varlen_client.endpoint import Endpoint
from varlen_client.errors import InvalidRequest, RequestTimeout, ServerError
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
from varlen_client.masks import MASK_TASK, FilledToken, read_filled_masks
from varlen_client.retry import RetryPolicy
from varlen_client.row_call import RowCall, deadline_of
from varlen_client.row_outputs import (
    Activation,
    LabelScore,
    OutputDType,
    RowOutput,
    RowTask,
    TruncationSide,
    Vectors,
    best_labels,
    vector_output,
)
from varlen_client.session import Session, Status
from varlen_client.sparse import SparseVector, read_sparse_vectors, sparse_task
from varlen_client.tasks import with_timeout
from varlen_client.translation import Translation, read_translation, search_options
from varlen_client.wire import (
    Floats,
    InferRequest,
    Inputs,
    ModelState,
    Pairs,
    Parameters,
    Rows,
    TokenIds,
    infer_requests,
    read_inputs,
    read_inputs_or_pairs,
    read_query_and_documents,
)

DEFAULT_ROWS_PER_REQUEST = 32
DEFAULT_CONCURRENCY = 4
# A request of one text is small, and the server runs many at a time.
DEFAULT_TEXT_CONCURRENCY = 32

# Of a request parameter.
_LARGEST_INTEGER = 2**63 - 1

_T = TypeVar("_T")


class AsyncClient:
    """Asyncio client of one server and one model, for one event loop.

    Use it as an async context manager, or call `close`.

    Args:
        url: `grpc://host:port`, `http://host:port`, or `grpcs://` and `https://` with TLS.
        model: the model's name; by default the only ready model of the server.
        rows_per_request: by default 32, or the model's max_batch_size if that is less.
        concurrency: maximum requests of one call in flight; by default 4, and 32 in `translate`, whose
            requests hold one text each.
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
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        ca_file: str | Path | None = None,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; at least 1")
        if rows_per_request is not None and rows_per_request < 1:
            raise ValueError(f"rows_per_request is {rows_per_request}; at least 1")
        self._rows_per_request = rows_per_request
        self._concurrency = concurrency
        self._session = Session(
            Endpoint.parse(url),
            model,
            retry or RetryPolicy(),
            None if ca_file is None else Path(ca_file),
        )

    async def embed(
        self,
        inputs: Inputs,
        *,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        output_dtype: OutputDType | None = None,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Vectors:
        """Return one vector per row, [rows, features] fp32, in the order of `inputs`.

        Args:
            inputs: texts, or lists of token ids; lengths may differ.
            normalize: scale each vector to length 1; by default the checkpoint decides.
            prompt_name: of the checkpoint's prompt that is put before each text; by default its default one.
            dimensions: return the first features alone; by default all.
            output_dtype: "float16", "int8", "binary" or "ubinary" return other types, the last two with
                8 features in a byte: see docs/wire.md. By default fp32.
            truncate: cut texts that are too long; by default the server refuses them.
            truncation_side: "left" cuts their beginning, "right" their end, the default.
            deadline_ms: milliseconds for each request, retries included. The server refuses
                requests that it cannot answer in time. By default no limit.
            priority: 0 to 9, larger runs sooner; by default 0.
            timeout: seconds for the whole call, retries included; by default no limit.
            on_progress: called with the number of rows answered so far. It blocks the event loop,
                so it must return quickly.

        Raises:
            VarlenClientError: see errors.py. `rows` is the range of rows in the failed request.
        """
        parameters = _parameters(
            truncate,
            truncation_side,
            deadline_ms,
            priority,
            normalize=normalize,
            prompt_name=prompt_name,
            dimensions=dimensions,
            output_dtype=output_dtype,
        )
        rows = read_inputs(inputs)
        task = RowTask("embed", (vector_output(dimensions, output_dtype),))
        [vectors] = await self._matrices(task, rows, parameters, timeout, on_progress)
        return vectors

    async def embed_and_count(
        self,
        inputs: Inputs,
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        timeout: float | None = None,
    ) -> tuple[Floats, int | None]:
        """Return the vectors of `embed`, and the number of tokens of all rows.

        It is None if the model's config.pbtxt lacks the output num_tokens. Arguments and errors are those of `embed`.
        """
        parameters = _parameters(
            truncate, truncation_side, None, None, normalize=normalize, dimensions=dimensions
        )
        rows = read_inputs(inputs)
        info = await self._session.model_info(deadline_of(timeout))
        vectors, counts = vector_output(dimensions, None), RowOutput("num_tokens", dtype=np.int32)
        counted = "num_tokens" in info.outputs
        task = RowTask("embed", (vectors, counts) if counted else (vectors,))
        answer = await self._matrices(task, rows, parameters, timeout)
        return answer[0], int(answer[1].sum()) if counted else None

    async def sparse_embed(
        self,
        inputs: Inputs,
        *,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        with_terms: bool = False,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[SparseVector]:
        """Return the sparse vector of each row: terms of the vocabulary and their weights.

        Args:
            inputs, prompt_name: see `embed`.
            max_active_dims: return the terms of the largest weights alone; by default the checkpoint decides.
            with_terms: return the texts of the terms too.
            truncate, ...: see `embed`.

        Raises:
            VarlenClientError: see `embed`.
        """
        parameters = _parameters(
            truncate,
            truncation_side,
            deadline_ms,
            priority,
            prompt_name=prompt_name,
            max_active_dims=max_active_dims,
        )
        task = sparse_task(with_terms=with_terms)
        answers = await self._answers(task, inputs, parameters, timeout, on_progress)
        return [vector for answer in answers for vector in read_sparse_vectors(answer)]

    async def fill_mask(
        self,
        inputs: Inputs,
        *,
        top_k: int | None = None,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[list[FilledToken]]]:
        """Return the most likely tokens of each mask of each row, the most likely first.

        Args:
            inputs: texts or lists of token ids with 1 to 8 masks, such as "Paris is the [MASK] of France.".
            top_k: tokens of a mask; by default 5.
            truncate, ...: see `embed`.

        Raises:
            VarlenClientError: see `embed`.
        """
        parameters = _parameters(truncate, truncation_side, deadline_ms, priority, top_k=top_k)
        answers = await self._answers(MASK_TASK, inputs, parameters, timeout, on_progress)
        return [masks for answer in answers for masks in read_filled_masks(answer)]

    async def classify(
        self,
        inputs: Inputs | Pairs,
        *,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> Floats:
        """Return the logits of each row, [rows, labels] fp32.

        A row is a text, a pair of texts or a list of token ids. Other arguments and errors are those
        of `embed`.
        """
        parameters = _parameters(truncate, truncation_side, deadline_ms, priority)
        rows = read_inputs_or_pairs(inputs)
        task = RowTask("classify", (RowOutput("logits"),))
        [logits] = await self._matrices(task, rows, parameters, timeout)
        return logits

    async def predict(
        self,
        inputs: Inputs | Pairs,
        *,
        activation: Activation | None = None,
        top_k: int | None = None,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[LabelScore]]:
        """Return the labels of each row with their scores, the best first.

        Args:
            inputs: see `classify`.
            activation: makes scores of logits; by default the checkpoint decides ("auto").
            top_k: return only the best labels of each row; by default all.
            truncate, ...: see `embed`.

        Raises:
            VarlenClientError: see `embed`.
        """
        if top_k is not None and top_k < 1:
            raise InvalidRequest(f"top_k is {top_k}; at least 1")
        parameters = _parameters(
            truncate, truncation_side, deadline_ms, priority, activation=activation
        )
        rows = read_inputs_or_pairs(inputs)
        labels = RowOutput("labels", dtype=np.object_)
        task = RowTask("predict", (RowOutput("scores"), labels))
        scores, names = await self._matrices(task, rows, parameters, timeout, on_progress)
        return best_labels(scores, names, top_k)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        activation: Activation | None = None,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> Floats:
        """Return one score per document, [documents] fp32; a higher score is more relevant.

        The score is the raw logit, unless there is an `activation`: "sigmoid" makes it 0 to 1, "auto"
        lets the checkpoint decide. Other arguments and errors are those of `embed`; InvalidRequest
        also when the model has more than one label.
        """
        parameters = _parameters(
            truncate, truncation_side, deadline_ms, priority, activation=activation
        )
        rows = read_query_and_documents(query, documents)
        # servers of every version have logits
        output = RowOutput("logits" if activation is None else "scores")
        task = RowTask("rerank", (output,), needs_width=1)
        [scores] = await self._matrices(task, rows, parameters, timeout)
        return scores[:, 0]

    async def token_classify(
        self,
        inputs: Inputs | Pairs,
        *,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> list[Floats]:
        """Return the logits of each row's tokens, one [tokens, labels] fp32 per row.

        Each row is sent as its own request, since the server pads the rows of one request to the
        longest. Inputs are those of `classify`, other arguments and errors those of `embed`.
        """
        parameters = _parameters(truncate, truncation_side, deadline_ms, priority)
        rows = read_inputs_or_pairs(inputs)
        task = RowTask("token_classify", (RowOutput("logits", rank=2),))
        return await self._arrays(task, rows, parameters, timeout)

    async def hidden(
        self,
        inputs: Inputs | Pairs,
        *,
        truncate: bool | None = None,
        truncation_side: TruncationSide | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> list[Floats]:
        """Return the last hidden states, one [tokens, hidden] fp32 per row.

        Each row is sent as its own request, as in `token_classify`. Arguments and errors are those
        of `token_classify`.
        """
        parameters = _parameters(truncate, truncation_side, deadline_ms, priority)
        rows = read_inputs_or_pairs(inputs)
        task = RowTask("hidden", (RowOutput("last_hidden_state", rank=2),))
        return await self._arrays(task, rows, parameters, timeout)

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
        deadline = deadline_of(timeout)

        async def collect() -> list[Generation]:
            async with aclosing(self._checked_responses(request, deadline)) as responses:
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
        _check_one_sample(
            sampling, "stream yields one answer; several come from samples or stream_samples"
        )
        parts = self.stream_samples(
            prompt, 1, deadline_ms=deadline_ms, priority=priority, timeout=timeout, **sampling
        )
        async with aclosing(parts):
            async for [part] in parts:
                yield part

    async def stream_samples(
        self,
        prompt: GenerationPrompt,
        n: int,
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[list[GeneratedPart], None]:
        """Yield lists of the next part of each of `n` answers, as they come.

        An answer that has ended has empty parts with its finish reason. Other things are those of `stream`.
        """
        request = generate_request(
            prompt, {**sampling, "n": n}, stream=True, deadline_ms=deadline_ms, priority=priority
        )
        deadline = deadline_of(timeout)
        parts: list[GeneratedPart] = []
        async with aclosing(self._checked_responses(request, deadline)) as responses:
            while response := await _until(_next(responses), deadline, timeout):
                parts = read_parts(response, n)
                yield parts
        if not parts or any(part.finish_reason is None for part in parts):
            raise ServerError("the server ended an answer before its last part")

    async def translate(
        self,
        texts: Inputs,
        *,
        num_beams: int | None = None,
        n_best: int = 1,
        max_tokens: int | None = None,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        on_progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> list[Translation]:
        """Return the translation of each text, in the order of `texts`.

        Each text is sent as its own request.

        Args:
            texts: texts, or lists of token ids with the end token of the source language.
            num_beams: number of beams of each text; by default the checkpoint decides.
            n_best: number of translations of each text, at most `num_beams`; those after the best one are its
                `alternatives`.
            max_tokens: longest translation, in tokens; by default the checkpoint decides.
            deadline_ms, priority: see `generate`.
            timeout: seconds for the whole call, retries included; by default no limit.
            on_progress: see `embed`.
            options: options of the search with the names of Hugging Face, such as length_penalty, early_stopping,
                no_repeat_ngram_size, repetition_penalty or do_sample. The server checks them.

        Raises:
            VarlenClientError: see errors.py. `rows` is the range of the text that failed.
        """
        rows = read_inputs(texts)
        sampling = search_options(
            options, num_beams=num_beams, n_best=n_best, max_tokens=max_tokens
        )
        call = RowCall("translate", len(rows), timeout=timeout, on_progress=on_progress)

        async def translate_all() -> list[Translation]:
            info = await self._session.model_info(call.deadline)
            info.check_translates()

            async def send(text: str | TokenIds) -> Translation:
                request = generate_request(
                    text,
                    sampling,
                    stream=False,
                    deadline_ms=deadline_ms,
                    priority=priority,
                    returns_score=True,
                )
                responses = await self._session.all_responses(info, request, call.deadline)
                return read_translation(responses, n_best)

            return await call.send_all(
                ((range(row, row + 1), text) for row, text in enumerate(texts)),
                send,
                concurrency=self._concurrency or DEFAULT_TEXT_CONCURRENCY,
            )

        return await call.within_timeout(translate_all())

    async def ready(self) -> bool:
        """Return whether the server and the model are ready; False without a connection.

        Raises:
            ModelNotFound: no model was chosen and the server has several.
        """
        return await self._session.ready()

    async def status(self) -> Status:
        """Return the state of the server and its models, without retries.

        Raises:
            VarlenClientError: see errors.py; ModelNotFound when no model was chosen and the server
                has several.
        """
        return await self._session.status()

    async def models(self) -> list[ModelState]:
        """Return the server's models and their states, ready or not."""
        return await self._session.models()

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        await self._session.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _answers(
        self,
        task: RowTask,
        inputs: Inputs,
        parameters: Parameters,
        timeout: float | None,
        on_progress: Callable[[int], None] | None,
    ) -> list[tuple[npt.NDArray[Any], ...]]:
        """Return the outputs of each request, whose rows are padded."""
        rows = read_inputs(inputs)
        call = RowCall(task.method, len(rows), timeout=timeout, on_progress=on_progress)
        answers, _ = await call.within_timeout(
            self._send_all(call, task, rows, parameters, self._rows_per_request)
        )
        return answers

    async def _matrices(
        self,
        task: RowTask,
        rows: Rows,
        parameters: Parameters,
        timeout: float | None,
        on_progress: Callable[[int], None] | None = None,
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return each output of all rows in one array, [rows, width]."""
        call = RowCall(task.method, len(rows), timeout=timeout, on_progress=on_progress)
        answers, task = await call.within_timeout(
            self._send_all(call, task, rows, parameters, self._rows_per_request)
        )
        return task.joined(answers)

    async def _arrays(
        self, task: RowTask, rows: Rows, parameters: Parameters, timeout: float | None
    ) -> list[Floats]:
        """Return the only output of each row in its own array, without the batch dimension."""
        call = RowCall(task.method, len(rows), timeout=timeout)
        answers, _ = await call.within_timeout(
            self._send_all(call, task, rows, parameters, rows_per_request=1)
        )
        return [output[0].copy() for (output,) in answers]

    async def _send_all(
        self,
        call: RowCall,
        task: RowTask,
        rows: Rows,
        parameters: Parameters,
        rows_per_request: int | None,
    ) -> tuple[list[tuple[npt.NDArray[Any], ...]], RowTask]:
        """Return the outputs of each request, in order, and the task with the model's widths."""
        info = await self._session.model_info(call.deadline)
        of_model = task.of_model(info)
        # An explicit rows_per_request above max_batch_size is sent as it is: the server refuses it
        # with its own message.
        default = min(DEFAULT_ROWS_PER_REQUEST, info.max_batch_size)
        ranges = rows.split(rows_per_request or default)

        async def send(request: InferRequest) -> tuple[npt.NDArray[Any], ...]:
            arrays = await self._session.infer(info, request, call.deadline)
            return of_model.checked(arrays, len(request.rows))

        answers = await call.send_all(
            (
                (request.rows, request)
                for request in infer_requests(rows, ranges, task.names, parameters)
            ),
            send,
            concurrency=self._concurrency or DEFAULT_CONCURRENCY,
        )
        return answers, of_model

    async def _checked_responses(
        self, request: GenerateRequest, deadline: float | None
    ) -> AsyncGenerator[Response, None]:
        """Yield the responses to a request to a model that generates."""
        info = await self._session.model_info(deadline)
        info.check_generates()
        async with aclosing(self._session.responses(info, request, deadline)) as responses:
            async for response in responses:
                yield response


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
    truncation_side: TruncationSide | None,
    deadline_ms: float | None,
    priority: int | None,
    **others: bool | int | str | None,
) -> Parameters:
    """Return the request parameters that were given, by their names in the protocol.

    Raises:
        InvalidRequest: an integer is larger than the protocol's.
    """
    parameters = {
        "truncate": truncate,
        "truncation_side": truncation_side,
        "deadline_ms": deadline_ms,
        "request_priority": priority,
        **others,
    }
    for name, value in parameters.items():
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise InvalidRequest(f"{name} is {value}; allowed: up to {_LARGEST_INTEGER}")
    return {name: value for name, value in parameters.items() if value is not None}
