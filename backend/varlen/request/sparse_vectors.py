"""Sparse vectors: numbers of terms in a vocabulary and their weights, the largest weight first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.request.request import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The terms of a text whose weight is not 0, the largest weight first.

    Attributes:
        indices: `[terms]` int32, numbers of terms: token ids.
        values: `[terms]` fp32, their weights: positive, or as a table of queries has them.
    """

    indices: Int32Array
    values: Float32Array


def terms_in_order(terms: npt.NDArray[np.integer[Any]], weights: Float32Array) -> Float32Array:
    """Return the row of the engine for terms, the largest weight first, `[terms, 2]` fp32.

    fp32 holds the number of a term exactly up to 2**24. Among equal weights, the lower number comes first.

    Args:
        terms: `[terms]`, their numbers, ascending.
        weights: `[terms]`; a negative one is as large as without its sign.
    """
    order = np.argsort(-np.abs(weights), kind="stable")
    rows: Float32Array = np.stack(
        (terms[order], weights[order]), axis=1, dtype=np.float32, casting="unsafe"
    )
    return rows


def sparse_vector(row: Float32Array, max_active_dims: int | None = None) -> SparseVector:
    """Return the vector of a row of the engine.

    Args:
        row: `[terms, 2]` fp32, numbers and weights of terms.
        max_active_dims: number of largest weights to keep; None keeps all.
    """
    row = row[:max_active_dims]
    return SparseVector(row[:, 0].astype(np.int32), row[:, 1].copy())


def sparse_tensors(
    vectors: Sequence[SparseVector], term_text: Callable[[int], str] | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of all vectors by name, `[vectors, most terms]`, with zeros behind their terms.

    There is room for one term at least: some clients cannot read a tensor without elements.

    Args:
        term_text: returns the text of a term; None leaves the texts out.
    """
    counts = [len(vector.indices) for vector in vectors]
    shape = len(vectors), max(1, *counts)
    indices, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, vector in enumerate(vectors):
        indices[row, : counts[row]] = vector.indices
        values[row, : counts[row]] = vector.values
    tensors: dict[str, npt.NDArray[Any]] = {
        "indices": indices,
        "values": values,
        "num_terms": np.array(counts, np.int32)[:, None],
    }
    if term_text is not None:
        tensors["terms"] = np.full(shape, b"", dtype=np.object_)
        for texts, vector in zip(tensors["terms"], vectors, strict=True):
            texts[: len(vector.indices)] = [
                term_text(term).encode() for term in vector.indices.tolist()
            ]
    return tensors
