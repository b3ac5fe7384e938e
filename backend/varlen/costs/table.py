"""What a batch costs in seconds: measured on a grid, repaired, interpolated, and refined by the batches that run.

A grid point is a batch of sequences of one length. A mixed batch is read off the grid at the batch of one length that
has as many tokens and as large a sum of squared lengths: linear layers cost by the former, attention by the latter.
A padded batch is one of one length already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.config import Execution
from varlen.costs.batch_shape import BatchShape

FloatArray: TypeAlias = npt.NDArray[np.float64]

# What one batch may change of the points around it, and how much of that it does.
_MOST_SURPRISE = 1.25
_LEARNING_RATE = 0.1


class CostTable:
    """Seconds of any batch, from those measured. One thread at a time.

    Between grid points it is bilinear in (sequences, length), which is exact where a cost is affine in sequences,
    tokens and length; past the last point it goes on as between the last two, and below the first length it stays.
    """

    def __init__(self, samples: Mapping[tuple[int, int], float], execution: Execution) -> None:
        """Fill a grid from samples, and make it monotone.

        Args:
            samples: seconds by (sequences, length in tokens): at least two numbers of sequences, and one sequence
                of every length. Points of the grid that are missing are extrapolated in the number of sequences.
            execution: whether mixed batches pay for padding.

        Raises:
            ValueError: samples are missing, or not positive.
        """
        self.execution = execution
        _check(samples)
        self._counts = _Axis([count for count, _ in samples])
        self._lengths = _Axis([length for _, length in samples])
        self._use(_monotone(_fill(samples, self._counts.points, self._lengths.points)))

    @classmethod
    def of_function(
        cls,
        seconds: Callable[[int, int], float],
        execution: Execution,
        *,
        max_sequences: int,
        max_length: int,
    ) -> CostTable:
        """Return the table of a function of (sequences, length), sampled at powers of two."""
        counts, lengths = powers_of_two(max_sequences), powers_of_two(max_length)
        samples = {(n, length): seconds(n, length) for n in counts for length in lengths}
        return cls(samples, execution)

    @property
    def grid(self) -> dict[tuple[int, int], float]:
        """Seconds by (sequences, length) as they are used: filled, refined and monotone."""
        return {
            (int(count), int(length)): float(self._grid[row, column])
            for row, length in enumerate(self._lengths.points)
            for column, count in enumerate(self._counts.points)
        }

    def seconds(self, shape: BatchShape) -> float:
        """Return what a batch costs."""
        return float(self.seconds_of(*_arrays(shape))[0])

    def seconds_of(
        self, sequences: FloatArray, tokens: FloatArray, squares: FloatArray, longest: FloatArray
    ) -> FloatArray:
        """Return what batches cost; arguments are arrays of one shape, as in `BatchShape`."""
        counts, lengths = self._uniform(sequences, tokens, squares, longest)
        lengths = np.maximum(lengths, self._lengths.points[0])
        cells = self._lengths.cells_of(lengths)
        cells *= self._counts.cells
        cells += self._counts.cells_of(counts)
        constant, per_count, per_length, per_token = self._coefficients
        # (d l + b) n + c l + a
        seconds = per_token.take(cells)
        seconds *= lengths
        seconds += per_count.take(cells)
        seconds *= counts
        lengths *= per_length.take(cells)
        seconds += lengths
        seconds += constant.take(cells)
        return seconds

    def refine(self, shape: BatchShape, seconds: float) -> None:
        """Learn from a batch that ran: points near it move a little towards it, however far off it was."""
        surprise = np.clip(seconds / self.seconds(shape), 1 / _MOST_SURPRISE, _MOST_SURPRISE)
        counts, lengths = self._uniform(*_arrays(shape))
        near = np.outer(self._lengths.weights_of(lengths[0]), self._counts.weights_of(counts[0]))
        # of the grid as it is used: what the repair takes back must not add up unseen, to be unlearned later
        self._use(_monotone(self._grid * surprise ** (_LEARNING_RATE * near)))

    def _use(self, grid: FloatArray) -> None:
        """Take a grid, `[lengths, counts]`, into use: as a + b n + c l + d n l in each of its cells."""
        self._grid = grid
        if len(self._lengths.points) == 1:
            grid = np.repeat(grid, 2, axis=0)
        counts, lengths = self._counts.points[None, :-1], self._lengths.points[:, None]
        lengths = lengths[: self._lengths.cells]
        by_count = np.diff(grid, axis=1) / self._counts.steps
        by_length = np.diff(grid, axis=0)[:, :-1] / self._lengths.steps[:, None]
        per_token = np.diff(by_count, axis=0) / self._lengths.steps[:, None]
        per_count = by_count[:-1] - per_token * lengths
        per_length = by_length - per_token * counts
        constant = grid[:-1, :-1] - per_count * counts - by_length * lengths
        self._coefficients = tuple(
            np.ascontiguousarray(part).ravel()
            for part in (constant, per_count, per_length, per_token)
        )

    def _uniform(
        self, sequences: FloatArray, tokens: FloatArray, squares: FloatArray, longest: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return (sequences, length) of the batches of one length that cost as much."""
        if self.execution == "padded":
            return sequences, longest
        return tokens * tokens / squares, squares / tokens


class _Axis:
    """One side of the grid: its points, and in which cell between two of them a value lies.

    Attributes:
        points: ascending whole numbers.
        cells: between them; one if there is one point.
        steps: how long each cell is.
    """

    def __init__(self, values: list[int]) -> None:
        self.points = np.array(sorted(set(values)), dtype=float)
        self.cells = max(1, len(self.points) - 1)
        self.steps = np.diff(self.points) if len(self.points) > 1 else np.ones(1)
        # of every whole number up to the last point; the values looked up are many
        whole = np.arange(int(self.points[-1]) + 1)
        below = np.searchsorted(self.points, whole, side="right") - 1
        self._cell = np.clip(below, 0, self.cells - 1)

    def cells_of(self, values: FloatArray) -> npt.NDArray[np.intp]:
        """Return the cell of each value, the last one's for all past the end."""
        return self._cell.take(values.astype(np.intp), mode="clip")

    def weights_of(self, value: float) -> FloatArray:
        """Return how near each point is to a value: 1 in all, shared by the two around it."""
        return np.array([np.interp(value, self.points, unit) for unit in np.eye(len(self.points))])


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, which is the last whether it is one or not."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def _arrays(shape: BatchShape) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    values = (shape.sequences, shape.tokens, shape.squares, shape.longest)
    sequences, tokens, squares, longest = (np.array([float(value)]) for value in values)
    return sequences, tokens, squares, longest


def _check(samples: Mapping[tuple[int, int], float]) -> None:
    if len({count for count, _ in samples}) < 2:
        raise ValueError("batches of at least two sizes have to be measured")
    alone = {length for count, length in samples if count == 1}
    for length in {length for _, length in samples} - alone:
        raise ValueError(f"one sequence of {length} tokens was not measured")
    for seconds in samples.values():
        if not 0.0 < seconds < math.inf:
            raise ValueError(f"a batch took {seconds} s; all take more than 0")


def _fill(
    samples: Mapping[tuple[int, int], float], counts: FloatArray, lengths: FloatArray
) -> FloatArray:
    """Return `[lengths, counts]`; what was not measured goes on as between the two numbers before it."""
    grid = np.empty((len(lengths), len(counts)))
    for row, length in enumerate(lengths):
        known = np.array([n for n in counts if (int(n), int(length)) in samples])
        found = [samples[int(n), int(length)] for n in known]
        # one alone says nothing of a slope: each more is taken to cost as much again
        slope = found[0]
        if len(known) > 1:
            slope = max(0.0, (found[-1] - found[-2]) / (known[-1] - known[-2]))
        grid[row] = np.interp(counts, known, found) + slope * np.maximum(0.0, counts - known[-1])
    return grid


def _monotone(grid: FloatArray) -> FloatArray:
    """Return the grid, no value below one of fewer or shorter sequences: half way between raising and lowering."""
    raised = np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1)
    turned = grid[::-1, ::-1]
    lowered = np.minimum.accumulate(np.minimum.accumulate(turned, axis=0), axis=1)[::-1, ::-1]
    return np.asarray((raised + lowered) / 2)
