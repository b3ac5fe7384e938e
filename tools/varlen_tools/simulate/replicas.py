"""Replicas behind a router: an engine each, with the events of one virtual clock.

A replica that dies loses its queue and its running batches; the router sends their requests again to other replicas.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from itertools import count
from statistics import fmean

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.model import CostModel
from varlen.errors import DeadlineError, QueueFullError
from varlen.request.request import Float32Array
from varlen.scheduling.admission import Admission
from varlen.scheduling.batch import Batch, BatchResult
from varlen.scheduling.one_shot import OneShotScheduler
from varlen_tools.simulate.costs import MakeModel
from varlen_tools.simulate.routing import Counts, ReplicaLoads, Routing, new_router
from varlen_tools.simulate.virtual import (
    Outcome,
    Run,
    VirtualClock,
    VirtualEngine,
    VirtualReply,
    percentile,
    request_of,
)
from varlen_tools.workloads import Arrival

_NOTHING: Float32Array = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Replicas, and how requests reach them.

    Attributes:
        replicas: number of replicas.
        workers: number of batches that each runs at the same time.
        metrics_age: greatest age of the queued tokens that a router reads, in seconds.
        slow_factor: seconds of a batch on the first replica over the seconds on another one.
        dead_seconds: seconds from the middle arrival on in which the last replica is dead.
        seed: seed of the router's random choices.
    """

    replicas: int
    workers: int = 1
    metrics_age: float = 0.5
    slow_factor: float = 1.0
    dead_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dead_seconds and self.replicas < 2:
            raise ValueError("--dead-seconds needs at least 2 replicas")


@dataclass(frozen=True, slots=True)
class FleetRun(Run):
    """A run of several replicas.

    Attributes:
        sent: number of requests sent to each replica, with those sent again.
        busy_seconds: seconds of workers in which each replica ran batches.
        sent_again: number of requests that a dead replica held.
    """

    sent: list[int]
    busy_seconds: list[float]
    sent_again: int


class _Rank(IntEnum):
    """Order of events at the same time."""

    batch = 0
    arrival = 1
    other = 2


class _Events:
    """Actions at times of a virtual clock, in order."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._numbers = count()
        self._queue: list[tuple[float, _Rank, int, Callable[[], None]]] = []

    def add(self, at: float, rank: _Rank, action: Callable[[], None]) -> None:
        heappush(self._queue, (at, rank, next(self._numbers), action))

    def run(self) -> None:
        """Run all actions, also those that actions add."""
        while self._queue:
            at, _, _, action = heappop(self._queue)
            self._clock.now = max(self._clock.now, at)
            action()


@dataclass(slots=True)
class _Replica:
    """A replica; a new engine and scheduler take the place of dead ones.

    Attributes:
        engine, admission: engine, and counts of its waiting work.
        open: requests sent and not answered, by their number.
        sent, busy_seconds: see `FleetRun`.
        next_event: time and rank of its next event in the queue; None without one.
    """

    engine: VirtualEngine
    admission: Admission
    open: dict[int, Outcome] = field(default_factory=dict)
    sent: int = 0
    busy_seconds: float = 0.0
    next_event: tuple[float, _Rank] | None = None


class _Fleet:
    """One run of the replicas of `options`."""

    def __init__(
        self, options: FleetOptions, config: EngineConfig, costs: CostModel, routing: Routing
    ) -> None:
        self._options = options
        self._config = config
        self._costs = costs
        self._clock = VirtualClock()
        self._events = _Events(self._clock)
        self._outcomes: list[Outcome] = []
        self._sent_again = 0
        self._replicas = [_Replica(*self._new_engine(number)) for number in range(options.replicas)]
        self._scraped_at = -math.inf
        self._scraped: Counts = np.zeros(options.replicas, dtype=np.int64)
        self._loads = ReplicaLoads(
            is_up=np.ones(options.replicas, dtype=np.bool_),
            open_requests=np.zeros(options.replicas, dtype=np.int64),
            queued_tokens=self._queued_tokens,
        )
        self._route = new_router(routing, self._loads, options.seed)

    def run(self, arrivals: Sequence[Arrival]) -> FleetRun:
        """Return the run over at least one arrival, in order of time."""
        self._clock.now = arrivals[0].at
        if self._options.dead_seconds:
            at, last = arrivals[len(arrivals) // 2].at, self._options.replicas - 1
            self._events.add(at, _Rank.other, partial(self._die, last))
            back = partial(self._come_back, last)
            self._events.add(at + self._options.dead_seconds, _Rank.other, back)
        self._expect(iter(arrivals).__next__)
        self._events.run()
        sent = [replica.sent for replica in self._replicas]
        busy_seconds = [replica.busy_seconds for replica in self._replicas]
        return FleetRun(self._outcomes, sent, busy_seconds, self._sent_again)

    def _expect(self, following: Callable[[], Arrival]) -> None:
        """Add the event of the next arrival, if there is one."""
        try:
            arrival = following()
        except StopIteration:
            return
        self._events.add(arrival.at, _Rank.arrival, partial(self._arrive, arrival, following))

    def _arrive(self, arrival: Arrival, following: Callable[[], Arrival]) -> None:
        self._outcomes.append(Outcome(arrival))
        self._send(len(self._outcomes) - 1)
        self._expect(following)

    def _send(self, request: int) -> None:
        """Send a request to the replica that the router chooses."""
        outcome, number = self._outcomes[request], self._route()
        arrival, replica = outcome.arrival, self._replicas[number]
        if arrival.deadline_seconds is not None:
            # the client has waited since it sent the request first
            waited = self._clock.now - arrival.at
            arrival = replace(arrival, deadline_seconds=arrival.deadline_seconds - waited)
        replica.sent += 1
        replica.open[request] = outcome
        self._loads.open_requests[number] += 1
        reply = VirtualReply(outcome, self._clock, partial(self._answered, number, request))
        replica.engine.submit(request_of(arrival), reply)
        self._schedule(number)

    def _answered(self, number: int, request: int) -> None:
        del self._replicas[number].open[request]
        self._loads.open_requests[number] -= 1

    def _schedule(self, number: int) -> None:
        """Add the next event of a replica, unless it is in the queue."""
        replica = self._replicas[number]
        at = replica.engine.due
        rank = _Rank.batch if replica.engine.batch_end == at else _Rank.other
        event = (at, rank) if at < math.inf else None
        if event is not None and event != replica.next_event:
            self._events.add(at, rank, partial(self._advance, number, replica.engine, event))
        replica.next_event = event

    def _advance(self, number: int, engine: VirtualEngine, event: tuple[float, _Rank]) -> None:
        replica = self._replicas[number]
        # otherwise an earlier event came in between, or the engine has died
        if replica.engine is engine and replica.next_event == event:
            replica.next_event = None
            engine.advance()
            self._schedule(number)

    def _die(self, number: int) -> None:
        """Drop the engine of a replica, and send its open requests to other replicas."""
        replica = self._replicas[number]
        replica.busy_seconds -= replica.engine.seconds_left
        lost, replica.open = replica.open, {}
        replica.engine, replica.admission = self._new_engine(number)
        replica.next_event = None
        self._loads.is_up[number] = False
        self._loads.open_requests[number] = 0
        self._sent_again += len(lost)
        for request in lost:
            self._send(request)

    def _come_back(self, number: int) -> None:
        self._loads.is_up[number] = True

    def _new_engine(self, number: int) -> tuple[VirtualEngine, Admission]:
        config, workers = self._config, self._options.workers
        limits = config.max_queued_requests, config.max_queued_tokens
        admission = Admission(*limits, slots=workers)
        # each replica refines its own costs
        costs = deepcopy(self._costs)
        scheduler = OneShotScheduler(config, costs, admission, config.max_batch_tokens)
        run_batch = partial(self._run_batch, number)
        return VirtualEngine(self._clock, scheduler, run_batch, workers=workers), admission

    def _run_batch(self, number: int, batch: Batch) -> BatchResult:
        factor = self._options.slow_factor if number == 0 else 1.0
        seconds = factor * self._costs.seconds(batch.shape)
        self._replicas[number].busy_seconds += seconds
        return BatchResult([_NOTHING] * len(batch.sequences), seconds)

    def _queued_tokens(self) -> Counts:
        """Return the waiting tokens of all replicas, scraped again if they are too old."""
        if self._clock.now - self._scraped_at >= self._options.metrics_age:
            self._scraped_at = self._clock.now
            self._scraped[:] = [replica.admission.depth[1] for replica in self._replicas]
        return self._scraped


def simulate_fleet(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    costs: CostModel,
    options: FleetOptions,
    routing: Routing,
) -> FleetRun:
    """Return the run of replicas over at least one arrival, in order of time.

    Args:
        arrivals: requests that reach the router.
        config: settings of every replica.
        costs: true seconds of batches, which every scheduler knows at first.
        options: number of replicas, and what happens to them.
        routing: rule by which the router chooses.
    """
    return _Fleet(options, config, costs, routing).run(arrivals)


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Figures of a routing under a load: columns of a CSV file.

    Attributes:
        policy, execution: settings of the engines.
        workers, replicas: number of batches that a replica runs at a time, and number of replicas.
        routing: rule by which the router chooses.
        metrics_age, slow_factor, dead_seconds: see `FleetOptions`.
        offered: requests per second.
        served: answers without an error per second.
        mean, p50, p99: latency of those answers, in seconds.
        utilisation: share of their time in which workers run batches.
        largest_share: largest share of the requests that went to one replica.
        sent_again: requests that a dead replica held.
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
    offered: float
    served: float
    mean: float
    p50: float
    p99: float
    utilisation: float
    largest_share: float
    sent_again: int
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
        began = run.outcomes[0].arrival.at
        seconds = max((each.end for each in run.outcomes if each.end is not None), default=began)
        slots = options.replicas * options.workers
        return FleetFigures(
            policy=config.policy,
            execution=config.execution,
            workers=options.workers,
            replicas=options.replicas,
            routing=routing.value,
            metrics_age=options.metrics_age,
            slow_factor=options.slow_factor,
            dead_seconds=options.dead_seconds,
            offered=rate,
            served=run.served_per_second,
            mean=fmean(latencies) if latencies else math.nan,
            p50=percentile(latencies, 0.50),
            p99=percentile(latencies, 0.99),
            utilisation=sum(run.busy_seconds) / (slots * (seconds - began)),
            largest_share=max(run.sent) / sum(run.sent),
            sent_again=run.sent_again,
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
