"""The sync client: the asyncio client on an event loop in a background thread.

All clients of a process share this loop, because gRPC's asyncio support works well with only one loop
per process. Calls from many threads need no lock: each call is a task of the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Unpack

from varlen_client.aio import AsyncClient
from varlen_client.generation import GeneratedPart, Generation, GenerationPrompt
from varlen_client.masks import FilledToken
from varlen_client.row_options import (
    EmbedOptions,
    MaskOptions,
    PredictOptions,
    RerankOptions,
    RowOptions,
    SparseOptions,
    TokenEmbedOptions,
)
from varlen_client.row_outputs import LabelScore, Vectors
from varlen_client.sparse import SparseVector
from varlen_client.token_labels import TokenLabel
from varlen_client.translation import Translation
from varlen_client.transport.retry import RetryPolicy
from varlen_client.transport.session import Status
from varlen_client.wire import Floats, Inputs, ModelState, Pairs

_T = TypeVar("_T")


class _LoopThread:
    """An event loop in a daemon thread, started at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[object, object, _T]) -> _T:
        """Return the result of a coroutine run on the loop; Ctrl-C cancels the coroutine."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[object, object, _T]) -> Future[_T]:
        """Run a coroutine on the loop, and return its future without waiting."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A forked child has no loop thread, so it starts a new one. This helps HTTP only: gRPC
            # does not support use on both sides of a fork.
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="varlen-client", daemon=True
                )
                self._thread.start()
            return self._loop


_loop = _LoopThread()


class Client:
    """Sync client of one server and one model; safe to use from many threads.

    Use it as a context manager, or call `close`. Arguments, results and errors are those of
    `AsyncClient`.
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
        self._client = AsyncClient(
            url,
            model,
            rows_per_request=rows_per_request,
            concurrency=concurrency,
            retry=retry,
            ca_file=ca_file,
        )

    def embed(self, inputs: Inputs, **options: Unpack[EmbedOptions]) -> Vectors:
        """Return one vector per row, [rows, features] fp32. See `AsyncClient.embed`."""
        return _loop.run(self._client.embed(inputs, **options))

    def embed_and_count(
        self, inputs: Inputs, **options: Unpack[EmbedOptions]
    ) -> tuple[Vectors, int | None]:
        """Return the vectors of `embed`, and the number of tokens of all rows."""
        return _loop.run(self._client.embed_and_count(inputs, **options))

    def sparse_embed(self, inputs: Inputs, **options: Unpack[SparseOptions]) -> list[SparseVector]:
        """Return the sparse vector of each row. See `AsyncClient.sparse_embed`."""
        return _loop.run(self._client.sparse_embed(inputs, **options))

    def sparse_embed_and_count(
        self, inputs: Inputs, **options: Unpack[SparseOptions]
    ) -> tuple[list[SparseVector], int | None]:
        """Return the sparse vector of each row, and the number of tokens of all rows."""
        return _loop.run(self._client.sparse_embed_and_count(inputs, **options))

    def fill_mask(
        self, inputs: Inputs, **options: Unpack[MaskOptions]
    ) -> list[list[list[FilledToken]]]:
        """Return the most likely tokens of each mask of each row. See `AsyncClient.fill_mask`."""
        return _loop.run(self._client.fill_mask(inputs, **options))

    def classify(self, inputs: Inputs | Pairs, **options: Unpack[RowOptions]) -> Floats:
        """Return the logits of each row, [rows, labels] fp32. See `AsyncClient.classify`."""
        return _loop.run(self._client.classify(inputs, **options))

    def predict(
        self, inputs: Inputs | Pairs, **options: Unpack[PredictOptions]
    ) -> list[list[LabelScore]]:
        """Return the labels of each row with their scores. See `AsyncClient.predict`."""
        return _loop.run(self._client.predict(inputs, **options))

    def predict_and_count(
        self, inputs: Inputs | Pairs, **options: Unpack[PredictOptions]
    ) -> tuple[list[list[LabelScore]], int | None]:
        """Return the labels of `predict`, and the number of tokens of all rows."""
        return _loop.run(self._client.predict_and_count(inputs, **options))

    def rerank(
        self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]
    ) -> Floats:
        """Return one score per document, [documents] fp32. See `AsyncClient.rerank`."""
        return _loop.run(self._client.rerank(query, documents, **options))

    def rerank_and_count(
        self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]
    ) -> tuple[Floats, int | None]:
        """Return the scores of `rerank`, and the number of tokens of all pairs."""
        return _loop.run(self._client.rerank_and_count(query, documents, **options))

    def token_classify(self, inputs: Inputs | Pairs, **options: Unpack[RowOptions]) -> list[Floats]:
        """Return one [tokens, labels] fp32 per row. See `AsyncClient.token_classify`."""
        return _loop.run(self._client.token_classify(inputs, **options))

    def predict_tokens(
        self, inputs: Inputs | Pairs, **options: Unpack[RerankOptions]
    ) -> list[list[TokenLabel]]:
        """Return each row's tokens with their best labels. See `AsyncClient.predict_tokens`."""
        return _loop.run(self._client.predict_tokens(inputs, **options))

    def hidden(self, inputs: Inputs | Pairs, **options: Unpack[RowOptions]) -> list[Floats]:
        """Return one [tokens, hidden] fp32 per row. See `AsyncClient.hidden`."""
        return _loop.run(self._client.hidden(inputs, **options))

    def token_embed(self, inputs: Inputs, **options: Unpack[TokenEmbedOptions]) -> list[Floats]:
        """Return one [vectors, features] fp32 per row. See `AsyncClient.token_embed`."""
        return _loop.run(self._client.token_embed(inputs, **options))

    def generate(
        self,
        prompt: GenerationPrompt,
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Generation:
        """Return the answer to a prompt. See `AsyncClient.generate`."""
        return _loop.run(
            self._client.generate(
                prompt, deadline_ms=deadline_ms, priority=priority, timeout=timeout, **sampling
            )
        )

    def samples(
        self,
        prompt: GenerationPrompt,
        n: int,
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Return `n` answers to a prompt. See `AsyncClient.samples`."""
        return _loop.run(
            self._client.samples(
                prompt, n, deadline_ms=deadline_ms, priority=priority, timeout=timeout, **sampling
            )
        )

    def stream(
        self,
        prompt: GenerationPrompt,
        *,
        deadline_ms: float | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Iterator[GeneratedPart]:
        """Yield the parts of the answer to a prompt as they come. See `AsyncClient.stream`.

        Leaving the loop early cancels the request.
        """
        parts = self._client.stream(
            prompt, deadline_ms=deadline_ms, priority=priority, timeout=timeout, **sampling
        )

        async def next_part() -> GeneratedPart | None:
            return await anext(parts, None)

        async def close() -> None:
            await parts.aclose()

        try:
            while part := _loop.run(next_part()):
                yield part
        finally:
            # A garbage collection may end up here in the loop's own thread, which must not wait for itself.
            _loop.start(close())

    def translate(
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
        """Return the translation of each text. See `AsyncClient.translate`.

        `on_progress` runs in the event loop's thread and must not call this client.
        """
        return _loop.run(
            self._client.translate(
                texts,
                num_beams=num_beams,
                n_best=n_best,
                max_tokens=max_tokens,
                deadline_ms=deadline_ms,
                priority=priority,
                timeout=timeout,
                on_progress=on_progress,
                **options,
            )
        )

    def ready(self) -> bool:
        """Return whether the server and the model are ready. See `AsyncClient.ready`."""
        return _loop.run(self._client.ready())

    def status(self) -> Status:
        """Return the state of the server and its models. See `AsyncClient.status`."""
        return _loop.run(self._client.status())

    def models(self) -> list[ModelState]:
        """Return the server's models and their states, ready or not."""
        return _loop.run(self._client.models())

    def close(self) -> None:
        """Close the connections; calls in progress fail."""
        _loop.run(self._client.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
