"""The engine: one thread that schedules batches, starts them and delivers their outputs.

    batch = scheduler.schedule(now)                  # which sequences run, with how many tokens
    executor.start(batch, completed)                 # runs it; up to `slots` batches at a time
    events = scheduler.update(batch, result)         # outputs and failures; sequences finish or go on

A sequence that is not finished after a batch waits for the next one. So encoders, which answer in one step, and
decoders, which generate token by token, run in the same loop. Requests come in through a thread-safe inbox, and so do
completed batches. Every request is answered exactly once, on every path.

Source: Orca (Yu et al. 2022, OSDI), algorithm 1.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol, TypeAlias

from sortedcontainers import SortedKeyList

from varlen.errors import (
    DeadlineError,
    EngineError,
    ModelFaultError,
    QueueFullError,
    RequestCancelled,
)
from varlen.request.request import Bytes, Reply, Request
from varlen.scheduling.batch import (
    Batch,
    BatchResult,
    Event,
    Forecast,
    NewWriter,
    RequestState,
    SequenceOutput,
    SequenceState,
    add_writers,
)
from varlen.telemetry.metrics import CountedMetric, Stats

_log = logging.getLogger(__name__)

_UNDELIVERED = "the answer could not be delivered; the server's log says why"
_ENGINE_FAILED = "the engine failed; the server's log says why"
# How early a batch is started that runs after another one, in units of the time that this takes.
_LEAD = 2.0
# That time is the longest of recent batches: the recent maximum decays by this fraction per batch.
_DECAY = 0.1
_FAULT = "the model has stopped after a fault of its device or workers and cannot run requests; reload it"


class Scheduler(Protocol):
    """Decides which sequences run together next. Only `admit` and `withdraw` leave the engine's thread."""

    def admit(self, request: Request, now: float) -> Forecast:
        """Count a request as waiting, or raise a `VarlenError`. From any thread."""

    def withdraw(self, request: Request, forecast: Forecast) -> None:
        """Subtract a request that was admitted and is not added. From any thread."""

    def add(self, request: RequestState) -> None:
        """Queue an admitted request."""

    def wake_at(self, now: float) -> float | None:
        """Return when `schedule` will have a batch if nothing else happens; None if nothing waits."""

    def schedule(self, now: float) -> Batch | None:
        """Return the next batch and mark it as running; None if it is too early."""

    def trim(self, batch: Batch, now: float) -> Batch | None:
        """Return a scheduled batch without its finished sequences; None if all are finished."""

    def update(self, batch: Batch, result: BatchResult) -> list[Event]:
        """Return the outputs and the failures of a batch that has run."""

    def remove(self, request: RequestState) -> None:
        """Finish all sequences of a request; the outputs of those that run are ignored."""

    def drain(self) -> None:
        """Stop waiting for fuller batches: no more requests come."""


class Executor(Protocol):
    """Runs batches.

    Attributes:
        slots: largest number of batches in flight.
    """

    slots: int

    def start(self, batch: Batch, completed: Callable[[Batch, BatchResult], None]) -> None:
        """Start a batch. `completed` is called once with its result, from any thread."""

    def free_at(self) -> float:
        """Return when a batch that is started now will run; minus infinity if at once."""

    def collect(self, timeout: float | None) -> bool:
        """Complete the first batch in flight in this thread, unless it takes longer.

        Returns whether this is how batches are completed; if not, a thread of the executor does it.

        Args:
            timeout: longest time to wait, in seconds; None is no limit.
        """


@dataclass(frozen=True, slots=True)
class _Completion:
    batch: Batch
    result: BatchResult


# None tells the engine that the inbox is closed
_Inbox: TypeAlias = SimpleQueue[RequestState | _Completion | None]


class Engine:
    """Runs the requests of one model. Any thread may call `submit`, the owner the rest."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
        new_writer: NewWriter | None = None,
        *,
        is_padded: bool = False,
        arrived: Bytes | None = None,
    ) -> None:
        """Make an idle engine: `start` runs it in a thread, `step` by hand.

        Args:
            is_padded: whether batches are counted with their padding.
            arrived: `[1]`, 1 from the arrival of a request until it is handled; a launch of several steps ends by it.
        """
        self._arrived = arrived
        self._is_padded = is_padded
        self._scheduler = scheduler
        self._executor = executor
        self._stats = stats
        self._clock = clock
        # makes the writers of answers, in the threads that submit
        self._new_writer = new_writer
        self._inbox: _Inbox = SimpleQueue()
        # admitted and not answered, in order of arrival
        self._open: dict[RequestState, None] = {}
        self._by_deadline = SortedKeyList(key=lambda request: request.deadline)
        self._in_flight = 0
        # time spent scheduling since the last batch started
        self._scheduling_seconds = 0.0
        # time that it takes to schedule and start a batch
        self._starting_seconds = 0.0
        self._inbox_closed = False
        self._submitting = Lock()
        # why requests are refused; None while they are accepted
        self._refusal: EngineError | None = None
        self._thread = Thread(target=self._loop, name="varlen-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, reply: Reply) -> None:
        """Queue a request; its reply is answered later, from the engine's thread.

        Raises:
            QueueFullError, DeadlineError, RequestError: the request is not admitted; the caller answers it.
            EngineError: the engine is closing, or its model has stopped; likewise.
        """
        now = self._clock()
        # first: a request that is refused costs nothing more
        forecast = self._admit(request, now)
        state = None
        try:
            arrival, deadline = request.arrived(now), request.deadline(now)
            state = RequestState(request, reply, arrival, deadline, forecast)
            if self._new_writer is not None:
                add_writers(state, self._new_writer)
            self._put(state)
        except BaseException:
            self._scheduler.withdraw(request, forecast)
            if state is not None:
                # breaks a reference cycle, as for an answered request
                state.sequences = ()
            raise

    @property
    def is_ready(self) -> bool:
        """Whether the engine's thread runs and requests are accepted."""
        return self._thread.is_alive() and self._refusal is None

    def close(self) -> None:
        """Refuse new requests, run what is queued, and stop the thread."""
        with self._submitting:
            self._refusal = self._refusal or EngineError("the model is being unloaded")
            self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def step(self) -> float | None:
        """Handle what has arrived, and fill the free slots with batches.

        Returns:
            When to call it again if nothing arrives before; None if it need not be called then.
        """
        self._drain_inbox()
        self._fail_expired()
        while self._in_flight < self._executor.slots:
            now = self._clock()
            # as late as possible: until then more requests come, and the best batch may be another one
            starts_at = self._executor.free_at() - _LEAD * self._starting_seconds
            if now < starts_at:
                wake_at = self._scheduler.wake_at(now)
                return None if wake_at is None else max(wake_at, starts_at)
            found = self._next_batch()
            if found is None:
                return self._scheduler.wake_at(self._clock())
            self._start(*found)
            kept = (1.0 - _DECAY) * self._starting_seconds
            self._starting_seconds = max(self._clock() - now, kept)
        return None

    def _loop(self) -> None:
        wake_at: float | None = None
        while not self._inbox_closed or self._in_flight or wake_at is not None:
            try:
                self._wait(wake_at)
                wake_at = self.step()
            except Exception:
                # a fault of the scheduler or of the bookkeeping: no request may be left waiting
                _log.exception("the engine failed between batches; all open requests fail")
                self._fail_all(EngineError(_ENGINE_FAILED))
                wake_at = None

    def _wait(self, wake_at: float | None) -> None:
        """Block until something arrives, or until `wake_at`."""
        timeout = None if wake_at is None else wake_at - self._clock()
        if self._in_flight and self._executor.collect(timeout):
            return
        if timeout is None or timeout > 0.0:
            with suppress(Empty):
                self._handle(self._inbox.get(timeout=timeout))

    def _drain_inbox(self) -> None:
        if self._arrived is not None:
            # first: what arrives from now on sets it again
            self._arrived[0] = 0
        with suppress(Empty):
            while True:
                self._handle(self._inbox.get(block=False))

    def _handle(self, arrived: RequestState | _Completion | None) -> None:
        if arrived is None:
            self._inbox_closed = True
            self._scheduler.drain()
        elif isinstance(arrived, _Completion):
            self._in_flight -= 1
            self._update(arrived.batch, arrived.result)
        else:
            self._open[arrived] = None
            if math.isfinite(arrived.deadline):
                self._by_deadline.add(arrived)
            try:
                self._scheduler.add(arrived)
            except BaseException:
                # also a panic of a library, which is no Exception
                _log.exception("a request could not be queued; it fails")
                self._fail(arrived, EngineError(_ENGINE_FAILED))

    def _admit(self, request: Request, now: float) -> Forecast:
        with self._submitting:
            self._check_accepting()
            try:
                return self._scheduler.admit(request, now)
            except (QueueFullError, DeadlineError) as error:
                is_late = isinstance(error, DeadlineError)
                self._stats.count_refusal("deadline" if is_late else "queue_full")
                raise

    def _put(self, request: RequestState) -> None:
        # the lock orders this put before close()'s None, so that no request is left behind
        with self._submitting:
            self._check_accepting()
            self._inbox.put(request)
            if self._arrived is not None:
                self._arrived[0] = 1

    def _check_accepting(self) -> None:
        if self._refusal is not None:
            # a new exception each time: its traceback keeps a request alive
            raise type(self._refusal)(str(self._refusal))

    def _next_batch(self) -> tuple[Batch, list[RequestState]] | None:
        """Return the next batch without cancelled requests, and its requests.

        None if it is too early.
        """
        while True:
            began, now = time.perf_counter(), self._clock()
            batch = self._scheduler.schedule(now)
            self._scheduling_seconds += time.perf_counter() - began
            if batch is None:
                return None
            requests = _requests(batch.sequences)
            cancelled = [each for each in requests if _is_cancelled(each)]
            if not cancelled:
                return batch, requests
            for request in cancelled:
                self._fail(request, RequestCancelled("cancelled before it ran"))
            batch = self._scheduler.trim(batch, now)
            if batch is not None:
                return batch, _requests(batch.sequences)

    def _fail_expired(self) -> None:
        """Fail requests whose deadline has passed, unless all that is left of them runs now."""
        now = self._clock()
        expired = list(takewhile(lambda request: request.deadline < now, self._by_deadline))
        for request in expired:
            if any(sequence.may_run_again for sequence in request.sequences):
                self._stats.count_refusal("expired")
                self._fail(
                    request, DeadlineError("the deadline passed before the answer was complete")
                )

    def _start(self, batch: Batch, requests: Sequence[RequestState]) -> None:
        now = self._clock()
        starting = [request for request in requests if not request.started]
        for request in starting:
            request.started = True
            if trace := request.request.trace:
                trace.start(now, sequences=batch.shape.sequences, tokens=batch.shape.tokens)
        self._in_flight += 1
        try:
            self._executor.start(batch, self._completed)
        except BaseException:
            self._completed(batch, BatchResult([], 0.0, failure="batch"))
            raise
        self._stats.count_start(self._scheduling_seconds, [now - r.arrival for r in starting])
        self._scheduling_seconds = 0.0

    def _completed(self, batch: Batch, result: BatchResult) -> None:
        """Enqueue a result of the executor. Any thread may call this."""
        self._inbox.put(_Completion(batch, result))

    def _update(self, batch: Batch, result: BatchResult) -> None:
        if result.failure == "model":
            self._stop(ModelFaultError(f"{_FAULT}: {result.reason}" if result.reason else _FAULT))
            return
        events = self._scheduler.update(batch, result)
        self._count(batch, result)
        ended: dict[RequestState, None] = {}
        for event in events:
            request = event.sequence.request
            if request not in self._open:
                continue
            if isinstance(event, SequenceOutput):
                self._send(request, event)
            else:
                self._fail(request, event.error)
            if not request.unfinished:
                ended[request] = None
        for request in ended:
            if request in self._open:
                self._finish(request)

    def _count(self, batch: Batch, result: BatchResult) -> None:
        shape = batch.shape
        if result.failure is None:
            padding = shape.padding if self._is_padded else 0
            tokens = batch.tokens_of(result.steps) if batch.steps > 1 else shape.tokens
            self._stats.count_batch(shape.sequences, tokens, padding)
            self._stats.count_batch_seconds(predicted=batch.seconds, actual=result.seconds)
        elif result.failure == "memory" and shape.sequences > 1:
            self._stats.count(CountedMetric.SPLIT_BATCHES)
        _log.debug(
            "ran %d sequences, %d tokens, the longest %d: %s; %.1f ms predicted, %.1f ms taken",
            shape.sequences,
            shape.tokens,
            shape.longest,
            batch.reason,
            1000 * batch.seconds,
            1000 * result.seconds,
        )

    def _send(self, request: RequestState, event: SequenceOutput) -> None:
        try:
            request.reply.send(event.sequence.row, event.output)
        except Exception:
            _log.exception("sending a part of an answer failed; its request fails")
            self._fail(request, EngineError(_UNDELIVERED))

    def _finish(self, request: RequestState) -> None:
        try:
            request.reply.finish()
        except Exception:
            _log.exception("finishing an answer failed; its request fails")
            self._fail(request, EngineError(_UNDELIVERED))
        else:
            self._forget(request)

    def _fail(self, request: RequestState, error: Exception) -> None:
        try:
            self._scheduler.remove(request)
        except Exception:
            _log.exception("the scheduler failed to remove a request")
        try:
            request.reply.fail(error)
        except Exception:
            _log.exception("sending an error failed")
        self._forget(request)

    def _forget(self, request: RequestState) -> None:
        del self._open[request]
        self._by_deadline.discard(request)
        # breaks a reference cycle: outputs, and replies, are freed without waiting for a garbage collection
        request.sequences = ()

    def _stop(self, error: EngineError) -> None:
        _log.error("%s", error)
        with self._submitting:
            self._refusal = error
        # once the lock is released, only completions come into the inbox
        self._drain_inbox()
        self._fail_all(error)

    def _fail_all(self, error: EngineError) -> None:
        for request in list(self._open):
            self._fail(request, error)


def _requests(sequences: Iterable[SequenceState]) -> list[RequestState]:
    """Return the requests of sequences, each once, in order."""
    return list(dict.fromkeys([sequence.request for sequence in sequences]))


def _is_cancelled(request: RequestState) -> bool:
    try:
        return request.reply.is_cancelled()
    except Exception:
        _log.exception("checking for cancellation failed; the request runs")
        return False
