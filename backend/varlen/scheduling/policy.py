"""Policies: which waiting sequences run together next.

Policies see lengths, times and costs, never tensors or a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import CostModel
from varlen.scheduling.load import LoadMeter
from varlen.scheduling.partition import cut_in_order, partition, seconds_of_batches
from varlen.scheduling.queue import RequestQueue
from varlen.sequence import Batch, RequestState, SequenceState

_Item = TypeVar("_Item")

# Largest number of sequences that one decision plans: several batches, a few milliseconds of planning.
_WINDOW = 256
# Another plan has to cost less than this share of the plan in order: its last batch can still be filled by sequences
# that arrive later, and a plan does not count them.
_WORTH_CHANGING = 0.9875
# Longest wait of a request that others overtake, relative to the time of all planned batches in order.
_PATIENCE = 1.7


class Policy(Protocol):
    """Chooses the next batch."""

    def choose(self, queue: RequestQueue, now: float) -> Batch:
        """Return the next batch of a queue that has a request; the queue is unchanged.

        Args:
            queue: in the order of service.
            now: in seconds of the engine's clock.
        """


class InOrder:
    """Fills each batch in queue order. No sequence overtakes another, so none can starve."""

    def __init__(self, limits: BatchLimits, costs: CostModel) -> None:
        self._limits = limits
        self._costs = costs

    def choose(self, queue: RequestQueue, now: float) -> Batch:  # noqa: ARG002  # as others do
        """Return the longest prefix of the queue within the limits, at least one sequence."""
        lengths: list[int] = []
        longest = tokens = 0
        for sequence in queue:
            longest, tokens = max(longest, sequence.num_tokens), tokens + sequence.num_tokens
            if lengths and not self._limits.allow(len(lengths) + 1, tokens, longest):
                break
            lengths.append(sequence.num_tokens)
        shape = BatchShape.of(lengths)
        return Batch(
            tuple(queue.first(len(lengths))), shape, self._costs.seconds(shape), "in order"
        )


class LeastCost:
    """Plans the queue's front by predicted cost, and chooses the best plan's first batch.

    Three plans compete: full batches in queue order, the best consecutive batches in queue order, and the best
    batches of like lengths. If there are deadlines, a fourth plan cuts the first batch down to meet them. The plan
    that misses the fewest deadlines wins, then the one with the lowest cost.
    """

    def __init__(
        self,
        limits: BatchLimits,
        costs: CostModel,
        load: LoadMeter,
        backlog: Callable[[], float],
        max_wait: float,
    ) -> None:
        """Make a policy.

        Args:
            limits: of a batch.
            costs: predict the seconds of any batch.
            load: measures the arrival rate.
            backlog: returns the expected run time of all waiting requests, in seconds.
            max_wait: longest wait of a request that others overtake, in seconds.
        """
        self._limits = limits
        self._costs = costs
        self._load = load
        self._backlog = backlog
        self._max_wait = max_wait

    def choose(self, queue: RequestQueue, now: float) -> Batch:
        """Return the first batch of the best plan."""
        window = queue.first(_WINDOW)
        if len(window) == 1:
            shape = BatchShape.of([window[0].num_tokens])
            return Batch(tuple(window), shape, self._costs.seconds(shape), "alone")
        pressure = self._load.pressure(now, self._backlog())
        # requests that wait behind the window count as pressure there
        beyond = pressure + len(queue) - len({sequence.request for sequence in window})
        in_order = self._full_in_order(window)
        plans = [
            in_order,
            self._best_cut("best cut in order", window, beyond),
            self._by_length(window, beyond, now, in_order),
        ]
        has_deadlines = any(math.isfinite(sequence.request.deadline) for sequence in window)
        if has_deadlines:
            plans.append(self._in_time(in_order, now))

        def rank(plan: _BatchPlan) -> tuple[int, float]:
            missed = plan.missed_deadlines(now) if has_deadlines else 0
            cost = plan.cost(len(queue), pressure)
            return missed, cost * (_WORTH_CHANGING if plan is in_order else 1.0)

        best = min(plans, key=rank)
        shape = BatchShape.of([sequence.num_tokens for sequence in best.batches[0]])
        reason = f"{best.reason}, {len(queue)} requests waiting, pressure {pressure:.0f}"
        return Batch(tuple(best.batches[0]), shape, best.seconds[0], reason)

    def _full_in_order(self, window: list[SequenceState]) -> _BatchPlan:
        lengths = [sequence.num_tokens for sequence in window]
        sizes = cut_in_order(lengths, self._limits)
        seconds = seconds_of_batches(_cut(lengths, sizes), self._costs)
        return _BatchPlan("in order", _cut(window, sizes), seconds)

    def _best_cut(self, reason: str, order: list[SequenceState], pressure: float) -> _BatchPlan:
        lengths = [sequence.num_tokens for sequence in order]
        last = {sequence.request: place for place, sequence in enumerate(order)}
        ends = [int(last[sequence.request] == place) for place, sequence in enumerate(order)]
        sizes, seconds = partition(lengths, self._costs, self._limits, pressure=pressure, ends=ends)
        return _BatchPlan(reason, _cut(order, sizes), seconds)

    def _by_length(
        self, window: list[SequenceState], pressure: float, now: float, in_order: _BatchPlan
    ) -> _BatchPlan:
        """Return the plan of like lengths: batches with the most requests per second first.

        If a request that others overtake would wait too long, the batch of the first request runs first instead.
        """
        order = sorted(window, key=lambda sequence: sequence.num_tokens)
        plan = self._best_cut("by length", order, pressure)
        fastest = plan.fastest_first()
        chosen = set(fastest.batches[0])
        overtaken = next((sequence for sequence in window if sequence not in chosen), None)
        patience = min(_PATIENCE * sum(in_order.seconds), self._max_wait)
        # it would run in the next batch at the latest
        end = now + fastest.seconds[0] + in_order.seconds[0]
        if overtaken is None or end - overtaken.request.arrival <= patience:
            return fastest
        return plan.starting_with(window[0])

    def _in_time(self, in_order: _BatchPlan, now: float) -> _BatchPlan:
        """Return the plan in order, with a first batch small enough for its deadlines."""
        first, *others = in_order.batches
        lengths = [sequence.num_tokens for sequence in first]
        seconds = seconds_of_batches([lengths[: i + 1] for i in range(len(first))], self._costs)
        deadlines = accumulate((sequence.request.deadline for sequence in first), min)
        in_time = [now + s <= d for s, d in zip(seconds, deadlines, strict=True)]
        size = max((i + 1 for i, fits in enumerate(in_time) if fits), default=1)
        if size == len(first):
            return in_order
        rest = seconds_of_batches([lengths[size:]], self._costs)
        return _BatchPlan(
            "in order, for a deadline",
            [first[:size], first[size:], *others],
            [seconds[size - 1], *rest, *in_order.seconds[1:]],
        )


@dataclass(frozen=True, slots=True)
class _BatchPlan:
    """All sequences of the window in batches, in the order in which they would run."""

    reason: str
    batches: list[list[SequenceState]]
    seconds: list[float]

    def cost(self, requests: int, pressure: float) -> float:
        """Return the sum of seconds times delayed requests, those that wait and those to come."""
        # a request waits until the last of its sequences has run
        last = {sequence.request: i for i, batch in enumerate(self.batches) for sequence in batch}
        ending = Counter(last.values())
        total = 0.0
        for place, seconds in enumerate(self.seconds):
            total += seconds * (requests + pressure)
            requests -= ending[place]
        return total

    def missed_deadlines(self, now: float) -> int:
        """Return how many sequences would end after their deadline."""
        missed = 0
        for batch, end in zip(self.batches, accumulate(self.seconds), strict=True):
            missed += sum(sequence.request.deadline < now + end for sequence in batch)
        return missed

    def fastest_first(self) -> _BatchPlan:
        """Return the plan with the batches of most requests per second first."""
        rows: Counter[RequestState] = Counter(
            sequence.request for batch in self.batches for sequence in batch
        )
        rates = [
            sum(1 / rows[sequence.request] for sequence in batch) / seconds
            for batch, seconds in zip(self.batches, self.seconds, strict=True)
        ]
        return self._in(sorted(range(len(rates)), key=lambda i: -rates[i]))

    def starting_with(self, sequence: SequenceState) -> _BatchPlan:
        """Return the plan with the batch of this sequence first."""
        place = next(i for i, batch in enumerate(self.batches) if sequence in batch)
        others = (i for i in range(len(self.batches)) if i != place)
        return self._in([place, *others])

    def _in(self, order: list[int]) -> _BatchPlan:
        return _BatchPlan(
            self.reason, [self.batches[i] for i in order], [self.seconds[i] for i in order]
        )


def _cut(order: list[_Item], sizes: list[int]) -> list[list[_Item]]:
    return [order[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
