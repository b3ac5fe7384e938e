"""The most likely tokens of a mask, and their probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.request.request import MAX_TOP_K, Float32Array

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
