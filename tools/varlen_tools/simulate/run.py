"""One simulated run: the real engine and scheduler on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.costs.model import CostModel
from varlen.errors import VarlenError
from varlen.request.request import Float32Array, Request, RequestOptions
from varlen.scheduling.admission import Admission
from varlen.scheduling.one_shot import OneShotScheduler
from varlen.scheduling.sequence import Batch, BatchResult
from varlen_tools.simulate.virtual import Outcome, play, prompt_of
from varlen_tools.workloads import Arrival

_NOTHING: Float32Array = np.zeros(0, dtype=np.float32)


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
    actual: Callable[[BatchShape], float] | None = None,
    workers: int = 1,
) -> Run:
    """Return the run of an engine over arrivals, which are in order of time.

    Args:
        costs: the scheduler's cost model, which it refines.
        actual: returns the real seconds of a batch; None if the scheduler's costs are right.
        workers: number of batches that run at the same time.
    """
    batches: list[BatchShape] = []

    def run_batch(batch: Batch) -> BatchResult:
        batches.append(batch.shape)
        seconds = (actual or costs.seconds)(batch.shape)
        return BatchResult([_NOTHING] * len(batch.sequences), seconds)

    admission = Admission(config.max_queued_requests, config.max_queued_tokens, slots=workers)
    scheduler = OneShotScheduler(config, costs, admission, config.max_batch_tokens)
    outcomes = play(scheduler, run_batch, arrivals, _request, workers)
    began = arrivals[0].at if arrivals else 0.0
    end = max((o.end for o in outcomes if o.end is not None), default=began)
    padding = [b.sequences * b.longest - b.tokens for b in batches]
    is_padded = config.execution == "padded"
    return Run(outcomes, end - began, batches, sum(padding) if is_padded else 0)


def _request(arrival: Arrival) -> Request:
    options = RequestOptions(priority=arrival.priority, deadline_seconds=arrival.deadline_seconds)
    return Request((prompt_of(arrival.tokens),) * arrival.rows, options)
