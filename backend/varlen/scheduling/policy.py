"""Which of the waiting sequences run together next. Policies see lengths, times and costs, never tensors or a clock."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.table import CostTable
from varlen.scheduling.load import LoadMeter
from varlen.scheduling.partition import cut_in_order, partition, seconds_of_batches
from varlen.scheduling.queue import RequestQueue
from varlen.sequence import Batch, Sequence

_Item = TypeVar("_Item")

# Sequences among which one decision chooses, those due first; planning takes about a millisecond.
_WINDOW = 256
# A plan replaces serving in order if it promises to be this much better: a plan does not know what comes next, and
# sequences to come fill up the last batch of those who are served in order, but of no other plan.
_WORTH_IT = 0.9875
# What the fastest batches may keep others waiting: of the usual wait, and of the time that all who wait now would take
# in order. The latter ends what a rush, or a pause of the machine, made usual.
_PATIENCE = 1.3
_BACKLOGS = 2.0


class Policy(Protocol):
    """Chooses the next batch."""

    def choose(self, queue: RequestQueue, backlog_seconds: float, now: float) -> Batch:
        """Return what runs next of a queue that is not empty; the queue stays as it is."""


class InOrder:
    """Who is due first is served first, as many together as may be. None is overtaken, so none can starve."""

    def __init__(self, limits: BatchLimits, costs: CostTable) -> None:
        self._limits = limits
        self._costs = costs

    def choose(self, queue: RequestQueue, backlog_seconds: float, now: float) -> Batch:  # noqa: ARG002  # as others do
        """Return the longest prefix of the queue that is within the limits; at least one sequence."""
        lengths: list[int] = []
        longest = tokens = 0
        for waiting in queue:
            longest, tokens = max(longest, waiting.num_tokens), tokens + waiting.num_tokens
            if lengths and not self._limits.allow(len(lengths) + 1, tokens, longest):
                break
            lengths.append(waiting.num_tokens)
        shape = BatchShape.of(lengths)
        return Batch(
            tuple(queue.first(len(lengths))), shape, self._costs.seconds(shape), "in order"
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """All of the window in batches, in the order in which they would run."""

    why: str
    batches: list[list[Sequence]]
    seconds: list[float]

    def cost(self, waiting: int, pressure: float) -> float:
        """Return seconds times requests kept waiting, those to come included."""
        # a request waits until the last of its sequences has run
        last = {each.request: i for i, batch in enumerate(self.batches) for each in batch}
        ending = Counter(last.values())
        total = 0.0
        for place, seconds in enumerate(self.seconds):
            total += seconds * (waiting + pressure)
            waiting -= ending[place]
        return total

    def late(self, now: float) -> int:
        """Return how many sequences would be answered after their deadline."""
        late = 0
        for batch, end in zip(self.batches, accumulate(self.seconds), strict=True):
            late += sum(waiting.request.deadline < now + end for waiting in batch)
        return late

    def fastest_first(self) -> _Plan:
        """Return the plan in which batches run by requests per second, which is the least waiting."""
        rows = Counter(waiting.request for batch in self.batches for waiting in batch)
        rates = [
            sum(1 / rows[waiting.request] for waiting in batch) / seconds
            for batch, seconds in zip(self.batches, self.seconds, strict=True)
        ]
        return self._in(sorted(range(len(rates)), key=lambda i: -rates[i]), self.why)

    def of_first(self, waiting: Sequence) -> _Plan:
        """Return the plan that begins with the batch of one sequence."""
        place = next(i for i, batch in enumerate(self.batches) if waiting in batch)
        others = (i for i in range(len(self.batches)) if i != place)
        return self._in([place, *others], f"{self.why}, who is due first")

    def _in(self, order: list[int], why: str) -> _Plan:
        return _Plan(why, [self.batches[i] for i in order], [self.seconds[i] for i in order])


class LeastCost:
    """Plans all that waits by measured cost, runs the first batch of the best plan, and plans anew.

    It compares serving in order with the cheapest cuts of that order, where batches are packed, and of the sequences
    sorted by length, which run by sequences per second. Sorted ones are a choice only as long as nobody who is passed
    over would wait for longer than is usual when served in order. Padded ones have to be sorted all the same: then the
    batch of who is due first is the first.
    A plan that misses fewer deadlines beats any that misses more.
    """

    def __init__(
        self, limits: BatchLimits, costs: CostTable, load: LoadMeter, max_wait: float
    ) -> None:
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

    def choose(self, queue: RequestQueue, backlog_seconds: float, now: float) -> Batch:
        """Return the first batch of the best plan."""
        window = queue.first(_WINDOW)
        pressure = self._load.pressure(now, backlog_seconds)
        in_order = self._in_order(window)
        if len(window) == 1:
            return Batch(
                tuple(window), BatchShape.of([window[0].num_tokens]), in_order.seconds[0], "alone"
            )
        plans = self._others(window, len(queue), pressure, now, in_order)
        has_deadlines = any(math.isfinite(waiting.request.deadline) for waiting in window)
        if has_deadlines:
            plans.append(self._urgent(in_order, now))

        def rank(plan: _Plan) -> tuple[int, float]:
            late = plan.late(now) if has_deadlines else 0
            cost = plan.cost(len(queue), pressure)
            return late, cost * (_WORTH_IT if plan is in_order else 1.0)

        best = min([in_order, *plans], key=rank)
        shape = BatchShape.of([waiting.num_tokens for waiting in best.batches[0]])
        why = f"{best.why}, {len(queue)} waiting and {pressure:.0f} to come"
        return Batch(tuple(best.batches[0]), shape, best.seconds[0], why)

    def _in_order(self, window: list[Sequence]) -> _Plan:
        lengths = [waiting.num_tokens for waiting in window]
        sizes = cut_in_order(lengths, self._limits)
        seconds = seconds_of_batches(_cut(lengths, sizes), self._costs)
        return _Plan("in order", _cut(window, sizes), seconds)

    def _urgent(self, in_order: _Plan, now: float) -> _Plan:
        """Return the plan in order, its first batch cut down to what ends before its first deadline."""
        first, *others = in_order.batches
        lengths = [waiting.num_tokens for waiting in first]
        seconds = seconds_of_batches([lengths[: i + 1] for i in range(len(first))], self._costs)
        deadlines = accumulate((waiting.request.deadline for waiting in first), min)
        in_time = [now + s <= d for s, d in zip(seconds, deadlines, strict=True)]
        size = max((i + 1 for i, fits in enumerate(in_time) if fits), default=1)
        if size == len(first):
            return in_order
        rest = seconds_of_batches([lengths[size:]], self._costs)
        return _Plan(
            "in order, for a deadline",
            [first[:size], first[size:], *others],
            [seconds[size - 1], *rest, *in_order.seconds[1:]],
        )

    def _others(
        self,
        window: list[Sequence],
        waiting: int,
        pressure: float,
        now: float,
        in_order: _Plan,
    ) -> list[_Plan]:
        """Return the plans that are allowed beside serving in order."""
        beyond = pressure + waiting - len({each.request for each in window})
        by_length = self._cheapest("cheapest by length", sorted(window, key=_length), beyond)
        if self._limits.execution == "packed":
            plans = [self._cheapest("cheapest in order", window, beyond)]
        else:
            plans = [by_length.of_first(window[0])]
        fastest = by_length.fastest_first()
        passed_over = _passed_over(window, fastest.batches[0])
        patience = min(
            _PATIENCE * self._load.usual_wait(), _BACKLOGS * sum(in_order.seconds), self._max_wait
        )
        end = now + fastest.seconds[0] + in_order.seconds[0]
        if passed_over is None or end - passed_over.request.arrival <= patience:
            plans.append(fastest)
        return plans

    def _cheapest(self, why: str, order: list[Sequence], pressure: float) -> _Plan:
        lengths = [waiting.num_tokens for waiting in order]
        last = {waiting.request: place for place, waiting in enumerate(order)}
        ends = [int(last[waiting.request] == place) for place, waiting in enumerate(order)]
        sizes, seconds = partition(lengths, self._costs, self._limits, pressure=pressure, ends=ends)
        return _Plan(why, _cut(order, sizes), seconds)


def _cut(order: list[_Item], sizes: list[int]) -> list[list[_Item]]:
    return [order[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]


def _length(waiting: Sequence) -> tuple[int, float]:
    return waiting.num_tokens, waiting.request.arrival


def _passed_over(window: list[Sequence], batch: list[Sequence]) -> Sequence | None:
    """Return who is due first of those that are not in the batch."""
    chosen = set(batch)
    return next((waiting for waiting in window if waiting not in chosen), None)
