"""Sparse vectors: numbers of terms in a vocabulary and their weights, the largest weight first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varlen.errors import RequestError, shorten
from varlen.request import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The terms of a text whose weight is not 0, the largest weight first.

    Attributes:
        indices: `[terms]` int32, numbers of terms: token ids.
        values: `[terms]` fp32, their weights, all positive.
    """

    indices: Int32Array
    values: Float32Array


def check_max_active_dims(value: int | None, size: int) -> None:
    """Raise RequestError unless it is None or at most the number of terms, `size`."""
    if value is not None and not 1 <= value <= size:
        raise RequestError(
            f"the parameter max_active_dims is {shorten(str(value))}; this model takes 1 to {size}"
        )


def sparse_vector(row: Float32Array, max_active_dims: int | None = None) -> SparseVector:
    """Return the vector of a row of the engine.

    Args:
        row: `[terms, 2]` fp32, numbers and weights of terms.
        max_active_dims: most terms of the vector, those of the largest weights; None is all.
    """
    row = row[:max_active_dims]
    return SparseVector(row[:, 0].astype(np.int32), row[:, 1].copy())


def padded(vectors: Sequence[SparseVector]) -> tuple[Int32Array, Float32Array]:
    """Return numbers and weights of terms of all vectors, `[vectors, most terms]`, with zeros behind them.

    There is room for one term at least: some clients cannot read a tensor without elements.
    """
    shape = len(vectors), max(1, *(len(each.indices) for each in vectors))
    indices, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, vector in enumerate(vectors):
        indices[row, : len(vector.indices)] = vector.indices
        values[row, : len(vector.values)] = vector.values
    return indices, values
