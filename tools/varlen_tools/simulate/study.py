"""Policies compared on one stream of arrivals, and the most that each bears."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.costs.model import CostModel
from varlen.errors import DeadlineError, QueueFullError
from varlen_tools.simulate.run import Run, simulate
from varlen_tools.workloads import Arrival

# A new table for every run, since a run refines it.
MakeCosts: TypeAlias = Callable[[], CostModel]
# Arrivals at so many requests a second.
MakeArrivals: TypeAlias = Callable[[float], Sequence[Arrival]]

_BISECTIONS = 10
# Served of what was offered, where a rate is called sustained.
_LEAST_SERVED = 0.98


@dataclass(frozen=True, slots=True)
class Point:
    """One policy under one load.

    Attributes:
        policy, execution: of the engine.
        offered: requests a second.
        served: answers a second, without errors.
        mean, p50, p95, p99: latency of those answers, in seconds.
        refused: requests that were, for a full queue or a deadline.
        lost: requests that were answered never, or twice.
        padding: of all tokens that ran, the share that was padding.
        mean_batch: sequences in a batch.
    """

    policy: str
    execution: str
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
    config: EngineConfig, make_costs: MakeCosts, arrivals: Sequence[Arrival], offered: float
) -> Point:
    """Return what a policy makes of arrivals.

    Raises:
        ValueError: there are none.
    """
    if not arrivals:
        raise ValueError("no request arrives")
    run = simulate(arrivals, config, make_costs())
    latencies = run.latencies
    tokens = sum(shape.tokens for shape in run.batches)
    return Point(
        policy=config.policy,
        execution=config.execution,
        offered=offered,
        served=run.served_per_second,
        mean=statistics.fmean(latencies) if latencies else float("nan"),
        p50=percentile(latencies, 0.50),
        p95=percentile(latencies, 0.95),
        p99=percentile(latencies, 0.99),
        refused=run.refused(QueueFullError) + run.refused(DeadlineError),
        lost=_lost(run),
        padding=run.padding / (tokens + run.padding) if tokens else 0.0,
        mean_batch=_mean_batch(run.batches),
    )


def compare(
    configs: Sequence[EngineConfig],
    make_costs: Callable[[EngineConfig], MakeCosts],
    make_arrivals: MakeArrivals,
    rates: Sequence[float],
) -> Iterator[Point]:
    """Yield a point for every rate and configuration; all of them see the same arrivals."""
    for rate in rates:
        arrivals = make_arrivals(rate)
        for config in configs:
            yield measure(config, make_costs(config), arrivals, rate)


def most_within(
    config: EngineConfig,
    make_costs: MakeCosts,
    make_arrivals: MakeArrivals,
    *,
    p99: float,
    upper: float,
) -> float:
    """Return the most requests a second that are served with this p99 latency, by bisection; 0 if none are.

    Args:
        p99: in seconds.
        upper: a rate that is too much, or the most that is asked about.
    """

    def bears(rate: float) -> bool:
        point = measure(config, make_costs, make_arrivals(rate), rate)
        return point.p99 <= p99 and point.served >= _LEAST_SERVED * rate

    low, high = 0.0, upper
    if bears(upper):
        return upper
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if bears(middle) else (low, middle)
    return low


def full_load(costs: CostModel, lengths: Sequence[int], max_sequences: int) -> float:
    """Return the requests a second that full batches of sequences of the mean length would serve: a load of 1."""
    mean = round(statistics.fmean(lengths))
    shape = BatchShape.of([mean] * max_sequences)
    return max_sequences / costs.seconds(shape)


def with_policy(config: EngineConfig, name: str) -> EngineConfig:
    """Return the configuration of `policy` or `policy/execution`.

    Raises:
        ConfigError: there is no such policy or execution.
    """
    policy, _, execution = name.partition("/")
    return replace(config, policy=policy, execution=execution or config.execution)  # type: ignore[arg-type]  # checked there


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value below which this share of them lies; NaN of none."""
    if not ascending:
        return float("nan")
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def _lost(run: Run) -> int:
    return sum(outcome.answers != 1 for outcome in run.outcomes)


def _mean_batch(batches: Sequence[BatchShape]) -> float:
    return statistics.fmean(shape.sequences for shape in batches) if batches else 0.0
