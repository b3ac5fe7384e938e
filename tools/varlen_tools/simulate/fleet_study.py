"""Figures of replicas behind a router: a run for each routing, policy and rate."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from varlen.config import EngineConfig
from varlen.errors import DeadlineError, QueueFullError
from varlen_tools.simulate.costs import MakeModel
from varlen_tools.simulate.replicas import FleetOptions, simulate_fleet
from varlen_tools.simulate.routing import Routing
from varlen_tools.simulate.virtual import percentile
from varlen_tools.workloads import Arrival


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Figures of a routing under a load: columns of a CSV file.

    Attributes:
        policy, execution: settings of the engines.
        workers, replicas: number of batches that a replica runs at a time, and number of replicas.
        routing: rule by which the router chooses.
        metrics_age, slow_factor, dead_seconds: see `FleetOptions`.
        autoscale: least and most replicas; empty: their number stays the same.
        offered: requests per second.
        served: answers without an error per second.
        mean, p50, p99: latency of those answers, in seconds.
        utilisation: share of their time in which workers run batches.
        largest_share: largest share of the requests that went to one replica.
        sent_again: requests that a dead replica held.
        longest_wait, replica_seconds, most_replicas: see `FleetRun`.
        refused: requests refused for a full queue or a deadline.
        lost: requests without an answer, or with several.
    """

    policy: str
    execution: str
    workers: int
    replicas: int
    routing: str
    metrics_age: float
    slow_factor: float
    dead_seconds: float
    autoscale: str
    offered: float
    served: float
    mean: float
    p50: float
    p99: float
    utilisation: float
    largest_share: float
    sent_again: int
    longest_wait: float
    replica_seconds: float
    most_replicas: int
    refused: int
    lost: int


@dataclass(frozen=True, slots=True)
class FleetStudy:
    """Runs of several routings and rates that share costs, arrivals and replicas.

    Attributes:
        make_model: makes a cost model for an execution.
        make_arrivals: returns the arrivals of a rate, in requests per second; at least one.
        options: the replicas.
    """

    make_model: MakeModel
    make_arrivals: Callable[[float], Sequence[Arrival]]
    options: FleetOptions

    def measure(self, config: EngineConfig, rate: float, routing: Routing) -> FleetFigures:
        """Return the figures of one run."""
        options, costs = self.options, self.make_model(config.execution)
        run = simulate_fleet(self.make_arrivals(rate), config, costs, options, routing)
        latencies = run.latencies
        return FleetFigures(
            policy=config.policy,
            execution=config.execution,
            workers=options.workers,
            replicas=options.replicas,
            routing=routing.value,
            metrics_age=options.metrics_age,
            slow_factor=options.slow_factor,
            dead_seconds=options.dead_seconds,
            autoscale="" if options.autoscale is None else str(options.autoscale),
            offered=rate,
            served=run.served_per_second,
            mean=fmean(latencies) if latencies else math.nan,
            p50=percentile(latencies, 0.50),
            p99=percentile(latencies, 0.99),
            utilisation=sum(run.busy_seconds) / (options.workers * run.replica_seconds),
            largest_share=max(run.sent) / sum(run.sent),
            sent_again=run.sent_again,
            longest_wait=run.longest_wait,
            replica_seconds=run.replica_seconds,
            most_replicas=run.most_replicas,
            refused=run.refused(QueueFullError, DeadlineError),
            lost=sum(outcome.answers != 1 for outcome in run.outcomes),
        )

    def fewest_within(
        self, config: EngineConfig, rate: float, routing: Routing, *, p99: float
    ) -> int | None:
        """Return the fewest replicas that serve a rate with this p99, in seconds.

        No request is refused. If all replicas of the study are too few, the result is None.
        """

        def sustains(replicas: int) -> bool:
            options = replace(self.options, replicas=replicas)
            result = replace(self, options=options).measure(config, rate, routing)
            return result.p99 <= p99 and result.refused == result.lost == 0

        least = 2 if self.options.dead_seconds else 1
        allowed = range(least, self.options.replicas + 1)
        at = bisect_left(allowed, True, key=sustains)
        return allowed[at] if at < len(allowed) else None
