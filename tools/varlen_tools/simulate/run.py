"""One simulated run: the real engine and scheduler on a virtual clock.

Only the executor is simulated: a batch ends after its cost, and requests arrive meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.costs.model import CostModel
from varlen.engine import Engine
from varlen.errors import VarlenError
from varlen.metrics import Stats
from varlen.request import Float32Array, Prompt, Request, RequestOptions
from varlen.scheduling.admission import Admission
from varlen.scheduling.one_shot import OneShotScheduler
from varlen.sequence import Batch, BatchResult
from varlen_tools.workloads import Arrival

_NOTHING: Float32Array = np.zeros(0, dtype=np.float32)


@dataclass(slots=True)
class Outcome:
    """The result of an arrival.

    Attributes:
        arrival: the request.
        end: time of its answer; None without one.
        error: the answer, if it is an error.
        answers: number of answers.
    """

    arrival: Arrival
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
        outcomes: of every arrival, in order.
        seconds: from the first arrival to the last answer.
        batches: in the order in which they started.
        padding: number of padding tokens in all batches.
    """

    outcomes: list[Outcome]
    seconds: float
    batches: list[BatchShape]
    padding: int

    @property
    def latencies(self) -> list[float]:
        """Latencies of answers without an error, ascending."""
        return sorted(o.seconds for o in self.outcomes if o.end is not None and o.error is None)

    @property
    def served_per_second(self) -> float:
        """Answers without an error per second of the run."""
        return len(self.latencies) / self.seconds

    def refused(self, kind: type[VarlenError]) -> int:
        """Return the number of requests answered with this error."""
        return sum(isinstance(outcome.error, kind) for outcome in self.outcomes)


def simulate(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    costs: CostModel,
    *,
    actual: CostModel | None = None,
) -> Run:
    """Return the run of an engine over arrivals, which are in order of time.

    Args:
        costs: the scheduler's cost model, which it refines.
        actual: the real costs; None if the scheduler's are right.
    """
    return _Simulation(arrivals, config, costs, actual or costs).complete()


@dataclass(slots=True)
class _Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class _Reply:
    outcome: Outcome
    clock: _Clock

    def is_cancelled(self) -> bool:
        return False

    def send(self, row: int, output: Float32Array) -> None:
        pass

    def finish(self) -> None:
        self._answer(None)

    def fail(self, error: Exception) -> None:
        if not isinstance(error, VarlenError):
            raise error
        self._answer(error)

    def _answer(self, error: VarlenError | None) -> None:
        self.outcome.answers += 1
        self.outcome.end, self.outcome.error = self.clock.now, error


class _Executor:
    """Ends each batch after its cost, on the virtual clock."""

    slots = 1

    def __init__(self, clock: _Clock, costs: CostModel) -> None:
        self.batches: list[BatchShape] = []
        self._clock = clock
        self._costs = costs
        # (end, number, callback)
        self._running: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def next_end(self) -> float:
        """Time at which the next batch ends; infinity if none runs."""
        return self._running[0][0] if self._running else math.inf

    def start(self, batch: Batch, completed: Callable[[Batch, BatchResult], None]) -> None:
        self.batches.append(batch.shape)
        seconds = self._costs.seconds(batch.shape)
        result = BatchResult([_NOTHING] * len(batch.sequences), seconds)
        end = self._clock.now + seconds
        heappush(self._running, (end, len(self.batches), lambda: completed(batch, result)))

    def complete_next(self) -> None:
        """Complete the batch that ends first."""
        heappop(self._running)[2]()


class _Simulation:
    """The engine, its arrivals and its executor."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: EngineConfig,
        costs: CostModel,
        actual: CostModel,
    ) -> None:
        self._arrivals = arrivals
        self._is_padded = config.execution == "padded"
        self._clock = _Clock(arrivals[0].at if arrivals else 0.0)
        self._outcomes: list[Outcome] = []
        self._executor = _Executor(self._clock, actual)
        admission = Admission(config.max_queued_requests, config.max_queued_tokens, slots=1)
        scheduler = OneShotScheduler(config, costs, admission, config.max_batch_tokens)
        self._engine = Engine(scheduler, self._executor, Stats(), self._clock)

    def complete(self) -> Run:
        """Return the run once every request is answered."""
        began = self._clock.now
        wake_at: float | None = None
        while True:
            arrival = self._next_arrival.at if self._next_arrival else math.inf
            wake = math.inf if wake_at is None else wake_at
            self._clock.now = max(self._clock.now, min(arrival, self._executor.next_end, wake))
            if math.isinf(self._clock.now):
                break
            if self._executor.next_end <= self._clock.now:
                self._executor.complete_next()
            elif self._next_arrival and arrival <= self._clock.now:
                self._submit(self._next_arrival)
            wake_at = self._engine.step()
        batches = self._executor.batches
        padding = [b.sequences * b.longest - b.tokens for b in batches if self._is_padded]
        end = max((o.end for o in self._outcomes if o.end is not None), default=began)
        return Run(self._outcomes, end - began, batches, sum(padding))

    @property
    def _next_arrival(self) -> Arrival | None:
        coming = len(self._outcomes)
        return self._arrivals[coming] if coming < len(self._arrivals) else None

    def _submit(self, arrival: Arrival) -> None:
        outcome = Outcome(arrival)
        self._outcomes.append(outcome)
        reply = _Reply(outcome, self._clock)
        deadline = arrival.deadline_seconds
        options = RequestOptions(priority=arrival.priority, deadline_seconds=deadline)
        request = Request((_prompt(arrival.tokens),) * arrival.rows, options)
        try:
            self._engine.submit(request, reply)
        except VarlenError as error:
            reply.fail(error)


@lru_cache(maxsize=4096)
def _prompt(tokens: int) -> Prompt:
    return Prompt(np.zeros(tokens, dtype=np.int32))
