"""The engine: one thread that takes the next batch, runs it, and hands the answers out.

It owns the queue, the policy and the model; nothing else touches them. Requests come in through a
thread-safe inbox, answers leave through each request's `Reply`, which must not block. Every request
that was submitted is answered exactly once, on every path.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from varlen.errors import DeadlineError, EngineError, QueueFullError, RequestCancelled
from varlen.metrics import Stats
from varlen.request import Float32Array, Prompt, Reply, Request, RequestOptions, Ticket, Waiting
from varlen.scheduling.admission import Admission
from varlen.scheduling.policy import Batch
from varlen.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)

_BATCH_FAILED = "the model failed on the batch that held this request; the server's log says why"
_TOO_LITTLE_MEMORY = "the server had too little memory to run this request; it may pass later"


class Model(Protocol):
    """What the engine runs."""

    def run(self, prompts: list[Prompt], options: list[RequestOptions]) -> list[Float32Array]:
        """Return one answer per sequence, in order."""


class Engine:
    """Runs one model's requests. `submit` may be called from any thread, the rest by the owner."""

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        admission: Admission,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an engine that does nothing yet; `start` runs it in a thread, `step` by hand."""
        self._model = model
        self._scheduler = scheduler
        self._admission = admission
        self._stats = stats
        self._clock = clock
        # None wakes the thread to see that it should stop
        self._inbox: SimpleQueue[Ticket | None] = SimpleQueue()
        # admitted and not answered, in order; and what of it admission still counts
        self._open: dict[Ticket, None] = {}
        self._queued_requests = 0
        self._queued_tokens = 0
        self._inbox_closed = False
        self._submitting = Lock()
        self._closing = False
        self._thread = Thread(target=self._loop, name="varlen-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def submit(self, request: Request, reply: Reply) -> None:
        """Queue a request; its reply is answered later, from the engine's thread.

        Raises:
            QueueFullError, DeadlineError, RequestError: it was not admitted, and its reply is left to the caller.
            EngineError: the engine is closing; likewise.
        """
        forecast = self._scheduler.forecast([p.num_tokens for p in request.prompts])
        # the lock orders this put before close()'s None, so that no request is left behind
        with self._submitting:
            if self._closing:
                raise EngineError("the model is being unloaded")
            now = self._clock()
            try:
                self._admission.enter(request, forecast, now)
            except QueueFullError:
                self._stats.count_refusal("queue_full")
                raise
            except DeadlineError:
                self._stats.count_refusal("deadline")
                raise
            deadline = math.inf
            if request.options.deadline_seconds is not None:
                deadline = now + request.options.deadline_seconds
            self._inbox.put(Ticket(request, reply, now, deadline, forecast.seconds))

    def is_alive(self) -> bool:
        """Return whether the engine's thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Refuse new requests, run what is queued, and stop the thread."""
        with self._submitting:
            self._closing = True
            self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def step(self) -> float | None:
        """Take in what has arrived, and run one batch if it is time to.

        Returns:
            When the next batch is to start; None if nothing waits.
        """
        self._take_in()
        while (start := self._start_at()) is not None and start <= self._clock():
            batch = self._next_batch()
            if batch is not None:
                self._run(batch)
                self._take_in()
                return self._start_at()
        return start

    def _loop(self) -> None:
        start: float | None = None
        while start is not None or not self._inbox_closed:
            try:
                self._wait(start)
                start = self.step()
            except Exception:
                # a fault of the scheduler or the bookkeeping: nobody may be left waiting
                _log.exception("the engine failed between batches; all that it holds is failed")
                self._fail_all()
                start = None

    def _wait(self, start: float | None) -> None:
        """Block until a batch is to start, or something arrives."""
        if self._inbox_closed:
            return
        timeout = None if start is None else start - self._clock()
        if timeout is None or timeout > 0.0:
            try:
                self._take(self._inbox.get(timeout=timeout))
            except Empty:
                return

    def _start_at(self) -> float | None:
        start = self._scheduler.start_at(self._clock())
        # nothing more will come to wait for
        return self._clock() if self._inbox_closed and start is not None else start

    def _take_in(self) -> None:
        """Move what has arrived into the queue."""
        while not self._inbox_closed:
            try:
                self._take(self._inbox.get(block=False))
            except Empty:
                return

    def _take(self, ticket: Ticket | None) -> None:
        if ticket is None:
            # close() put it behind the last request
            self._inbox_closed = True
            return
        self._open[ticket] = None
        self._queued_requests += 1
        self._queued_tokens += ticket.request.num_tokens
        self._scheduler.add(ticket, ticket.arrival)

    def _next_batch(self) -> Batch | None:
        """Return what runs now, of requests that somebody still waits for; None if nobody does."""
        began = time.perf_counter()
        batch = self._scheduler.take(self._clock())
        self._stats.count_scheduling(time.perf_counter() - began)
        self._count_out(batch.sequences)
        now = self._clock()
        for ticket in _tickets(batch.sequences):
            if ticket.closed:
                continue
            if _is_cancelled(ticket):
                self._fail(ticket, RequestCancelled("cancelled before it ran"))
            elif ticket.deadline < now:
                self._stats.count_refusal("expired")
                self._fail(ticket, DeadlineError("the request was still waiting to run"))
        return self._scheduler.without_closed(batch)

    def _count_out(self, taken: list[Waiting]) -> None:
        now = self._clock()
        gone: list[Ticket] = []
        for waiting in taken:
            ticket = waiting.ticket
            if ticket.queued == len(ticket.rows):
                self._stats.count_wait(now - ticket.arrival)
            ticket.queued -= 1
            if not ticket.queued:
                gone.append(ticket)
        tokens = sum(waiting.num_tokens for waiting in taken)
        self._leave(len(gone), tokens, sum(ticket.seconds for ticket in gone))

    def _leave(self, requests: int, tokens: int, seconds: float) -> None:
        self._queued_requests -= requests
        self._queued_tokens -= tokens
        self._admission.leave(requests=requests, tokens=tokens, seconds=seconds)

    def _run(self, batch: Batch) -> None:
        """Run a batch; where memory runs out, its first half and then its second."""
        shape = batch.shape
        self._stats.count_batch(shape.sequences, shape.tokens, self._scheduler.padding(shape))
        self._admission.started(until=self._clock() + batch.seconds)
        parts = [batch.sequences]
        while parts:
            part = [waiting for waiting in parts.pop() if not waiting.ticket.closed]
            try:
                seconds = self._run_part(part)
            except MemoryError:
                _log.warning("too little memory for a batch of %d sequences", len(part))
                if len(part) == 1:
                    self._fail(part[0].ticket, EngineError(_TOO_LITTLE_MEMORY))
                    continue
                self._stats.count("varlen_split_batches_total")
                half = len(part) // 2
                parts += [part[half:], part[:half]]
            except Exception:
                _log.exception("a batch of %d sequences failed", len(part))
                for ticket in _tickets(part):
                    self._fail(ticket, EngineError(_BATCH_FAILED))
            else:
                # of a batch that ran in parts, or failed, nothing can be learned
                if len(part) == len(batch.sequences):
                    self._learn(batch, seconds)

    def _learn(self, batch: Batch, seconds: float) -> None:
        self._stats.count_batch_seconds(predicted=batch.seconds, actual=seconds)
        self._scheduler.ran(batch, seconds)
        _log.debug(
            "ran %d sequences, %d tokens, the longest %d: %s; %.1f ms predicted, %.1f ms taken",
            batch.shape.sequences,
            batch.shape.tokens,
            batch.shape.longest,
            batch.why,
            1000 * batch.seconds,
            1000 * seconds,
        )

    def _run_part(self, batch: list[Waiting]) -> float:
        """Run sequences and hand out their answers; return the seconds that the model took."""
        if not batch:
            return 0.0
        began = self._clock()
        answers = self._model.run(
            [waiting.sequence for waiting in batch],
            [waiting.ticket.request.options for waiting in batch],
        )
        seconds = self._clock() - began
        for waiting, answer in list(zip(batch, answers, strict=True)):
            self._hand_out(waiting, answer)
        return seconds

    def _hand_out(self, waiting: Waiting, answer: Float32Array) -> None:
        ticket = waiting.ticket
        ticket.rows[waiting.row] = answer
        ticket.missing -= 1
        if not ticket.missing:
            rows = [row for row in ticket.rows if row is not None]
            self._answer(ticket, lambda: ticket.reply.succeed(rows))

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self._answer(ticket, lambda: ticket.reply.fail(error))

    def _answer(self, ticket: Ticket, give: Callable[[], None]) -> None:
        ticket.closed = True
        del self._open[ticket]
        try:
            give()
        except Exception:
            _log.exception("a reply failed to take its answer")

    def _fail_all(self) -> None:
        """Fail every request that has not been answered, wherever the fault lost it."""
        self._scheduler.clear()
        self._leave(self._queued_requests, self._queued_tokens, math.inf)
        for ticket in list(self._open):
            self._fail(ticket, EngineError("the engine failed; the server's log says why"))


def _is_cancelled(ticket: Ticket) -> bool:
    try:
        return ticket.reply.is_cancelled()
    except Exception:
        _log.exception("a reply failed to say whether it is cancelled; its request runs")
        return False


def _tickets(sequences: Iterable[Waiting]) -> list[Ticket]:
    """Return the requests that these sequences belong to, each once, in order."""
    return list(dict.fromkeys(waiting.ticket for waiting in sequences))
