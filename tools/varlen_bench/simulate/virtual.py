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
from varlen.scheduling.batch import Batch, BatchResult, NewWriter
from varlen.scheduling.engine import Engine, Scheduler
from varlen.telemetry.metrics import Stats
from varlen_bench.workloads import Arrival

# Share of the offered requests that a sustained rate serves.
LEAST_SERVED = 0.98
_BISECTIONS = 10


@dataclass(slots=True)
class Outcome:
    """The result of an arrival, with the times of its parts and of its end."""

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
    """A simulated run, with the outcome of every arrival in order."""

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
    """A clock whose time in seconds is set."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class VirtualReply:
    """Notes when the parts of an answer come, in its outcome."""

    outcome: Outcome
    clock: VirtualClock

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
        run_batch: returns the result of a batch, whose seconds pass on the clock.
        arrivals: requests in order of time.
        generation: returns the options of an arrival that generates; its reply is a `VirtualReply`.
    """
    clock = VirtualClock(arrivals[0].at if arrivals else 0.0)
    executor = _Executor(clock, run_batch, workers)
    engine = Engine(scheduler, executor, Stats(), clock, new_writer)
    outcomes: list[Outcome] = []
    coming = deque(arrivals)
    wake_at: float | None = None
    while True:
        arrival = coming[0].at if coming else math.inf
        due = min(executor.end, math.inf if wake_at is None else wake_at)
        clock.now = max(clock.now, min(arrival, due))
        if math.isinf(clock.now):
            return outcomes
        if arrival <= clock.now < executor.end:
            outcomes.append(Outcome(coming.popleft()))
            reply = VirtualReply(outcomes[-1], clock)
            try:
                engine.submit(_request(reply.outcome.arrival, generation), reply)
            except VarlenError as error:
                reply.fail(error)
        elif executor.end <= clock.now:
            executor.complete()
        wake_at = engine.step()


def _request(
    arrival: Arrival, generation: Callable[[Arrival], GenerationOptions] | None
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
