"""The DP partition: batches are the best division of the queue into consecutive batches.

Source: the batch scheduler of TurboTransformers (Fang et al. 2021, PPoPP, arXiv:2010.05680), whose objective is the
least total time. This one weighs the time of each batch with the requests that it delays.
"""

from __future__ import annotations

import math

import numpy as np

from varlen.costs.batch_shape import BatchLimits, BatchShape, FloatArray
from varlen.costs.model import CostModel
from varlen.scheduling.batch import Batch
from varlen.scheduling.one_shot.candidates import MAX_UNITS, Candidates, sliding_windows
from varlen.scheduling.one_shot.policy import longest_prefix
from varlen.scheduling.one_shot.queue import RequestQueue
from varlen.scheduling.sequence import SequenceState

# Relative difference of sums that are equal but for rounding.
_ROUNDING = 1e-9


class DpPartition:
    """Divides the front of the queue into consecutive batches of least delay, and runs one.

    The partition minimizes the sum over its batches of

        seconds * (own + (behind + pressure * waiting) / workers)

    where `own` counts the requests in the batch, `behind` those with sequences behind it, and `waiting` all requests in
    the queue: a batch delays its own requests by its seconds, and the others by its seconds per worker. The pressure
    stands for requests that come while the queue drains: `load / (1 - load)` for each that waits.

    * A request of many rows counts in `own` by its share of rows, so its rows spread over the workers.
    * Requests that come before the last batch starts join it if it has room, and share its fixed seconds. As many
      are expected as came while the queue would have drained once. So the first batch is filled, not the last.
    * Nothing interrupts a batch, so a batch delays requests that come while it runs by half of its seconds on average.
      They count if more than twice the waiting requests come, as while one client sends many long rows.
    * The first batch ends before the deadlines of its requests, if it can.

    The first batch runs, and the next decision makes a new partition.

    With an infinite pressure this is the partition of TurboTransformers: the front of the queue is sorted by length,
    and the total seconds are minimized. The batch with the first request of the queue runs, so no request starves.
    While a deadline is near, the order of the queue applies.
    """

    def __init__(
        self, limits: BatchLimits, costs: CostModel, workers: int, pressure: float
    ) -> None:
        """Make a policy.

        Args:
            costs: predicts the seconds of any batch.
            workers: number of batches that run at the same time.
            pressure: number of requests that come for each that waits, infinity for the least total seconds.
        """
        self._limits = limits
        self._costs = costs
        self._workers = workers
        self._pressure = pressure

    def choose(self, queue: RequestQueue, slowdown: float) -> Batch:
        """Return a batch of the best partition, at least one sequence."""
        sequences = self._front(queue)
        first = sequences[0]
        if len(sequences) == 1:
            shape = BatchShape.of([first.num_tokens])
            seconds_alone = slowdown * self._costs.seconds(shape)
            return Batch((first,), shape, seconds_alone, "the only sequence that waits")
        is_by_length = math.isinf(self._pressure) and not queue.is_urgent
        if is_by_length:
            sequences.sort(key=lambda sequence: sequence.num_tokens)
        candidates = Candidates(sequences, queue, self._limits)
        seconds = slowdown * candidates.seconds(self._costs)
        fixed_seconds = slowdown * self._costs.fixed_seconds
        delays = self._delays(candidates, seconds, fixed_seconds, queue)
        delays[~candidates.allowed] = math.inf
        is_late = candidates.allowed[0] & (queue.now + seconds[0] > candidates.earliest_deadlines)
        is_cut = not is_by_length and not is_late[0] and is_late.any()
        if is_cut:
            delays[0, is_late] = math.inf
        partition = best_partition(delays)
        cuts, place = candidates.cuts, sequences.index(first)
        units = next(batch for batch in partition if place < cuts[batch.stop])
        chosen = sequences[cuts[units.start] : cuts[units.stop]]
        return Batch(
            tuple(chosen),
            BatchShape.of([sequence.num_tokens for sequence in chosen]),
            float(seconds[units.start, len(units) - 1]),
            f"one of {len(partition)} batches of {len(sequences)} waiting sequences"
            + (", ended before a deadline" if is_cut else ""),
        )

    def _front(self, queue: RequestQueue) -> list[SequenceState]:
        """Return the first sequences: the largest batch, and at least half as many."""
        if math.isinf(self._pressure):
            # any unit may run, so each is one sequence
            return queue.first(MAX_UNITS)
        largest = self._limits.max_sequences
        if 3 * largest > 2 * MAX_UNITS:
            largest = len(longest_prefix(queue, self._limits))
        return queue.first(max(MAX_UNITS, 3 * largest // 2))

    def _delays(
        self,
        candidates: Candidates,
        seconds: FloatArray,
        fixed_seconds: float,
        queue: RequestQueue,
    ) -> FloatArray:
        """Return the delay that each batch causes, in seconds, whether or not it is allowed."""
        if math.isinf(self._pressure):
            return seconds.copy()
        waiting, workers = len(queue), self._workers
        tokens_before, requests_before = candidates.tokens_before, candidates.requests_before
        drains = seconds[0] * queue.waiting_tokens / (candidates.tokens[0] * workers)
        drain_seconds = float(drains[candidates.allowed[0]].min())
        coming = queue.arrivals_since(queue.now - drain_seconds)
        # requests that are not finished before each unit, and those to come
        behind = waiting - np.floor(requests_before + _ROUNDING) + self._pressure * waiting
        weights = candidates.requests + candidates.at_ends(behind / workers)
        if coming > 2 * waiting:
            weights += (coming - 2 * waiting) / drain_seconds * seconds / (2 * workers)
        # the last batches, by first unit: the part of their fixed seconds that other requests share
        units, sizes = seconds.shape
        firsts = np.arange(units - sizes, units)
        joining = coming * tokens_before[firsts] / queue.waiting_tokens
        shares = joining / (joining + waiting - requests_before[firsts])
        if tokens_before[-1] < queue.waiting_tokens:
            # sequences behind the front join the last batch
            shares[firsts > 0] = 1.0
        last = firsts, units - 1 - firsts
        priced = seconds.copy()
        priced[last] -= shares * candidates.room[last].clip(0.0) * fixed_seconds
        return np.asarray(priced * weights)


def best_partition(costs: FloatArray) -> list[range]:
    """Return the consecutive batches of least total cost, in order.

    Bellman's recursion from the back: the best partition of the items from `first` on is a batch, then the best
    partition of the items behind it. It takes one vector operation for each item.

    Args:
        costs: [items, sizes], cost of the batch of `column + 1` items that begins with item `row`; infinity if it is
            not allowed, which a batch of one item always is.

    Returns:
        The items of each batch. Equally good partitions: the one with the largest first batch.
    """
    count, sizes = costs.shape
    # least cost of the items from each one on
    least = np.full(count + sizes, math.inf)
    least[count] = 0.0
    # [items, sizes], views: least cost of the items behind each batch
    behind = sliding_windows(least[1:], sizes)
    best_sizes = [0] * count
    totals = np.empty(sizes)
    for first, batches, rest in zip(
        range(count - 1, -1, -1), costs[::-1], behind[::-1], strict=True
    ):
        np.add(batches, rest, totals)
        column = int(totals.argmin())
        best_sizes[first], least[first] = column + 1, totals[column]
    # sums in another order differ by their rounding
    best_sizes[0] = int(np.flatnonzero(totals <= least[0] + _ROUNDING * abs(least[0]))[-1]) + 1
    partition: list[range] = []
    first = 0
    while first < count:
        partition.append(range(first, first + best_sizes[first]))
        first = partition[-1].stop
    return partition
