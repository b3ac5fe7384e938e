"""The asyncio client, which the sync client in sync.py runs too.

A call is split into requests, of `rows_per_request` rows or of one text, and `concurrency` of them are
in flight at a time. Results are in the order of the input. The first failure cancels the rest of the
call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Unpack

from varlen_client.calls import (
    DetokenizeOptions,
    RowCall,
    RowSender,
    Tokenizable,
    TokenizedText,
    TokenizeOptions,
    TokenizerSender,
    check_one_sample,
    deadline_of,
    parts_of_answers,
    translations,
    whole_answers,
)
from varlen_client.errors import RequestTimeout
from varlen_client.generation import (
    GeneratedPart,
    Generation,
    GenerationPrompt,
    Translation,
    search_options,
)
from varlen_client.tasks import RowMethods
from varlen_client.tasks.row_task import Asked, AsyncAsks, RowTask
from varlen_client.transport.endpoint import Endpoint
from varlen_client.transport.session import RetryPolicy, Session, Status
from varlen_client.waits import with_timeout
from varlen_client.wire import (
    Inputs,
    ModelInfo,
    ModelState,
    Pairs,
    TokenIds,
    read_inputs,
)

_Answer = TypeVar("_Answer")

DEFAULT_CONCURRENCY = 4
# Longer than most answers take. The server's three refusals take 3 s more, so calls fail within 5 s.
DEFAULT_WATCH_SECONDS = 1.0
# A request of one text is small, and the server runs many at a time.
DEFAULT_TEXT_CONCURRENCY = 32


class AsyncClient(AsyncAsks, RowMethods):
    """Asyncio client of one model of a server or its replicas, for one event loop.

    Use it as an async context manager, or call `close`.

    Args:
        url: `grpc://host:port`, `http://host:port`, or `grpcs://` and `https://` with TLS; or the URLs of several
            replicas, all of one protocol, see replicas.py. `dns+grpc://name:port` is every address of the name.
        model: the model's name; by default the only ready model of the server.
        rows_per_request: number of rows in a request; by default 32, or the model's max_batch_size if that is less.
        concurrency: maximum requests of one call in flight; by default 4, and 32 in `translate`, whose
            requests hold one text each.
        retry: policy of retries, see session.py.
        ca_file: certificates to trust with TLS, instead of the default ones.
        tenant: tenant of all requests that name none, see `RowOptions`.
        watch_seconds: seconds without any answer after which the client asks whether the model's process still
            runs, while calls wait; they fail once it has ended. 0 never asks.

    Raises:
        InvalidUrl: `url` is not a valid server address, or the addresses have several protocols.
        ValueError: rows_per_request or concurrency is less than 1, or watch_seconds less than 0.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str | None = None,
        *,
        rows_per_request: int | None = None,
        concurrency: int | None = None,
        retry: RetryPolicy | None = None,
        ca_file: str | Path | None = None,
        tenant: str | None = None,
        watch_seconds: float = DEFAULT_WATCH_SECONDS,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; at least 1")
        if rows_per_request is not None and rows_per_request < 1:
            raise ValueError(f"rows_per_request is {rows_per_request}; at least 1")
        if watch_seconds < 0:
            raise ValueError(f"watch_seconds is {watch_seconds:g}; at least 0")
        self._concurrency = concurrency
        trusted = None if ca_file is None else Path(ca_file)
        self._session = Session(
            Endpoint.parse_all(url),
            model,
            retry or RetryPolicy(),
            trusted,
            tenant,
            watch_seconds=watch_seconds,
        )
        limits = rows_per_request, concurrency or DEFAULT_CONCURRENCY
        self._rows = RowSender(self._session, *limits)
        self._tokenizer = TokenizerSender(self._session, *limits)

    async def ask(self, asked: Asked[_Answer]) -> _Answer:
        """Return the answer to what a method asks."""
        answers = await self._rows.send(asked.task, asked.inputs, asked.options)
        return asked.task.read(answers)

    async def counted(
        self, task: RowTask[_Answer], inputs: Inputs | Pairs, /, **options: Any
    ) -> tuple[_Answer, int | None]:
        """Return the answer of a method above, and the number of tokens of all rows.

        The number is None if the model's config.pbtxt lacks the output num_tokens.

        Args:
            task: task of the method, such as `tasks.vectors.EMBED` for `embed`.
            inputs: rows as the method takes them; for `tasks.labels.RERANK` pairs of the query and each document.
        """
        answers = await self._rows.send(task, inputs, options, counts_tokens=True)
        return task.read(answers), answers.num_tokens

    async def generate(
        self,
        # so that `_sync` has its type: a sampling parameter might have this name
        /,
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
        check_one_sample(sampling, "generate returns one answer; several come from samples")
        [answer] = await self.samples(
            prompt, 1, deadline_ms=deadline_ms, priority=priority, timeout=timeout, **sampling
        )
        return answer

    async def samples(
        self,
        /,
        prompt: GenerationPrompt,
        n: int,
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Return `n` answers to a prompt. Other arguments and errors are as in `generate`."""
        given = {**sampling, "n": n, "deadline_ms": deadline_ms, "priority": priority}
        return await whole_answers(self._session, prompt, given, timeout)

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
        that has not been answered in part is sent again. Arguments and errors are as in `generate`.
        """
        check_one_sample(
            sampling, "stream yields one answer; several come from samples or stream_samples"
        )
        answers = self.stream_samples(
            prompt, 1, deadline_ms=deadline_ms, priority=priority, timeout=timeout, **sampling
        )
        async with aclosing(answers) as parts:
            async for [part] in parts:
                yield part

    def stream_samples(
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

        An answer that has ended has empty parts with its finish reason. Otherwise like `stream`.
        """
        given = {**sampling, "n": n, "deadline_ms": deadline_ms, "priority": priority}
        return parts_of_answers(self._session, prompt, given, timeout)

    async def translate(
        self,
        /,
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
            deadline_ms, priority, timeout: arguments of `generate`.
            on_progress: see `RowOptions`.
            options: options of the search with the names of Hugging Face, such as length_penalty, early_stopping,
                no_repeat_ngram_size, repetition_penalty or do_sample. The server checks them.

        Raises:
            VarlenClientError: see errors.py. `rows` is the range of the text that failed.
        """
        rows = len(read_inputs(texts))
        call = RowCall("translate", rows, timeout=timeout, on_progress=on_progress)
        given = {**options, "deadline_ms": deadline_ms, "priority": priority}
        sampling = search_options(given, num_beams=num_beams, n_best=n_best, max_tokens=max_tokens)
        concurrency = self._concurrency or DEFAULT_TEXT_CONCURRENCY
        return await translations(self._session, call, texts, sampling, concurrency)

    async def tokenize(
        self, inputs: Tokenizable, **options: Unpack[TokenizeOptions]
    ) -> list[TokenizedText]:
        """Return the tokens of each text, from the model's tokenizer; no model runs.

        Texts longer than the model takes are tokenized too, unless `truncate` cuts them.

        Args:
            inputs: texts; or, of a model that generates, chats: lists of messages.
        """
        return await self._tokenizer.tokenize(inputs, options)

    async def detokenize(
        self, inputs: Sequence[TokenIds], **options: Unpack[DetokenizeOptions]
    ) -> list[str]:
        """Return the text of each row of token ids, from the model's tokenizer.

        Errors are the same as in `embed`; see `DetokenizeOptions`.
        """
        return await self._tokenizer.detokenize(inputs, options)

    async def adapters(self, *, timeout: float | None = None) -> dict[str, str]:
        """Return the adapters that requests to the model may name.

        Returns:
            By name, why the adapter is refused; an empty text for one that is served.
        """
        return await self._tokenizer.adapters(timeout)

    async def ready(self) -> bool:
        """Return whether the server and the model are ready; False without a connection.

        Raises:
            ModelNotFound: no model was chosen and the server has several.
        """
        return await self._session.ready()

    async def status(self) -> Status:
        """Return the state of the server and its models, without retries."""
        return await self._session.status()

    async def models(self) -> list[ModelState]:
        """Return the server's models and their states, ready or not."""
        return await self._session.models()

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Return what the model's config says of its outputs, limits and settings."""
        try:
            return await with_timeout(self._session.model_info(deadline_of(timeout)), timeout)
        except TimeoutError:
            raise RequestTimeout(f"the model's config did not come within {timeout:g} s") from None

    async def model_infos(self, names: Collection[str]) -> dict[str, ModelInfo]:
        """Return by name what the configs of several models of the server say.

        They are read without retries; models whose config cannot be read within 10 seconds are left out.
        """
        return await self._session.model_infos(names)

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
