"""Replicas behind a router: an engine each, with the events of one virtual clock.

A replica that dies loses its queue and its running batches; the router sends their requests again to other replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import cast

import numpy as np

from varlen.config import NO_LIMIT, EngineConfig
from varlen.costs.model import CostModel
from varlen.request.request import Float32Array
from varlen.scheduling.admission import Admission
from varlen.scheduling.batch import Batch, BatchResult
from varlen.scheduling.one_shot.one_shot import OneShotScheduler
from varlen_tools.simulate.autoscaling import AutoscaleOptions, Autoscaler, Scrape
from varlen_tools.simulate.routing import Counts, ReplicaLoads, Routing, new_router
from varlen_tools.simulate.virtual import (
    Outcome,
    Run,
    VirtualClock,
    VirtualEngine,
    VirtualReply,
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
        autoscale: limits and delays of autoscaling; None: the number of replicas stays the same.
        seed: seed of the router's random choices.
    """

    replicas: int
    workers: int = 1
    metrics_age: float = 0.5
    slow_factor: float = 1.0
    dead_seconds: float = 0.0
    autoscale: AutoscaleOptions | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dead_seconds and self.replicas < 2:
            raise ValueError("--dead-seconds needs at least 2 replicas")
        if self.autoscale is not None:
            least, most = self.autoscale.least, self.autoscale.most
            if not 1 <= least <= self.replicas <= most:
                raise ValueError(
                    f"--autoscale is {least}:{most} and --replicas {self.replicas};"
                    " allowed: MIN:MAX with 1 <= MIN <= replicas <= MAX"
                )
            if self.dead_seconds:
                raise ValueError("--dead-seconds is for a fixed number of replicas")

    @property
    def most(self) -> int:
        """Largest number of replicas."""
        return self.replicas if self.autoscale is None else self.autoscale.most


@dataclass(frozen=True, slots=True)
class FleetRun(Run):
    """A run of several replicas.

    Attributes:
        sent: number of requests sent to each replica, with those sent again.
        busy_seconds: seconds of workers in which each replica ran batches.
        sent_again: number of requests that a dead replica held.
        longest_wait: longest time from an arrival to the start of its batch, in seconds.
        replica_seconds: seconds of all replicas, from their start or the first arrival to their end or the last answer.
        most_replicas: most replicas at a time, with replicas that start or drain.
    """

    sent: list[int]
    busy_seconds: list[float]
    sent_again: int
    longest_wait: float
    replica_seconds: float
    most_replicas: int


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
        begin: time from which its seconds count; None if it does not run.
        starts_at: time at which it will take requests; None if it is not starting.
    """

    engine: VirtualEngine
    admission: Admission
    open: dict[int, Outcome] = field(default_factory=dict)
    sent: int = 0
    busy_seconds: float = 0.0
    next_event: tuple[float, _Rank] | None = None
    begin: float | None = None
    starts_at: float | None = None


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
        self._longest_wait = 0.0
        self._replica_seconds = 0.0
        self._most_replicas = options.replicas
        self._expects_more = True
        self._replicas = [_Replica(*self._new_engine(number)) for number in range(options.most)]
        self._scraped_at = -math.inf
        self._scraped: Counts = np.zeros(options.most, dtype=np.int64)
        self._loads = ReplicaLoads(
            is_up=np.arange(options.most) < options.replicas,
            open_requests=np.zeros(options.most, dtype=np.int64),
            queued_tokens=self._queued_tokens,
        )
        self._route = new_router(routing, self._loads, options.seed)

    def run(self, arrivals: Sequence[Arrival]) -> FleetRun:
        """Return the run over at least one arrival, in order of time."""
        self._clock.now = arrivals[0].at
        for replica in self._replicas[: self._options.replicas]:
            replica.begin = self._clock.now
        if self._options.autoscale is not None:
            self._start_autoscaling(self._options.autoscale)
        if self._options.dead_seconds:
            at, last = arrivals[len(arrivals) // 2].at, self._options.replicas - 1
            self._events.add(at, _Rank.other, partial(self._die, last))
            back = partial(self._come_back, last)
            self._events.add(at + self._options.dead_seconds, _Rank.other, back)
        self._expect(iter(arrivals).__next__)
        self._events.run()
        end = max(outcome.end or 0.0 for outcome in self._outcomes)
        begins = [each.begin for each in self._replicas if each.begin is not None]
        return FleetRun(
            outcomes=self._outcomes,
            sent=[replica.sent for replica in self._replicas],
            busy_seconds=[replica.busy_seconds for replica in self._replicas],
            sent_again=self._sent_again,
            longest_wait=self._longest_wait,
            # a replica may be started after the last answer
            replica_seconds=self._replica_seconds + sum(max(0.0, end - begin) for begin in begins),
            most_replicas=self._most_replicas,
        )

    def _expect(self, following: Callable[[], Arrival]) -> None:
        """Add the event of the next arrival, if there is one."""
        try:
            arrival = following()
        except StopIteration:
            self._expects_more = False
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
        if not self._loads.is_up[number]:
            self._end_if_drained(number)

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

    def _start_autoscaling(self, options: AutoscaleOptions) -> None:
        """Add the events of scrapes and decisions."""
        autoscaler = Autoscaler(options, self._clock.now, self._options.replicas)
        last, last_busy = Scrape(0.0, 0.0), 0.0

        def scrape() -> None:
            nonlocal last, last_busy
            busy = sum(each.busy_seconds - each.engine.seconds_left for each in self._replicas)
            last = Scrape(
                load=(busy - last_busy) / (options.scrape_seconds * self._options.workers),
                queued_seconds=sum(each.admission.queued_seconds for each in self._replicas),
            )
            last_busy = busy

        def decide() -> None:
            self._scale_to(autoscaler.decide(self._clock.now, last), options.startup_seconds)

        self._repeat(scrape, options.scrape_seconds)
        self._repeat(decide, options.decision_seconds)

    def _repeat(self, action: Callable[[], None], seconds: float) -> None:
        """Run an action at this interval until all requests are answered."""

        def run() -> None:
            if self._expects_more or self._loads.open_requests.any():
                action()
                self._repeat(action, seconds)

        self._events.add(self._clock.now + seconds, _Rank.other, run)

    def _scale_to(self, wanted: int, startup_seconds: float) -> None:
        """Start or drain replicas until this number takes requests or will."""
        numbers = range(len(self._replicas))
        starting = [n for n in numbers if self._replicas[n].starts_at is not None]
        up = [n for n in numbers if self._loads.is_up[n]]
        missing = wanted - len(starting) - len(up)
        # a replica that drains is not started again before its end
        free = [n for n in numbers if self._replicas[n].begin is None]
        for number in free[: max(0, missing)]:
            self._start(number, startup_seconds)
        # replicas that do nothing yet are stopped first, then those with the fewest requests
        up.sort(key=lambda n: int(self._loads.open_requests[n]))
        for number in (starting + up)[: max(0, -missing)]:
            self._loads.is_up[number] = False
            self._replicas[number].starts_at = None
            self._end_if_drained(number)
        running = sum(replica.begin is not None for replica in self._replicas)
        self._most_replicas = max(self._most_replicas, running)

    def _start(self, number: int, startup_seconds: float) -> None:
        replica, now = self._replicas[number], self._clock.now
        replica.begin, replica.starts_at = now, now + startup_seconds
        started = partial(self._started, number, replica.starts_at)
        self._events.add(replica.starts_at, _Rank.other, started)

    def _started(self, number: int, at: float) -> None:
        # otherwise it was stopped in between
        if self._replicas[number].starts_at == at:
            self._replicas[number].starts_at = None
            self._loads.is_up[number] = True

    def _end_if_drained(self, number: int) -> None:
        """End a replica that takes no more requests, once none is open."""
        replica = self._replicas[number]
        # a dead replica is counted until it comes back
        if self._options.autoscale is not None and replica.begin is not None and not replica.open:
            self._replica_seconds += self._clock.now - replica.begin
            replica.begin = None

    def _new_engine(self, number: int) -> tuple[VirtualEngine, Admission]:
        config, workers = self._config, self._options.workers
        limits = config.max_queued_requests, config.max_queued_tokens or NO_LIMIT
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
        for sequence in batch.sequences:
            arrival = cast(VirtualReply, sequence.request.reply).outcome.arrival
            self._longest_wait = max(self._longest_wait, self._clock.now - arrival.at)
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
