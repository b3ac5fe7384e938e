"""Sparse vectors of texts, as the client returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen_client.row_outputs import RowOutput, RowTask


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The terms of a text and their weights, the largest weight first.

    Attributes:
        indices: [terms] int32, numbers of the terms in the model's vocabulary.
        values: [terms] fp32, their weights, all positive.
        terms: their texts, if they were asked for.
    """

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    terms: tuple[str, ...] = ()


def sparse_task(*, with_terms: bool) -> RowTask:
    """Return what `sparse_embed` requests."""
    outputs = (
        RowOutput("indices", dtype=np.int32),
        RowOutput("values"),
        RowOutput("num_terms", dtype=np.int32),
    )
    terms = RowOutput("terms", dtype=np.object_)
    return RowTask("sparse_embed", (*outputs, terms) if with_terms else outputs)


def read_sparse_vectors(answer: tuple[npt.NDArray[Any], ...]) -> list[SparseVector]:
    """Return the vectors of the rows of a request.

    Args:
        answer: the outputs of `sparse_task`; the rows of `indices`, `values` and `terms` are padded.
    """
    indices, values, counts, *more = answer
    vectors = []
    for row, count in enumerate(counts[:, 0].tolist()):
        terms = [term.decode(errors="replace") for term in more[0][row, :count]] if more else []
        # not views, which would keep the whole response alive
        vectors.append(
            SparseVector(indices[row, :count].copy(), values[row, :count].copy(), tuple(terms))
        )
    return vectors
