"""Policies compared on one stream of arrivals, and the highest rate that each sustains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.costs.model import CostModel
from varlen.errors import DeadlineError, QueueFullError
from varlen_tools.simulate.run import simulate
from varlen_tools.workloads import Arrival

# Makes a new cost model for every run, since a run refines it.
MakeCosts: TypeAlias = Callable[[], CostModel]
# Makes the arrivals of a rate, in requests per second.
MakeArrivals: TypeAlias = Callable[[float], Sequence[Arrival]]

_BISECTIONS = 10
# Share of the offered requests that a sustained rate serves.
LEAST_SERVED = 0.98


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy under one load.

    Attributes:
        policy, execution: of the engine.
        workers: number of batches that run at the same time.
        offered: requests per second.
        served: answers without an error per second.
        mean, p50, p95, p99: latency of those answers, in seconds.
        refused: requests refused for a full queue or a deadline.
        lost: requests without an answer, or with several.
        padding: padding's share of all tokens.
        mean_batch: mean number of sequences per batch.
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


def measure(
    config: EngineConfig,
    make_costs: MakeCosts,
    arrivals: Sequence[Arrival],
    *,
    offered: float,
    workers: int = 1,
) -> PolicyResult:
    """Return the result of a policy; there is at least one arrival."""
    run = simulate(arrivals, config, make_costs(), workers=workers)
    latencies = run.latencies
    tokens = sum(shape.tokens for shape in run.batches)
    return PolicyResult(
        policy=config.policy,
        execution=config.execution,
        workers=workers,
        offered=offered,
        served=run.served_per_second,
        mean=statistics.fmean(latencies) if latencies else float("nan"),
        p50=percentile(latencies, 0.50),
        p95=percentile(latencies, 0.95),
        p99=percentile(latencies, 0.99),
        refused=run.refused(QueueFullError) + run.refused(DeadlineError),
        lost=sum(outcome.answers != 1 for outcome in run.outcomes),
        padding=run.padding / (tokens + run.padding) if tokens else 0.0,
        mean_batch=sum(shape.sequences for shape in run.batches) / max(1, len(run.batches)),
    )


def compare(
    configs: Sequence[EngineConfig],
    make_costs: Callable[[EngineConfig], MakeCosts],
    make_arrivals: MakeArrivals,
    rates: Sequence[float],
    workers: int,
) -> Iterator[PolicyResult]:
    """Yield a result for every rate and configuration; all of them see the same arrivals."""
    for rate in rates:
        arrivals = make_arrivals(rate)
        for config in configs:
            yield measure(config, make_costs(config), arrivals, offered=rate, workers=workers)


def most_within(
    config: EngineConfig,
    make_costs: MakeCosts,
    make_arrivals: MakeArrivals,
    *,
    p99: float,
    upper: float,
    workers: int = 1,
) -> float:
    """Return the highest rate up to `upper` that is served with this p99."""

    def sustains(rate: float) -> bool:
        result = measure(config, make_costs, make_arrivals(rate), offered=rate, workers=workers)
        return result.p99 <= p99 and result.served >= LEAST_SERVED * rate

    return highest(sustains, upper)


def highest(sustains: Callable[[float], bool], upper: float) -> float:
    """Return the highest rate up to `upper` that is sustained; higher ones are not."""
    low, high = 0.0, upper
    if sustains(upper):
        return upper
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low


def full_load(
    costs: CostModel, lengths: Sequence[int], max_sequences: int, *, workers: int = 1
) -> float:
    """Return requests per second in full batches of the mean length: a load of 1."""
    mean = round(statistics.fmean(lengths))
    shape = BatchShape.of([mean] * max_sequences)
    return workers * max_sequences / costs.seconds(shape)


def with_policy(config: EngineConfig, name: str) -> EngineConfig:
    """Return the configuration of `policy` or `policy/execution`.

    Raises:
        ConfigError: there is no such policy or execution.
    """
    policy, _, execution = name.partition("/")
    return replace(config, policy=policy, execution=execution or config.execution)  # type: ignore[arg-type]  # checked there


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value at rank `share * count`; NaN if there are none."""
    if not ascending:
        return float("nan")
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
