"""One simulated run: the real engine and scheduler on a virtual clock.

Only the executor is simulated: a batch ends after its cost, and requests arrive meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.costs.model import CostModel
from varlen.engine import Engine
from varlen.errors import VarlenError
from varlen.metrics import Stats
from varlen.request import Float32Array, Output, Prompt, Request, RequestOptions
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
    clock = _Clock(arrivals[0].at if arrivals else 0.0)
    executor = _Executor(clock, actual or costs)
    admission = Admission(config.max_queued_requests, config.max_queued_tokens, slots=1)
    scheduler = OneShotScheduler(config, costs, admission, config.max_batch_tokens)
    engine = Engine(scheduler, executor, Stats(), clock)
    outcomes: list[Outcome] = []
    coming = deque(arrivals)
    began = clock.now
    wake_at: float | None = None
    while True:
        arrival = coming[0].at if coming else math.inf
        wake = math.inf if wake_at is None else wake_at
        clock.now = max(clock.now, min(arrival, executor.end, wake))
        if math.isinf(clock.now):
            break
        if executor.end <= clock.now:
            executor.complete()
        elif arrival <= clock.now:
            outcomes.append(_submit(engine, coming.popleft(), clock))
        wake_at = engine.step()
    end = max((o.end for o in outcomes if o.end is not None), default=began)
    padding = [b.sequences * b.longest - b.tokens for b in executor.batches]
    is_padded = config.execution == "padded"
    return Run(outcomes, end - began, executor.batches, sum(padding) if is_padded else 0)


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

    def send(self, row: int, output: Output) -> None:
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
        # of the running batch; infinity if none runs
        self.end = math.inf
        self._clock = clock
        self._costs = costs

    def start(self, batch: Batch, completed: Callable[[Batch, BatchResult], None]) -> None:
        self.batches.append(batch.shape)
        seconds = self._costs.seconds(batch.shape)
        result = BatchResult([_NOTHING] * len(batch.sequences), seconds)
        self.end = self._clock.now + seconds
        self._complete = partial(completed, batch, result)

    def complete(self) -> None:
        """Complete the running batch."""
        self.end = math.inf
        self._complete()


def _submit(engine: Engine, arrival: Arrival, clock: _Clock) -> Outcome:
    outcome = Outcome(arrival)
    reply = _Reply(outcome, clock)
    options = RequestOptions(priority=arrival.priority, deadline_seconds=arrival.deadline_seconds)
    request = Request((_prompt(arrival.tokens),) * arrival.rows, options)
    try:
        engine.submit(request, reply)
    except VarlenError as error:
        reply.fail(error)
    return outcome


@lru_cache(maxsize=4096)
def _prompt(tokens: int) -> Prompt:
    return Prompt(np.zeros(tokens, dtype=np.int32))
