"""All batches that consecutive sequences at the front of the queue can form, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from varlen.costs.batch_shape import BatchLimits, FloatArray
from varlen.costs.model import CostModel
from varlen.scheduling.one_shot.queue import RequestQueue
from varlen.scheduling.sequence import SequenceState

# Largest number of units, which bounds the time of a decision.
MAX_UNITS = 96


class Candidates:
    """Batches of consecutive units: `[i, k]` is the batch of units `i` to `i + k`.

    A unit is one sequence. With more than `MAX_UNITS` sequences, units in the second half are several sequences.
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
    single = min(count, MAX_UNITS // 2)
    others = min(count - single, MAX_UNITS - single)
    ends = single + np.arange(others + 1) * (count - single) // max(1, others)
    return np.concatenate([np.arange(single), ends])


def sliding_windows(values: FloatArray, size: int) -> FloatArray:
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
    return sliding_windows(padded, sizes)
