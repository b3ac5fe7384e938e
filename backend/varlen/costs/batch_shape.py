"""The shape of a batch, which decides its cost, and the limits of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from varlen.config import Execution

FloatArray: TypeAlias = npt.NDArray[np.float64]
_Number = TypeVar("_Number", int, FloatArray)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Numbers that decide the cost of a batch.

    Attributes:
        tokens: tokens of all sequences, without padding.
        squares: sum of the squared lengths, in tokens squared.
        longest: length of the longest sequence, in tokens.
    """

    sequences: int
    tokens: int
    squares: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> BatchShape:
        return cls(len(lengths), sum(lengths), sum(n * n for n in lengths), max(lengths))

    @property
    def padding(self) -> int:
        """Number of tokens that pad all sequences to the longest."""
        return self.sequences * self.longest - self.tokens


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one batch. A batch of one sequence is always allowed.

    Attributes:
        max_tokens: largest number of tokens, padding included.
        execution: whether sequences are padded to the longest of their batch.
    """

    max_sequences: int
    max_tokens: int
    execution: Execution = "packed"

    def allow(self, sequences: int, tokens: int, longest: int) -> bool:
        return (
            sequences <= self.max_sequences
            and self.computed_tokens(sequences, tokens, longest) <= self.max_tokens
        )

    def computed_tokens(self, sequences: _Number, tokens: _Number, longest: _Number) -> _Number:
        """Return the tokens that batches compute, padding included; of one batch, or of arrays."""
        return sequences * longest if self.execution == "padded" else tokens
