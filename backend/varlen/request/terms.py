"""Terms of a vocabulary in answers: sparse vectors, and the most likely tokens of masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.request.request import MAX_TOP_K, Float32Array, Int32Array


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


DEFAULT_TOP_K = 5


@dataclass(frozen=True, slots=True)
class FilledToken:
    """A token that may take the place of a mask.

    Attributes:
        score: its probability.
    """

    token_id: int
    text: str
    score: float


def largest_top_k(vocabulary: int) -> int:
    """Return the largest allowed `top_k` for a vocabulary size."""
    return min(MAX_TOP_K, vocabulary)


def mask_tensors(
    rows: Sequence[Float32Array], top_k: int, token_text: Callable[[int], str] | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of all rows by name, `[rows, most masks, top_k]`, with zeros behind their masks.

    Args:
        rows: `[masks, 2, tokens]` fp32 each, numbers and probabilities of tokens, the most likely first.
        token_text: returns the text of a token; None leaves the texts out.
    """
    counts = [len(row) for row in rows]
    filled = np.zeros((len(rows), max(counts), 2, top_k), np.float32)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = row[:, :, :top_k]
    token_ids = filled[:, :, 0].astype(np.int32)
    tensors: dict[str, npt.NDArray[Any]] = {
        "token_ids": token_ids,
        "scores": filled[:, :, 1].copy(),
        "num_masks": np.array(counts, np.int32)[:, None],
    }
    if token_text is not None:
        tensors["tokens"] = np.full(token_ids.shape, b"", dtype=np.object_)
        for texts, ids, count in zip(tensors["tokens"], token_ids, counts, strict=True):
            texts[:count] = [
                [token_text(token).encode() for token in mask] for mask in ids[:count].tolist()
            ]
    return tensors
