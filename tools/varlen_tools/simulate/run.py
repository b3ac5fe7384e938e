"""One simulated run: the real engine and scheduler, arrivals at given times, and a clock that nobody waits for.

The model is the only part that is not real: running a batch moves the clock by what the batch costs, and requests
arrive meanwhile, as they would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.costs.model import CostModel
from varlen.engine import Engine
from varlen.errors import VarlenError
from varlen.metrics import Stats
from varlen.request import Float32Array, Prompt, Request, RequestOptions
from varlen.scheduling.admission import Admission
from varlen.scheduling.scheduler import Scheduler

_NOTHING: Float32Array = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of one sequence.

    Attributes:
        at: when it comes, in seconds.
        tokens: its length.
        priority, deadline_seconds: as in `Request`.
    """

    at: float
    tokens: int
    priority: int = 0
    deadline_seconds: float | None = None


@dataclass(slots=True)
class Outcome:
    """What became of an arrival.

    Attributes:
        arrival: what came.
        end: when it was answered; None if it never was.
        error: what the answer said, if it was an error.
        answers: how many it had.
    """

    arrival: Arrival
    end: float | None = None
    error: VarlenError | None = None
    answers: int = 0

    @property
    def seconds(self) -> float:
        """How long its answer took; only of one that was answered."""
        assert self.end is not None
        return self.end - self.arrival.at


@dataclass(frozen=True, slots=True)
class Run:
    """A whole simulated run.

    Attributes:
        outcomes: of every arrival, in order.
        seconds: from the first arrival to the last answer.
        batches: what ran.
        padding: tokens of padding that ran.
    """

    outcomes: list[Outcome]
    seconds: float
    batches: list[BatchShape]
    padding: int

    @property
    def latencies(self) -> list[float]:
        """Seconds of all that were answered without an error, ascending."""
        return sorted(o.seconds for o in self.outcomes if o.end is not None and o.error is None)

    @property
    def served_per_second(self) -> float:
        """Requests answered without an error in each second of the run."""
        return len(self.latencies) / self.seconds

    def refused(self, kind: type[VarlenError]) -> int:
        """Return how many were answered with this error."""
        return sum(isinstance(outcome.error, kind) for outcome in self.outcomes)


def simulate(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    costs: CostModel,
    *,
    actual: CostModel | None = None,
) -> Run:
    """Return what becomes of arrivals, in order of time, on an engine of this configuration.

    Args:
        costs: what the scheduler believes batches to cost; it refines them.
        actual: what they cost; None if it is right.
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

    def succeed(self, rows: Sequence[Float32Array]) -> None:  # noqa: ARG002  # nobody reads it
        self._answer(None)

    def fail(self, error: Exception) -> None:
        if not isinstance(error, VarlenError):
            raise error
        self._answer(error)

    def _answer(self, error: VarlenError | None) -> None:
        self.outcome.answers += 1
        self.outcome.end, self.outcome.error = self.clock.now, error


class _Simulation:
    """The engine, the world around it, and the model that it runs."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: EngineConfig,
        costs: CostModel,
        actual: CostModel,
    ) -> None:
        self._arrivals = arrivals
        self._actual = actual
        self._clock = _Clock(arrivals[0].at if arrivals else 0.0)
        self._outcomes: list[Outcome] = []
        self._batches: list[BatchShape] = []
        self._scheduler = Scheduler(config, costs, config.max_batch_tokens)
        admission = Admission(config.max_queued_requests, config.max_queued_tokens)
        self._engine = Engine(self, self._scheduler, admission, Stats(), self._clock)

    def complete(self) -> Run:
        """Return the run: all arrivals come, and all that they leave to do is done."""
        began = self._clock.now
        start: float | None = None
        while start is not None or len(self._outcomes) < len(self._arrivals):
            self._wait(start)
            start = self._engine.step()
        padding = sum(map(self._scheduler.padding, self._batches))
        return Run(self._outcomes, self._clock.now - began, self._batches, padding)

    def run(self, prompts: list[Prompt], options: list[RequestOptions]) -> list[Float32Array]:  # noqa: ARG002
        """Run a batch, as the engine asks its model to: requests arrive while it runs."""
        shape = BatchShape.of([prompt.num_tokens for prompt in prompts])
        self._batches.append(shape)
        self._pass_time(self._clock.now + self._actual.seconds(shape))
        return [_NOTHING] * len(prompts)

    def _wait(self, start: float | None) -> None:
        """Let time pass to the next arrival, or to the start of the next batch if that is sooner."""
        coming = self._arrivals[len(self._outcomes)].at if self._is_more_to_come else math.inf
        self._pass_time(coming if start is None else min(coming, start))

    @property
    def _is_more_to_come(self) -> bool:
        return len(self._outcomes) < len(self._arrivals)

    def _pass_time(self, until: float) -> None:
        while self._is_more_to_come and self._arrivals[len(self._outcomes)].at <= until:
            arrival = self._arrivals[len(self._outcomes)]
            self._clock.now = max(self._clock.now, arrival.at)
            self._submit(arrival)
        self._clock.now = max(self._clock.now, until)

    def _submit(self, arrival: Arrival) -> None:
        outcome = Outcome(arrival)
        self._outcomes.append(outcome)
        reply = _Reply(outcome, self._clock)
        request = Request(
            (_sequence(arrival.tokens),),
            RequestOptions(priority=arrival.priority, deadline_seconds=arrival.deadline_seconds),
        )
        try:
            self._engine.submit(request, reply)
        except VarlenError as error:
            reply.fail(error)


@lru_cache(maxsize=4096)
def _sequence(tokens: int) -> Prompt:
    return Prompt(np.zeros(tokens, dtype=np.int32))
