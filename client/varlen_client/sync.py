"""The sync client: the asyncio client on an event loop in a background thread.

All clients of a process share this loop, because gRPC's asyncio support works well with only one loop
per process. Calls from many threads need no lock: each call is a task of the loop.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from varlen_client.aio import DEFAULT_WATCH_SECONDS, AsyncClient
from varlen_client.generation import GeneratedPart, GenerationPrompt
from varlen_client.tasks import RowMethods
from varlen_client.tasks.row_task import Asked, SyncAsks
from varlen_client.transport.session import RetryPolicy

_P = ParamSpec("_P")
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


def _sync(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[object, object, _T]],
) -> Callable[Concatenate[Client, _P], _T]:
    """Return a method of the sync client that waits for one of the asyncio client."""

    @functools.wraps(method)
    def call(self: Client, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        return _loop.run(method(self._client, *arguments, **options))

    return call


class Client(SyncAsks, RowMethods):
    """Sync client of one model of a server or its replicas, for many threads.

    Use it as a context manager, or call `close`. Arguments, results and errors are the same as in
    `AsyncClient`.
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
        self._client = AsyncClient(
            url,
            model,
            rows_per_request=rows_per_request,
            concurrency=concurrency,
            retry=retry,
            ca_file=ca_file,
            tenant=tenant,
            watch_seconds=watch_seconds,
        )

    def ask(self, asked: Asked[_T]) -> _T:
        """Return the answer to what a method asks."""
        return _loop.run(self._client.ask(asked))

    counted = _sync(AsyncClient.counted)
    generate = _sync(AsyncClient.generate)
    samples = _sync(AsyncClient.samples)
    # its `on_progress` runs in the thread of the event loop, and must not call this client
    translate = _sync(AsyncClient.translate)
    tokenize = _sync(AsyncClient.tokenize)
    detokenize = _sync(AsyncClient.detokenize)
    adapters = _sync(AsyncClient.adapters)
    ready = _sync(AsyncClient.ready)
    status = _sync(AsyncClient.status)
    models = _sync(AsyncClient.models)
    model_info = _sync(AsyncClient.model_info)
    model_infos = _sync(AsyncClient.model_infos)
    close = _sync(AsyncClient.close)

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

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
