"""The shape of a batch, which decides its cost, and the limits of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varlen.config import Execution


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What of a batch decides its cost.

    Attributes:
        sequences: how many.
        tokens: of all sequences, without padding.
        squares: sum of the squared lengths, in tokens squared.
        longest: in tokens.
    """

    sequences: int
    tokens: int
    squares: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> BatchShape:
        """Return the shape of a batch of sequences of these lengths; at least one."""
        return cls(len(lengths), sum(lengths), sum(n * n for n in lengths), max(lengths))


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch may hold; one sequence alone always may.

    Attributes:
        max_sequences: in it.
        max_tokens: in it; where batches are padded, padding counts.
        execution: whether they are.
    """

    max_sequences: int
    max_tokens: int
    execution: Execution = "packed"

    def allow(self, sequences: int, tokens: int, longest: int) -> bool:
        """Return whether a batch is within them."""
        held = sequences * longest if self.execution == "padded" else tokens
        return sequences <= self.max_sequences and held <= self.max_tokens
