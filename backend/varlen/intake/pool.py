"""Threads that tokenize: they turn drafts into requests.

The step of a draft that is due first runs next, so short texts pass long ones, and one thread runs short steps only:

    due = arrival + bytes of the draft up to and with this step / (bytes per second * (1 + priority))

`due` never changes, so every step has its turn; docs/decisions/0024-tokenizer-threads.md has the reasons.
Every draft is accepted as a request, or its reply fails.
"""

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Thread
from typing import TypeAlias

from varlen.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    VarlenError,
)
from varlen.request.request import (
    MAX_PROBE_BYTES,
    Draft,
    Prompt,
    Reply,
    Request,
    RequestOptions,
    TokenizationTask,
    reserve,
)
from varlen.telemetry.metrics import Stats

_log = logging.getLogger(__name__)

# Takes over a request that is ready, or raises an error that its reply gets.
Accept: TypeAlias = Callable[[Request], None]

TOKENIZER_THREADS = 2
_BYTES_PER_SECOND = 100_000
# Several short texts that share a step have fewer; a longer one is a long text, or a part of it.
_SHORT_STEP_BYTES = 1 << 13
# Waking a thread takes longer than tokenizing so few bytes.
_AT_ONCE_BYTES = 256
# Longest time between two questions whether the client of a waiting draft is still there.
_CANCEL_CHECK_SECONDS = 0.02
_FAILED = "the request could not be read; the server's log says why"


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of the drafts that wait.

    Attributes:
        max_requests: largest number of requests that wait here and elsewhere.
        max_bytes: largest size of their texts, in bytes of UTF-8.
        waiting_elsewhere: returns the number of requests that wait elsewhere.
    """

    max_requests: int
    max_bytes: int
    waiting_elsewhere: Callable[[], int]


@dataclass(slots=True, eq=False)
class _Work:
    """A draft and its progress. One thread at a time works on it.

    Attributes:
        bytes_left, bytes_done: length of the texts of the steps that are left, and of the others.
        last_check: last time at which the client was known to be there.
    """

    steps: deque[TokenizationTask]
    options: RequestOptions
    reply: Reply
    accept: Accept
    arrival: float
    number: int
    bytes_left: int
    bytes_done: int = 0
    last_check: float = field(init=False)
    prompts: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last_check = self.arrival

    @property
    def is_long(self) -> bool:
        return self.steps[0].num_bytes > _SHORT_STEP_BYTES

    @property
    def due(self) -> float:
        num_bytes = self.bytes_done + self.steps[0].num_bytes
        return self.arrival + num_bytes / (_BYTES_PER_SECOND * (1 + self.options.priority))


class TokenizerPool:
    """Tokenizes drafts in a few threads. Any thread may call `submit`, the owner the rest."""

    def __init__(
        self,
        limits: PoolLimits,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
        *,
        threads: int = TOKENIZER_THREADS,
        name: str = "tokenizer",
        work: str = "the text was tokenized",
        at_once: bool = False,
    ) -> None:
        """Make a pool that is idle; `start` runs it in threads, `step` by hand.

        Args:
            work: words for what a deadline came before.
            at_once: whether `submit` runs a short lone draft, whose steps then wait for no process.
        """
        self._most_at_once = _AT_ONCE_BYTES if at_once else -1
        self._limits = limits
        self._stats = stats
        self._clock = clock
        self._work = work
        # guards what follows
        self._changed = Condition()
        # by whether the next step is long
        self._heaps: dict[bool, list[tuple[float, int, _Work]]] = {False: [], True: []}
        self._long_running, self._most_long = 0, max(1, threads - 1)
        self._numbers = count()
        self._requests = 0
        self._bytes = 0
        self._is_closing = False
        self._threads = [
            Thread(target=self._loop, name=f"varlen-{name}-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> tuple[int, int]:
        """Waiting requests, and bytes of their waiting texts."""
        with self._changed:
            return self._requests, self._bytes

    def submit(self, draft: Draft, reply: Reply, accept: Accept, *, arrival: float) -> None:
        """Enqueue a draft: it is accepted, or its reply fails, now or later.

        Args:
            draft: has at least one step.
            reply: asked whether the client is still there.
            accept: called once, from a thread of the pool or from this one, unless the reply fails.

        Raises:
            RequestError, QueueFullError: the texts are too long for the pool, or for what else waits; the caller
                answers the request.
            EngineError: the pool is closing; likewise.
        """
        with self._changed:
            if self._is_closing:
                raise EngineError("the model is being unloaded")
            try:
                self._check_limits(draft)
            except QueueFullError:
                self._stats.count_refusal("queue_full")
                raise
            self._requests += 1
            self._bytes += draft.num_bytes
            steps, number = deque(draft.steps), next(self._numbers)
            work = _Work(steps, draft.options, reply, accept, arrival, number, draft.num_bytes)
            is_lone = self._requests == 1 and len(steps) == 1
            is_at_once = is_lone and draft.num_bytes <= self._most_at_once
            if not is_at_once:
                self._push(work)
                self._changed.notify()
        if is_at_once:
            self._advance(work)

    def step(self) -> bool:
        """Run the step that is due first; return whether any waited."""
        with self._changed:
            heap = self._next_heap()
            if heap is None:
                return False
            _, _, work = heapq.heappop(heap)
            is_long = work.is_long
            self._long_running += is_long
        self._advance(work)
        if is_long:
            with self._changed:
                self._long_running -= 1
                self._changed.notify()
        return True

    def close(self) -> None:
        """Refuse new drafts, finish those that wait, and stop the threads."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        while self.step():
            pass

    def _loop(self) -> None:
        while self._wait():
            self.step()

    def _wait(self) -> bool:
        """Block until there is work, and return True; False if the pool closes without any."""
        with self._changed:
            self._changed.wait_for(lambda: self._next_heap() or self._is_closing)
            return self._next_heap() is not None

    def _next_heap(self) -> list[tuple[float, int, _Work]] | None:
        """Return the heap whose first step is due next and may run; None without one."""
        may_run = [False, True] if self._long_running < self._most_long else [False]
        return min(filter(None, (self._heaps[is_long] for is_long in may_run)), default=None)

    def _push(self, work: _Work) -> None:
        heapq.heappush(self._heaps[work.is_long], (work.due, work.number, work))

    def _check_limits(self, draft: Draft) -> None:
        limits, num_bytes, options = self._limits, draft.num_bytes, draft.options
        if num_bytes > limits.max_bytes:
            raise RequestError(
                f"the texts have {num_bytes} bytes; this model queues at most {limits.max_bytes}:"
                " send fewer rows at once"
            )
        waiting = self._requests + limits.waiting_elsewhere()
        if waiting >= limits.max_requests + reserve(options, 1):
            raise QueueFullError(
                f"the queue is full: {waiting} requests wait, at most {limits.max_requests} may; try again later"
            )
        if self._bytes + num_bytes > limits.max_bytes + reserve(options, MAX_PROBE_BYTES):
            raise QueueFullError(
                f"the queue is full: {self._bytes} bytes of text wait, the request has {num_bytes},"
                f" at most {limits.max_bytes} may wait; try again later"
            )

    def _advance(self, work: _Work) -> None:
        step = work.steps.popleft()
        try:
            self._check_client(work)
            while not step.wait(_CANCEL_CHECK_SECONDS):
                self._check_client(work)
            work.prompts += step.run()
        except (
            BaseException
        ) as error:  # also a panic of the tokenizers library, which is no Exception
            self._leave(work)
            _fail(work, error)
            return
        if work.steps:
            with self._changed:
                self._bytes -= step.num_bytes
                work.bytes_left -= step.num_bytes
                work.bytes_done += step.num_bytes
                # no other thread has to wake up: this one looks for a step next
                self._push(work)
            return
        # not counted here from now on, but in the next queue: counted in both, it might be refused for itself
        self._leave(work)
        try:
            work.accept(Request(tuple(work.prompts), work.options, work.arrival))
        except BaseException as error:
            _fail(work, error)

    def _leave(self, work: _Work) -> None:
        with self._changed:
            self._requests -= 1
            self._bytes -= work.bytes_left

    def _check_client(self, work: _Work) -> None:
        """Raise a `VarlenError` if the answer would be useless."""
        now = self._clock()
        if now > work.options.deadline(work.arrival):
            self._stats.count_refusal("expired")
            raise DeadlineError(f"the deadline passed before {self._work}")
        # the server is not asked for a request that has just come
        if now - work.last_check > _CANCEL_CHECK_SECONDS:
            work.last_check = now
            if _is_cancelled(work.reply):
                raise RequestCancelled("cancelled before it ran")


def _is_cancelled(reply: Reply) -> bool:
    try:
        return reply.is_cancelled()
    except Exception:
        _log.exception("checking for cancellation failed; the request goes on")
        return False


def _fail(work: _Work, error: BaseException) -> None:
    if not isinstance(error, VarlenError):
        _log.error("a request could not be read", exc_info=error)
        error = EngineError(_FAILED)
    try:
        # the reply keeps the error, whose traceback would keep the texts
        work.reply.fail(error.with_traceback(None))
    except Exception:
        _log.exception("sending an error failed")
