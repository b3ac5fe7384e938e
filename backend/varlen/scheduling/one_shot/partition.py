"""Policies choose the next batch: up to its limits, or of the best partition.

The queue decides the order. Policies see lengths, times and costs, never tensors or a clock.
Source of the DP partition: the batch scheduler of TurboTransformers (Fang et al. 2021, PPoPP, arXiv:2010.05680), whose
objective is the least total time. This one weighs the time of each batch with the requests that it delays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from varlen.costs.model import BatchLimits, BatchShape, CostModel, FloatArray
from varlen.scheduling.batch import Batch, SequenceState
from varlen.scheduling.one_shot.queue import RequestQueue


class Policy(Protocol):
    """Chooses the next batch."""

    def choose(self, queue: RequestQueue, slowdown: float) -> Batch:
        """Return the next batch of a queue that has a request; the queue is unchanged.

        Args:
            queue: queue in the order of service at its time `now`.
            slowdown: seconds that batches take now over those that the cost model predicts.
        """


class FullBatches:
    """Fills each batch up to its limits."""

    def __init__(self, limits: BatchLimits, costs: CostModel) -> None:
        self._limits = limits
        self._costs = costs

    def choose(self, queue: RequestQueue, slowdown: float) -> Batch:
        sequences = longest_prefix(queue, self._limits)
        shape = BatchShape.of([sequence.num_tokens for sequence in sequences])
        seconds = slowdown * self._costs.seconds(shape)
        return Batch(tuple(sequences), shape, seconds, "up to the limits")


def longest_prefix(queue: RequestQueue, limits: BatchLimits) -> list[SequenceState]:
    """Return the longest prefix of the queue within the limits, at least one sequence."""
    sequences: list[SequenceState] = []
    longest = tokens = 0
    for sequence in queue:
        longest, tokens = max(longest, sequence.num_tokens), tokens + sequence.num_tokens
        if sequences and not limits.allow(len(sequences) + 1, tokens, longest):
            break
        sequences.append(sequence)
    return sequences


# Largest number of units, which bounds the time of a decision.
_MAX_UNITS = 96
# Relative difference of sums that are equal but for rounding.
_ROUNDING = 1e-9


class _Candidates:
    """Batches of consecutive units: `[i, k]` is the batch of units `i` to `i + k`.

    A unit is one sequence. With more than `_MAX_UNITS` sequences, units in the second half are several sequences.
    Entries of batches beyond the last unit are undefined.

    Attributes:
        cuts: [units + 1], number of sequences before each unit, then of all.
        tokens_before, requests_before: [units + 1], tokens and requests before each unit, then of all. A part of a
            request counts by its share of the waiting rows.
        counts, tokens, squares, longest: [units, sizes], shape of each batch, as in `BatchShape`.
        requests: [units, sizes], requests in each batch, counted as in `requests_before`.
        room: [units, sizes], part of the limits that the batch leaves; less than 0 beyond them.
        allowed: [units, sizes], whether there may be such a batch: within the limits, or of one unit.
        earliest_deadlines: [sizes], earliest deadline in each batch that begins with the first unit.
    """

    def __init__(
        self, sequences: Sequence[SequenceState], queue: RequestQueue, limits: BatchLimits
    ) -> None:
        """Describe the batches of sequences of a queue, at least one sequence."""
        self.cuts = _cuts(len(sequences))
        units = len(self.cuts) - 1
        self._sizes = sizes = min(units, limits.max_sequences)
        lengths = np.array([float(sequence.num_tokens) for sequence in sequences])
        rows = np.array([queue.waiting_rows(sequence.request) for sequence in sequences])
        # [quantities, units + 1], sums of the units before each one, then of all
        before = np.zeros((4, len(sequences) + 1))
        before[:, 1:] = np.ones_like(lengths), lengths, lengths * lengths, 1 / rows
        before = before.cumsum(axis=1)[:, self.cuts]
        _, self.tokens_before, _, self.requests_before = before
        self.counts, self.tokens, self.squares, self.requests = (
            self.at_ends(before) - before[:, :-1, None]
        )
        longest = np.maximum.reduceat(lengths, self.cuts[:-1])
        self.longest = np.maximum.accumulate(_windows(longest, sizes), axis=1)
        computed = limits.computed_tokens(self.counts, self.tokens, self.longest)
        self.room: FloatArray = 1.0 - np.maximum(
            computed / limits.max_tokens, self.counts / limits.max_sequences
        )
        self.allowed: npt.NDArray[np.bool_] = self.room >= 0.0
        self.allowed[:, 0] = True
        deadlines = [sequence.request.deadline for sequence in sequences]
        self.earliest_deadlines = np.minimum.accumulate(deadlines)[self.cuts[1 : sizes + 1] - 1]

    def at_ends(self, sums: FloatArray) -> FloatArray:
        """Return sums, [..., units + 1], at the end of each batch, [..., units, sizes]."""
        return _windows(sums[..., 1:], self._sizes)

    def seconds(self, costs: CostModel) -> FloatArray:
        """Return the predicted seconds of each batch, [units, sizes]."""
        return costs.seconds_of(self.counts, self.tokens, self.squares, self.longest)


def _cuts(count: int) -> npt.NDArray[np.int64]:
    """Return the number of sequences before each unit, then of all."""
    single = min(count, _MAX_UNITS // 2)
    others = min(count - single, _MAX_UNITS - single)
    ends = single + np.arange(others + 1) * (count - single) // max(1, others)
    return np.concatenate([np.arange(single), ends])


def _sliding_windows(values: FloatArray, size: int) -> FloatArray:
    """Return every run of `size` contiguous values, a view [..., windows, size].

    The function of numpy with this name takes 25 microseconds, which is much of a decision.
    """
    *outer, count = values.shape
    strides = (*values.strides, values.strides[-1])
    return np.ndarray((*outer, count - size + 1, size), values.dtype, values, 0, strides)


def _windows(values: FloatArray, sizes: int) -> FloatArray:
    """Return the values from each unit on, [..., units, sizes], the last one repeated."""
    units = values.shape[-1]
    padded = np.empty((*values.shape[:-1], units + sizes - 1))
    padded[..., :units] = values
    padded[..., units:] = values[..., -1:]
    return _sliding_windows(padded, sizes)


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
            pressure: number of requests that come for each that waits, infinity for the least total seconds.
        """
        self._limits = limits
        self._costs = costs
        self._workers = workers
        self._pressure = pressure

    def choose(self, queue: RequestQueue, slowdown: float) -> Batch:
        sequences = self._front(queue)
        first = sequences[0]
        if len(sequences) == 1:
            shape = BatchShape.of([first.num_tokens])
            seconds_alone = slowdown * self._costs.seconds(shape)
            return Batch((first,), shape, seconds_alone, "the only sequence that waits")
        is_by_length = math.isinf(self._pressure) and not queue.is_urgent
        if is_by_length:
            sequences.sort(key=lambda sequence: sequence.num_tokens)
        candidates = _Candidates(sequences, queue, self._limits)
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
            return queue.first(_MAX_UNITS)
        largest = self._limits.max_sequences
        if 3 * largest > 2 * _MAX_UNITS:
            largest = len(longest_prefix(queue, self._limits))
        return queue.first(max(_MAX_UNITS, 3 * largest // 2))

    def _delays(
        self,
        candidates: _Candidates,
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
    behind = _sliding_windows(least[1:], sizes)
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
