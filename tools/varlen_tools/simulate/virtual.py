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
from varlen.request.request import Output, Prompt, Request
from varlen.scheduling.engine import Engine, Scheduler
from varlen.scheduling.sequence import Batch, BatchResult, NewWriter
from varlen.telemetry.metrics import Stats
from varlen_tools.workloads import Arrival


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


@dataclass(slots=True)
class _Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class VirtualReply:
    """Notes when the parts of an answer come."""

    outcome: Outcome
    clock: _Clock

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
        self, clock: _Clock, run_batch: Callable[[Batch], BatchResult], workers: int
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

    def complete(self) -> None:
        """Complete the batch that ends next."""
        heappop(self._running).complete()


def play(
    scheduler: Scheduler,
    run_batch: Callable[[Batch], BatchResult],
    arrivals: Sequence[Arrival],
    make_request: Callable[[Arrival], Request],
    workers: int = 1,
    new_writer: NewWriter | None = None,
) -> list[Outcome]:
    """Return the outcome of every arrival, in order, on an engine of its own.

    Args:
        scheduler: new, without requests.
        run_batch: returns the result of a batch, whose seconds pass on the clock.
        arrivals: in order of time.
        make_request: returns the request of an arrival; its reply is a `VirtualReply`.
        workers: number of batches that run at the same time.
        new_writer: of the engine.
    """
    clock = _Clock(arrivals[0].at if arrivals else 0.0)
    executor = _Executor(clock, run_batch, workers)
    engine = Engine(scheduler, executor, Stats(), clock, new_writer)
    outcomes: list[Outcome] = []
    coming = deque(arrivals)
    wake_at: float | None = None
    while True:
        arrival = coming[0].at if coming else math.inf
        wake = math.inf if wake_at is None else wake_at
        clock.now = max(clock.now, min(arrival, executor.end, wake))
        if math.isinf(clock.now):
            return outcomes
        if executor.end <= clock.now:
            executor.complete()
        elif arrival <= clock.now:
            reply = VirtualReply(Outcome(coming.popleft()), clock)
            outcomes.append(reply.outcome)
            try:
                engine.submit(make_request(reply.outcome.arrival), reply)
            except VarlenError as error:
                reply.fail(error)
        wake_at = engine.step()


@lru_cache(maxsize=4096)
def prompt_of(tokens: int) -> Prompt:
    """Return a prompt of this length; its tokens do not matter."""
    return Prompt(np.zeros(tokens, dtype=np.int32))
