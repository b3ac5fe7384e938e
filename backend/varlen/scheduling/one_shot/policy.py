"""Policies choose the next batch; here, batches that are filled up to their limits.

The queue decides the order. Policies see lengths, times and costs, never tensors or a clock.
"""

from __future__ import annotations

from typing import Protocol

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import CostModel
from varlen.scheduling.batch import Batch
from varlen.scheduling.one_shot.queue import RequestQueue
from varlen.scheduling.sequence import SequenceState


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
        """Return the longest prefix of the queue within the limits, at least one sequence."""
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
