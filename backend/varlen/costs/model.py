"""Shape and limits of batches, and their seconds by five numbers fitted to measured ones.

    seconds = max(floor, fixed + s * sequences + t * tokens + q * sum of squared lengths)

Linear layers cost by tokens, and attention by squared lengths. The floor is a batch that is too small to fill a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from varlen.config import Execution

FloatArray: TypeAlias = npt.NDArray[np.float64]
_Number = TypeVar("_Number", int, FloatArray)

# Share of the logarithmic difference by which one batch moves its prediction, and the largest ratio that counts: other
# work on the machine makes single batches many times slower.
_LEARNING_RATE = 0.1
_LARGEST_DIFFERENCE = 1.25
# Sums of squared relative errors that differ by less are equal but for rounding.
_EQUAL_ERRORS = 1e-12


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


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """A batch that ran.

    Attributes:
        lengths: tokens of each sequence.
    """

    lengths: tuple[int, ...]
    seconds: float

    @property
    def shape(self) -> BatchShape:
        return BatchShape.of(self.lengths)


class CostModel:
    """Predicts the seconds of batches. Not thread-safe.

    A batch never costs less for more or for longer sequences, since no number is negative.
    """

    def __init__(self, batches: Iterable[MeasuredBatch], execution: Execution) -> None:
        """Fit the model by least squares of the relative error.

        Args:
            execution: whether batches pay for padding.

        Raises:
            ValueError: there are no batches, or a time is not positive.
        """
        self.execution = execution
        measured = list(batches)
        if not measured:
            raise ValueError("at least one batch has to be measured")
        for batch in measured:
            if not 0.0 < batch.seconds < math.inf:
                raise ValueError(f"a batch took {batch.seconds} s; allowed: more than 0")
        terms = np.array([self._terms_of(batch.shape) for batch in measured], float)
        seconds = np.array([batch.seconds for batch in measured])
        self._floor, coefficients = _fit(terms, seconds)
        self._coefficients: list[float] = coefficients.tolist()

    @classmethod
    def of_function(
        cls,
        seconds: Callable[[int, int], float],
        execution: Execution,
        *,
        max_sequences: int,
        max_length: int,
    ) -> CostModel:
        """Return the model fitted to a function of (sequences, length), at powers of two."""
        return cls(
            (
                MeasuredBatch((length,) * count, seconds(count, length))
                for count in powers_of_two(max_sequences)
                for length in powers_of_two(max_length)
            ),
            execution,
        )

    @property
    def fixed_seconds(self) -> float:
        """Seconds that every batch above the floor takes, whatever its size."""
        return self._coefficients[0]

    def seconds(self, shape: BatchShape) -> float:
        return max(self._floor, sum(self._parts(shape)))

    def seconds_of(
        self, sequences: FloatArray, tokens: FloatArray, squares: FloatArray, longest: FloatArray
    ) -> FloatArray:
        """Return the predicted seconds of batches; arguments are arrays of one shape, as in `BatchShape`."""
        _, sequences, tokens, squares = self._terms(sequences, tokens, squares, longest)
        fixed, per_sequence, per_token, per_square = self._coefficients
        linear = fixed + per_sequence * sequences + per_token * tokens + per_square * squares
        return np.asarray(np.maximum(linear, self._floor))

    def refine(self, shape: BatchShape, seconds: float) -> None:
        """Move the prediction for a batch a little towards its measured time."""
        parts = self._parts(shape)
        linear = sum(parts)
        predicted = max(self._floor, linear)
        difference = math.log(
            min(max(seconds / predicted, 1 / _LARGEST_DIFFERENCE), _LARGEST_DIFFERENCE)
        )
        step = _LEARNING_RATE * difference
        if self._floor > linear:
            self._floor *= math.exp(step)
        else:
            # each number moves by its share in the cost; the steps add up to `step`
            shares = [part / linear for part in parts]
            step /= sum(share * share for share in shares)
            pairs = zip(self._coefficients, shares, strict=True)
            self._coefficients = [number * math.exp(step * share) for number, share in pairs]

    def _parts(self, shape: BatchShape) -> list[float]:
        # one batch is asked for often: numbers of Python take a tenth of the time of arrays
        pairs = zip(self._coefficients, self._terms_of(shape), strict=True)
        return [number * term for number, term in pairs]

    def _terms_of(self, shape: BatchShape) -> tuple[int, int, int, int]:
        return self._terms(shape.sequences, shape.tokens, shape.squares, shape.longest)

    def _terms(
        self, sequences: _Number, tokens: _Number, squares: _Number, longest: _Number
    ) -> tuple[int, _Number, _Number, _Number]:
        if self.execution == "padded":
            tokens = sequences * longest
            squares = tokens * longest
        return 1, sequences, tokens, squares


# Terms in the order in which they explain a few batches, which several sets of them fit: every token costs something.
_FIRST = [2, 0, 1, 3]


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, which is always the last."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def _fit(terms: FloatArray, seconds: FloatArray) -> tuple[float, FloatArray]:
    """Return the floor and the coefficients of least squared relative error.

    Every measured time but the smallest is tried as the floor, and the coefficients are fitted to the batches above
    it. A floor at the smallest time would explain one batch only.
    """
    least, best = math.inf, (0.0, np.zeros(terms.shape[1]))
    relative = terms / seconds[:, None]
    for floor in (0.0, *np.sort(seconds)[1:]):
        above = seconds > floor
        if floor and above.sum() <= terms.shape[1]:
            break
        coefficients = np.zeros(terms.shape[1])
        coefficients[_FIRST] = non_negative_least_squares(relative[above][:, _FIRST])
        error = float(np.square(np.maximum(floor / seconds, relative @ coefficients) - 1).sum())
        if error < least:
            least, best = error, (float(floor), coefficients)
        if least < _EQUAL_ERRORS:
            # an exact fit, as of assumed costs, which are a function of these terms
            break
    return best


def non_negative_least_squares(terms: FloatArray) -> FloatArray:
    """Return the coefficients, none negative, whose weighted sum of terms is closest to 1.

    The terms are few, so every subset is tried as those that are not zero. Many subsets fit two batches equally
    well; the first of the smallest is chosen.
    """
    scale = terms.max(axis=0)
    scaled = terms / scale
    count = terms.shape[1]
    least, best = math.inf, np.zeros(count)
    for size in range(1, count + 1):
        for subset in map(list, combinations(range(count), size)):
            solution, *_ = np.linalg.lstsq(scaled[:, subset], np.ones(len(terms)), rcond=None)
            error = float(np.square(scaled[:, subset] @ solution - 1).sum())
            if (solution >= 0).all() and error < least - _EQUAL_ERRORS:
                least, best = error, np.zeros(count)
                best[subset] = solution
    return np.asarray(best / scale)
