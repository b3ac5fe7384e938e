"""Simulated batches: the one-shot scheduler on a virtual clock, and its policies under load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from varlen.config import NO_LIMIT, EngineConfig
from varlen.costs.model import BatchShape, CostModel
from varlen.errors import DeadlineError, QueueFullError
from varlen.request.request import Float32Array
from varlen.scheduling.admission import Admission
from varlen.scheduling.batch import Batch, BatchResult
from varlen.scheduling.one_shot.one_shot import OneShotScheduler
from varlen_bench.simulate.costs import MakeModel
from varlen_bench.simulate.virtual import LEAST_SERVED, Run, highest, percentile, play
from varlen_bench.workloads import Arrival

_NOTHING: Float32Array = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class BatchRun(Run):
    """A run of the one-shot scheduler."""

    batches: list[BatchShape]


def simulate(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    costs: CostModel,
    *,
    actual: Callable[[BatchShape], float] | None = None,
    workers: int = 1,
) -> BatchRun:
    """Return the run of an engine over arrivals, which are in order of time.

    Args:
        costs: the scheduler's cost model, which it refines.
        actual: returns the real seconds of a batch; None if the scheduler's costs are right.
    """
    batches: list[BatchShape] = []

    def run_batch(batch: Batch) -> BatchResult:
        batches.append(batch.shape)
        seconds = (actual or costs.seconds)(batch.shape)
        return BatchResult([_NOTHING] * len(batch.sequences), seconds)

    admission = Admission(
        config.max_queued_requests, config.max_queued_tokens or NO_LIMIT, slots=workers
    )
    scheduler = OneShotScheduler(config, costs, admission, config.max_batch_tokens)
    return BatchRun(play(scheduler, run_batch, arrivals, workers=workers), batches)


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Figures of a policy under a load: columns of a CSV file.

    Attributes:
        offered: requests per second.
        served: answers without an error per second.
        mean, p50, p95, p99: latency of those answers, in seconds.
        refused: requests refused for a full queue or a deadline.
        lost: requests without an answer, or with several.
        padding: padding's share of all tokens.
    """

    policy: str
    execution: str
    workers: int
    offered: float
    served: float
    mean: float
    p50: float
    p95: float
    p99: float
    refused: int
    lost: int
    padding: float
    mean_batch: float


@dataclass(frozen=True, slots=True)
class BatchStudy:
    """Runs of several policies and rates that share costs and arrivals.

    Attributes:
        make_model: makes a new cost model for every run, since a run refines it.
        make_arrivals: returns the arrivals of a rate, in requests per second; at least one.
    """

    make_model: MakeModel
    make_arrivals: Callable[[float], Sequence[Arrival]]
    workers: int = 1

    def measure(self, config: EngineConfig, rate: float) -> BatchFigures:
        """Return the figures of one run."""
        costs = self.make_model(config.execution)
        run = simulate(self.make_arrivals(rate), config, costs, workers=self.workers)
        latencies = run.latencies
        tokens, padding = sum(shape.tokens for shape in run.batches), 0
        if config.execution == "padded":
            padding = sum(shape.sequences * shape.longest for shape in run.batches) - tokens
        return BatchFigures(
            policy=config.policy,
            execution=config.execution,
            workers=self.workers,
            offered=rate,
            served=run.served_per_second,
            mean=fmean(latencies) if latencies else math.nan,
            p50=percentile(latencies, 0.50),
            p95=percentile(latencies, 0.95),
            p99=percentile(latencies, 0.99),
            refused=run.refused(QueueFullError, DeadlineError),
            lost=sum(outcome.answers != 1 for outcome in run.outcomes),
            padding=padding / (tokens + padding) if tokens else 0.0,
            mean_batch=sum(shape.sequences for shape in run.batches) / max(1, len(run.batches)),
        )

    def most_within(self, config: EngineConfig, *, p99: float, upper: float) -> float:
        """Return the highest rate up to `upper` that is served with this p99, in seconds."""

        def sustains(rate: float) -> bool:
            result = self.measure(config, rate)
            return result.p99 <= p99 and result.served >= LEAST_SERVED * rate

        return highest(sustains, upper)


def full_load(
    costs: CostModel, lengths: Sequence[int], max_sequences: int, *, workers: int = 1
) -> float:
    """Return requests per second in full batches of the mean length: a load of 1."""
    shape = BatchShape.of([round(fmean(lengths))] * max_sequences)
    return workers * max_sequences / costs.seconds(shape)


def with_policy(config: EngineConfig, name: str) -> EngineConfig:
    """Return the configuration of `policy` or `policy/execution`.

    Raises:
        ConfigError: there is no such policy or execution.
    """
    policy, _, execution = name.partition("/")
    return replace(config, policy=policy, execution=execution or config.execution)  # type: ignore[arg-type]  # checked there
