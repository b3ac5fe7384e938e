"""The engine: one thread that takes the next batch, runs it, and hands the answers out.

It owns the queue, the policy and the model; nothing else touches them. Requests come in through a
thread-safe inbox, answers leave through each request's `Reply`, which must not block. Every request
that was submitted is answered exactly once, on every path.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from varlen.errors import EngineError, RequestCancelled
from varlen.metrics import Stats
from varlen.request import Float32Array, Reply, Request, Sequence, Ticket, Waiting
from varlen.scheduling.admission import Admission
from varlen.scheduling.policy import Policy

_log = logging.getLogger(__name__)

_BATCH_FAILED = "the model failed on the batch that held this request; the server's log says why"
_TOO_LITTLE_MEMORY = "the server had too little memory to run this request; it may pass later"


class Model(Protocol):
    """What the engine runs."""

    def run(self, sequences: list[Sequence], normalize: list[bool]) -> list[Float32Array]:
        """Return one answer per sequence, in order."""


class Engine:
    """Runs one model's requests. `submit` may be called from any thread, the rest by the owner."""

    def __init__(
        self,
        model: Model,
        policy: Policy,
        admission: Admission,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an engine that does nothing yet; `start` runs it in a thread, `step` by hand."""
        self._model = model
        self._policy = policy
        self._admission = admission
        self._stats = stats
        self._clock = clock
        # None wakes the thread to see that it should stop
        self._inbox: SimpleQueue[Ticket | None] = SimpleQueue()
        self._queue: deque[Waiting] = deque()
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
            QueueFullError, RequestError: it was not admitted, and its reply is left to the caller.
            EngineError: the engine is closing; likewise.
        """
        # the lock orders this put before close()'s None, so that no request is left behind
        with self._submitting:
            if self._closing:
                raise EngineError("the model is being unloaded")
            self._admission.enter(request)
            self._inbox.put(Ticket(request, reply, arrival=self._clock()))

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

    def step(self) -> bool:
        """Take in what has arrived and run one batch; return whether anything is left to run."""
        self._take_in(block=False)
        batch = self._next_batch()
        if batch:
            self._run(batch)
        return bool(self._queue)

    def _loop(self) -> None:
        while self._wait_for_work():
            try:
                self.step()
            except Exception:
                # a fault of the scheduler or the bookkeeping: nobody may be left waiting
                _log.exception("the engine failed between batches; all that it holds is failed")
                self._fail_all()

    def _wait_for_work(self) -> bool:
        """Block until something is queued; return False when nothing is and nothing will come."""
        if not self._queue:
            self._take_in(block=True)
        return bool(self._queue) or not self._inbox_closed

    def _take_in(self, *, block: bool) -> None:
        """Move what has arrived into the queue; with `block`, wait for something to arrive."""
        while not self._inbox_closed:
            try:
                ticket = self._inbox.get(block=block)
            except Empty:
                return
            if ticket is None:
                # close() put it behind the last request
                self._inbox_closed = True
                return
            self._open[ticket] = None
            self._queued_requests += 1
            self._queued_tokens += ticket.request.num_tokens
            for row, sequence in enumerate(ticket.request.sequences):
                self._queue.append(Waiting(ticket, row, sequence.num_tokens))
            block = False

    def _next_batch(self) -> list[Waiting]:
        """Return sequences to run, of requests that somebody still waits for; empty when the queue is."""
        while self._queue:
            taken = self._policy.take(self._queue)
            self._count_out(taken)
            for ticket in _tickets(taken):
                if not ticket.closed and _is_cancelled(ticket):
                    self._fail(ticket, RequestCancelled("cancelled before it ran"))
            batch = [waiting for waiting in taken if not waiting.ticket.closed]
            if batch:
                return batch
        return []

    def _count_out(self, taken: list[Waiting]) -> None:
        now = self._clock()
        gone = 0
        for waiting in taken:
            ticket = waiting.ticket
            if ticket.queued == len(ticket.rows):
                self._stats.count_wait(now - ticket.arrival)
            ticket.queued -= 1
            gone += ticket.queued == 0
        self._leave(gone, sum(waiting.num_tokens for waiting in taken))

    def _leave(self, requests: int, tokens: int) -> None:
        self._queued_requests -= requests
        self._queued_tokens -= tokens
        self._admission.leave(requests=requests, tokens=tokens)

    def _run(self, batch: list[Waiting]) -> None:
        """Run a batch; where memory runs out, its first half and then its second."""
        self._stats.count_batch(len(batch), sum(waiting.num_tokens for waiting in batch))
        parts = [batch]
        while parts:
            part = [waiting for waiting in parts.pop() if not waiting.ticket.closed]
            try:
                self._run_part(part)
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

    def _run_part(self, batch: list[Waiting]) -> None:
        if not batch:
            return
        answers = self._model.run(
            [waiting.sequence for waiting in batch],
            [waiting.ticket.request.normalize for waiting in batch],
        )
        for waiting, answer in list(zip(batch, answers, strict=True)):
            self._hand_out(waiting, answer)

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
        self._queue.clear()
        self._leave(self._queued_requests, self._queued_tokens)
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
