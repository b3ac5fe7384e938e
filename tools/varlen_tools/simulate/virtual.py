"""A virtual clock, and an engine that runs arrivals on it.

Only the executor is simulated: each worker ends a batch after its seconds, and requests arrive meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np

from varlen.errors import VarlenError
from varlen.request.generation import GenerationOptions
from varlen.request.request import Output, Prompt, Request, RequestOptions
from varlen.scheduling.batch import Batch, BatchResult
from varlen.scheduling.engine import Engine, Scheduler
from varlen.scheduling.sequence import NewWriter
from varlen.telemetry.metrics import Stats
from varlen_tools.workloads import Arrival

# Share of the offered requests that a sustained rate serves.
LEAST_SERVED = 0.98
_BISECTIONS = 10


@dataclass(slots=True)
class Outcome:
    """The result of an arrival.

    Attributes:
        arrival: the request.
        sent: times of the parts of its answer, in order.
        end: time of its answer; None without one.
        error: the answer, if it is an error.
        answers: number of answers.
    """

    arrival: Arrival
    sent: list[float] = field(default_factory=list)
    end: float | None = None
    error: VarlenError | None = None
    answers: int = 0

    @property
    def seconds(self) -> float:
        """Latency, of an answered request."""
        assert self.end is not None
        return self.end - self.arrival.at


@dataclass(frozen=True, slots=True)
class Run:
    """A whole simulated run.

    Attributes:
        outcomes: outcome of every arrival, in order.
    """

    outcomes: list[Outcome]

    @property
    def answered(self) -> list[Outcome]:
        """Outcomes of requests that were answered without an error."""
        return [each for each in self.outcomes if each.end is not None and each.error is None]

    @property
    def latencies(self) -> list[float]:
        """Latencies of answers without an error, ascending."""
        return sorted(outcome.seconds for outcome in self.answered)

    @property
    def served_per_second(self) -> float:
        """Answers without an error per second, from the first arrival to the last answer."""
        began = self.outcomes[0].arrival.at
        end = max((each.end for each in self.outcomes if each.end is not None), default=began)
        return len(self.answered) / (end - began)

    def refused(self, *kinds: type[VarlenError]) -> int:
        """Return the number of requests answered with one of these errors."""
        return sum(isinstance(outcome.error, kinds) for outcome in self.outcomes)


@dataclass(slots=True)
class VirtualClock:
    """A clock whose time is set.

    Attributes:
        now: time in seconds.
    """

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class VirtualReply:
    """Notes when the parts of an answer come.

    Attributes:
        outcome: result that is written here.
        clock: the time.
        on_answer: called after the answer.
    """

    outcome: Outcome
    clock: VirtualClock
    on_answer: Callable[[], None] | None = None

    def is_cancelled(self) -> bool:
        """Return False: every client waits."""
        return False

    def send(self, row: int, output: Output) -> None:  # noqa: ARG002  # only the time counts
        """Note the time of a part."""
        self.outcome.sent.append(self.clock.now)

    def finish(self) -> None:
        """Note the time of the answer."""
        self._answer(None)

    def fail(self, error: Exception) -> None:
        """Note the error; raise what is no error of a request."""
        if not isinstance(error, VarlenError):
            raise error
        self._answer(error)

    def _answer(self, error: VarlenError | None) -> None:
        self.outcome.answers += 1
        self.outcome.end, self.outcome.error = self.clock.now, error
        if self.on_answer is not None:
            self.on_answer()


class _Running(NamedTuple):
    """A running batch: when it ends, its number, and what completes it."""

    end: float
    number: int
    complete: Callable[[], None]


class _Executor:
    """Workers that run one batch each, on the virtual clock."""

    def __init__(
        self, clock: VirtualClock, run_batch: Callable[[Batch], BatchResult], workers: int
    ) -> None:
        self.slots = workers
        self._clock = clock
        self._run_batch = run_batch
        self._numbers = count()
        self._running: list[_Running] = []

    @property
    def end(self) -> float:
        """Time at which the next batch ends; infinity if none runs."""
        return self._running[0].end if self._running else math.inf

    @property
    def seconds_left(self) -> float:
        """Seconds until each running batch ends, summed."""
        return sum(running.end - self._clock.now for running in self._running)

    def start(self, batch: Batch, completed: Callable[[Batch, BatchResult], None]) -> None:
        result = self._run_batch(batch)
        end, complete = self._clock.now + result.seconds, partial(completed, batch, result)
        heappush(self._running, _Running(end, next(self._numbers), complete))

    def free_at(self) -> float:
        """Return minus infinity: where a slot is free, its worker is."""
        return -math.inf

    def collect(self, timeout: float | None) -> bool:  # noqa: ARG002  # of every executor
        """Return False: `complete` does it."""
        return False

    def complete(self) -> None:
        """Complete the batch that ends next."""
        heappop(self._running).complete()


class VirtualEngine:
    """An engine whose batches end on a virtual clock."""

    def __init__(
        self,
        clock: VirtualClock,
        scheduler: Scheduler,
        run_batch: Callable[[Batch], BatchResult],
        *,
        workers: int = 1,
        new_writer: NewWriter | None = None,
    ) -> None:
        """Make an idle engine; the arguments are described at `play`."""
        self._clock = clock
        self._executor = _Executor(clock, run_batch, workers)
        self._engine = Engine(scheduler, self._executor, Stats(), clock, new_writer)
        self._wake_at: float | None = None

    @property
    def batch_end(self) -> float:
        """Time at which the next batch ends; infinity if none runs."""
        return self._executor.end

    @property
    def due(self) -> float:
        """Time of the next batch end or batch start; infinity without requests."""
        return min(self.batch_end, math.inf if self._wake_at is None else self._wake_at)

    @property
    def seconds_left(self) -> float:
        """Seconds until each running batch ends, summed."""
        return self._executor.seconds_left

    def submit(self, request: Request, reply: VirtualReply) -> None:
        """Queue a request, or answer it with an error, and start batches."""
        try:
            self._engine.submit(request, reply)
        except VarlenError as error:
            reply.fail(error)
        self._wake_at = self._engine.step()

    def advance(self) -> None:
        """Complete a batch that has ended, and start batches."""
        if self._executor.end <= self._clock.now:
            self._executor.complete()
        self._wake_at = self._engine.step()


def play(
    scheduler: Scheduler,
    run_batch: Callable[[Batch], BatchResult],
    arrivals: Sequence[Arrival],
    *,
    generation: Callable[[Arrival], GenerationOptions] | None = None,
    workers: int = 1,
    new_writer: NewWriter | None = None,
) -> list[Outcome]:
    """Return the outcome of every arrival, in order, on an engine of its own.

    Args:
        scheduler: new, without requests.
        run_batch: returns the result of a batch, whose seconds pass on the clock.
        arrivals: requests in order of time.
        generation: returns the options of an arrival that generates; its reply is a `VirtualReply`.
        workers: number of batches that run at the same time.
        new_writer: maker of writers for the engine.
    """
    clock = VirtualClock(arrivals[0].at if arrivals else 0.0)
    engine = VirtualEngine(clock, scheduler, run_batch, workers=workers, new_writer=new_writer)
    outcomes: list[Outcome] = []
    coming = deque(arrivals)
    while True:
        arrival = coming[0].at if coming else math.inf
        clock.now = max(clock.now, min(arrival, engine.due))
        if math.isinf(clock.now):
            return outcomes
        if arrival <= clock.now < engine.batch_end:
            outcomes.append(Outcome(coming.popleft()))
            reply = VirtualReply(outcomes[-1], clock)
            engine.submit(request_of(reply.outcome.arrival, generation), reply)
        else:
            engine.advance()


def request_of(
    arrival: Arrival, generation: Callable[[Arrival], GenerationOptions] | None = None
) -> Request:
    """Return the request of an arrival; `generation` returns its options if it generates."""
    options = RequestOptions(
        priority=arrival.priority,
        deadline_seconds=arrival.deadline_seconds,
        generation=generation(arrival) if generation is not None else None,
        streams=generation is not None,
    )
    return Request((_prompt(arrival.tokens),) * arrival.rows, options)


@lru_cache(maxsize=4096)
def _prompt(tokens: int) -> Prompt:
    """Return a prompt of this length; its tokens do not matter."""
    return Prompt(np.zeros(tokens, dtype=np.int32))


def highest(sustains: Callable[[float], bool], upper: float) -> float:
    """Return the highest rate up to `upper` that is sustained; higher ones are not."""
    low, high = 0.0, upper
    if sustains(upper):
        return upper
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value at rank `share * count`; NaN if there are none."""
    if not ascending:
        return math.nan
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
