"""The most likely tokens of a mask, and their probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError, shorten
from varlen.request import MAX_TOP_K, Float32Array, Int32Array

DEFAULT_TOP_K = 5


@dataclass(frozen=True, slots=True)
class FilledToken:
    """A token that may take the place of a mask.

    Attributes:
        token_id, text: of the token.
        score: its probability.
    """

    token_id: int
    text: str
    score: float


def largest_top_k(vocabulary: int) -> int:
    """Return the most tokens that a request may ask for, given the number of all."""
    return min(MAX_TOP_K, vocabulary)


def check_top_k(top_k: int, most: int) -> None:
    """Raise RequestError unless it is from 1 to `most`."""
    if not 1 <= top_k <= most:
        raise RequestError(
            f"the parameter top_k is {shorten(str(top_k))}; this model takes 1 to {most}"
        )


def stacked(rows: Sequence[Float32Array], top_k: int) -> tuple[Int32Array, Float32Array]:
    """Return tokens and scores of all masks of all rows, `[rows, most masks, top_k]`, with zeros behind them.

    Args:
        rows: `[masks, 2, tokens]` fp32 each, numbers and probabilities of tokens, the most likely first.
        top_k: tokens of a mask.
    """
    masks = max(map(len, rows))
    filled: npt.NDArray[np.float32] = np.zeros((len(rows), masks, 2, top_k), np.float32)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = row[:, :, :top_k]
    return filled[:, :, 0].astype(np.int32), filled[:, :, 1].copy()
