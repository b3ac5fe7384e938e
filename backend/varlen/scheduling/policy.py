"""Policies: how many sequences from the front of the queue run together next.

The queue decides the order. Policies see lengths, times and costs, never tensors or a clock.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from varlen.costs.batch_shape import BatchLimits, BatchShape, FloatArray
from varlen.costs.model import CostModel
from varlen.scheduling.queue import RequestQueue
from varlen.sequence import Batch, SequenceState

# Weight of the time to drain the queue against the time of one batch. It is more than 1 because requests that come
# while the queue drains are delayed too: at a load of 0.875, eight for each that waits.
_DRAIN_WEIGHT = 8


class Policy(Protocol):
    """Chooses the next batch."""

    def choose(self, queue: RequestQueue, now: float, slowdown: float) -> Batch:
        """Return the next batch of a queue that has a request; the queue is unchanged.

        Args:
            queue: in the order of service.
            now: in seconds of the engine's clock.
            slowdown: seconds that batches take now over those that the cost model predicts.
        """


class FullBatches:
    """Fills each batch up to its limits."""

    def __init__(self, limits: BatchLimits, costs: CostModel) -> None:
        self._limits = limits
        self._costs = costs

    def choose(self, queue: RequestQueue, now: float, slowdown: float) -> Batch:  # noqa: ARG002  # as others do
        """Return the longest prefix of the queue within the limits, at least one sequence."""
        sequences = _longest_prefix(queue, self._limits)
        shape = BatchShape.of([sequence.num_tokens for sequence in sequences])
        seconds = slowdown * self._costs.seconds(shape)
        return Batch(tuple(sequences), shape, seconds, "up to the limits")


class CutByCost:
    """Chooses the size of each batch by its predicted cost.

    A batch delays its own requests by its seconds, and all others by the seconds that it takes per token. So the size
    is that of the least

        seconds * (max(1, coming / (2 * waiting)) + 8 * waiting tokens / (tokens * workers))

    where the second fraction is the number of such batches that each worker runs until the queue is empty. With a
    short queue batches are small, with a long one they are as large as it pays.

    Nothing interrupts a batch, so it delays requests that come while it runs by half of its seconds on average.
    `waiting` is the number of requests in the queue, and `coming` of those that are expected until it is empty: as
    many as came in as many seconds before. If they are more, because few large requests are the queue, batches are
    smaller.

    A sequence joins a batch only if it delays the requests that are complete without it less than its own batch would
    delay all that wait: each completed one by the seconds that it adds; each that waits by the fixed seconds of a
    batch, times 8 / workers. So a short request does not wait for a long one.

    A batch is cut down to end before the deadlines of its requests, if it can.
    """

    def __init__(self, limits: BatchLimits, costs: CostModel, workers: int) -> None:
        """Make a policy.

        Args:
            limits: of a batch.
            costs: predict the seconds of any batch.
            workers: number of batches that run at the same time.
        """
        self._limits = limits
        self._costs = costs
        self._workers = workers

    def choose(self, queue: RequestQueue, now: float, slowdown: float) -> Batch:
        """Return the best prefix of the queue within the limits, at least one sequence."""
        sequences = _longest_prefix(queue, self._limits)
        lengths = np.array([float(sequence.num_tokens) for sequence in sequences])
        tokens = np.cumsum(lengths)
        predicted = self._seconds(lengths, tokens)
        seconds = slowdown * predicted
        in_time = now + seconds <= _earliest_deadlines(sequences)
        # later prefixes take longer and have earlier deadlines, so those in time are the first ones
        most = int(in_time.sum()) or len(sequences)
        reason = "cut by cost" if most == len(sequences) else "cut by cost, for a deadline"
        most = min(most, self._joining(sequences, predicted, len(queue)))
        batches_left = queue.waiting_tokens / (tokens * self._workers)
        drain_seconds = float((seconds * batches_left).min())
        coming = queue.arrivals_since(now - drain_seconds) / len(queue)
        delay = seconds * (max(1.0, coming / 2) + _DRAIN_WEIGHT * batches_left)
        size = int(delay[:most].argmin()) + 1
        chosen = sequences[:size]
        return Batch(
            tuple(chosen),
            BatchShape.of([sequence.num_tokens for sequence in chosen]),
            float(seconds[size - 1]),
            f"{reason}, {queue.waiting_tokens} tokens waiting",
        )

    def _joining(
        self, sequences: list[SequenceState], seconds: FloatArray, num_requests: int
    ) -> int:
        """Return the number of sequences before the first that does not join them."""
        # requests that are complete without the next sequence
        complete = np.cumsum(
            [one.request is not other.request for one, other in pairwise(sequences)]
        )
        saved = _DRAIN_WEIGHT * num_requests * self._costs.fixed_seconds / self._workers
        refused = complete * np.diff(seconds) > saved
        return int(refused.argmax()) + 1 if refused.any() else len(sequences)

    def _seconds(self, lengths: FloatArray, tokens: FloatArray) -> FloatArray:
        """Return the seconds of every prefix."""
        counts = np.arange(1.0, len(lengths) + 1)
        squares, longest = np.cumsum(lengths * lengths), np.maximum.accumulate(lengths)
        return self._costs.seconds_of(counts, tokens, squares, longest)


def _longest_prefix(queue: RequestQueue, limits: BatchLimits) -> list[SequenceState]:
    """Return the longest prefix of the queue within the limits, at least one sequence."""
    sequences: list[SequenceState] = []
    longest = tokens = 0
    for sequence in queue:
        longest, tokens = max(longest, sequence.num_tokens), tokens + sequence.num_tokens
        if sequences and not limits.allow(len(sequences) + 1, tokens, longest):
            break
        sequences.append(sequence)
    return sequences


def _earliest_deadlines(sequences: list[SequenceState]) -> FloatArray:
    """Return the earliest deadline of every prefix."""
    return np.array(list(accumulate((each.request.deadline for each in sequences), min)))
