"""Which of the waiting sequences run together next. Policies see lengths, times and costs, never tensors or a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from varlen.request import Waiting
from varlen.scheduling.cost import BatchShape, CostTable
from varlen.scheduling.load import LoadMeter
from varlen.scheduling.partition import Limits, cut_in_order, partition, seconds_of_cuts
from varlen.scheduling.queue import WaitingQueue

# Sequences among which one decision chooses, those due first; planning takes about a millisecond.
_WINDOW = 256
# A plan replaces serving in order if it promises to be this much better: a plan does not know what comes next, and
# sequences to come fill up the last batch of those who are served in order, but of no other plan.
_WORTH_IT = 0.97


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to run next.

    Attributes:
        sequences: at least one.
        shape: of the batch.
        seconds: what it is expected to take.
        why: why these, for the log.
    """

    sequences: list[Waiting]
    shape: BatchShape
    seconds: float
    why: str


class Policy(Protocol):
    """Chooses the next batch."""

    def choose(self, queue: WaitingQueue, now: float) -> Batch:
        """Return what runs next of a queue that is not empty; the queue stays as it is."""


class InOrder:
    """Who is due first is served first, as many together as may be. None is overtaken, so none can starve."""

    def __init__(self, limits: Limits, costs: CostTable) -> None:
        self._limits = limits
        self._costs = costs

    def choose(self, queue: WaitingQueue, now: float) -> Batch:  # noqa: ARG002  # as others do
        """Return the longest prefix of the queue that is within the limits; at least one sequence."""
        lengths: list[int] = []
        longest = tokens = 0
        for waiting in queue:
            longest, tokens = max(longest, waiting.num_tokens), tokens + waiting.num_tokens
            if lengths and not self._limits.allow(len(lengths) + 1, tokens, longest):
                break
            lengths.append(waiting.num_tokens)
        shape = BatchShape.of(lengths)
        return Batch(queue.first(len(lengths)), shape, self._costs.seconds(shape), "in order")


@dataclass(frozen=True, slots=True)
class _Plan:
    """All of the window in batches, in the order in which they would run."""

    why: str
    batches: list[list[Waiting]]
    seconds: list[float]

    def cost(self, waiting: int, pressure: float) -> float:
        """Return seconds times sequences kept waiting, those to come included."""
        total = 0.0
        for batch, seconds in zip(self.batches, self.seconds, strict=True):
            total += seconds * (waiting + pressure)
            waiting -= len(batch)
        return total

    def late(self, now: float) -> int:
        """Return how many sequences would be answered after their deadline."""
        late = 0
        for batch, end in zip(self.batches, accumulate(self.seconds), strict=True):
            late += sum(waiting.ticket.deadline < now + end for waiting in batch)
        return late

    def with_first(self, place: int, why: str) -> _Plan:
        """Return the plan that begins with another of its batches."""
        order = [place, *(i for i in range(len(self.batches)) if i != place)]
        return _Plan(why, [self.batches[i] for i in order], [self.seconds[i] for i in order])


class LeastCost:
    """Plans all that waits by measured cost, runs the first batch of the best plan, and plans anew.

    It compares serving in order with the cheapest cuts of the order, where batches are packed, and of the sequences
    sorted by length. Sorted ones run by sequences per second, as long as nobody is kept waiting for longer than
    serving in order would have kept the slowest tenth of late; otherwise the batch of who is due first runs first.
    A plan that misses fewer deadlines beats any that misses more.
    """

    def __init__(self, limits: Limits, costs: CostTable, load: LoadMeter, max_wait: float) -> None:
        """Make a policy.

        Args:
            limits: of a batch.
            costs: of any batch.
            load: measures what comes.
            max_wait: most seconds for which a sequence may be passed over.
        """
        self._limits = limits
        self._costs = costs
        self._load = load
        self._max_wait = max_wait

    def choose(self, queue: WaitingQueue, now: float) -> Batch:
        """Return the first batch of the best plan."""
        window = queue.first(_WINDOW)
        pressure = self._load.pressure(now, queue.seconds)
        in_order = self._in_order(window)
        plans = self._others(window, len(queue), pressure, now, in_order.seconds[0])
        has_deadlines = any(math.isfinite(waiting.ticket.deadline) for waiting in window)

        def rank(plan: _Plan) -> tuple[int, float]:
            late = plan.late(now) if has_deadlines else 0
            cost = plan.cost(len(queue), pressure)
            return late, cost * (_WORTH_IT if plan is in_order else 1.0)

        best = min([in_order, *plans], key=rank)
        shape = BatchShape.of([waiting.num_tokens for waiting in best.batches[0]])
        why = f"{best.why}, {len(queue)} waiting and {pressure:.0f} to come"
        return Batch(best.batches[0], shape, best.seconds[0], why)

    def _in_order(self, window: list[Waiting]) -> _Plan:
        lengths = [waiting.num_tokens for waiting in window]
        sizes = cut_in_order(lengths, self._limits)
        seconds = seconds_of_cuts(lengths, sizes, self._costs)
        return _Plan("in order", _cut(window, sizes), seconds)

    def _others(
        self,
        window: list[Waiting],
        waiting: int,
        pressure: float,
        now: float,
        seconds_in_order: float,
    ) -> list[_Plan]:
        """Return the plans that are allowed beside serving in order; `seconds_in_order` is its first batch's."""
        plans = []
        beyond = pressure + waiting - len(window)
        if self._limits.execution == "packed":
            plans.append(self._cheapest("cheapest in order", window, beyond))
        by_length = sorted(window, key=lambda waiting: (waiting.num_tokens, waiting.due))
        plan = self._cheapest("cheapest by length", by_length, beyond)
        rates = [len(b) / s for b, s in zip(plan.batches, plan.seconds, strict=True)]
        order = sorted(range(len(rates)), key=lambda i: -rates[i])
        plan = _Plan(plan.why, [plan.batches[i] for i in order], [plan.seconds[i] for i in order])
        oldest = next(i for i, batch in enumerate(plan.batches) if window[0] in batch)
        plans.append(plan.with_first(oldest, "cheapest by length, who is due first"))
        passed_over = _passed_over(window, plan.batches[0])
        patience = min(self._load.patience(), self._max_wait)
        if (
            passed_over is None
            or now + plan.seconds[0] + seconds_in_order - passed_over.since <= patience
        ):
            plans.append(plan)
        return plans

    def _cheapest(self, why: str, order: list[Waiting], pressure: float) -> _Plan:
        lengths = [waiting.num_tokens for waiting in order]
        sizes, seconds = partition(lengths, self._costs, self._limits, pressure)
        return _Plan(why, _cut(order, sizes), seconds)


def _cut(order: list[Waiting], sizes: list[int]) -> list[list[Waiting]]:
    return [order[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]


def _passed_over(window: list[Waiting], batch: list[Waiting]) -> Waiting | None:
    """Return who is due first of those that are not in the batch."""
    chosen = set(batch)
    return next((waiting for waiting in window if waiting not in chosen), None)
