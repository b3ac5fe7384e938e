"""Tokens that fill the masks of texts, as the client returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen_client.row_outputs import RowOutput, RowTask


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


MASK_TASK = RowTask(
    "fill_mask",
    (
        RowOutput("token_ids", 2, np.int32),
        RowOutput("scores", 2),
        RowOutput("tokens", 2, np.object_),
        RowOutput("num_masks", dtype=np.int32),
    ),
)


def read_filled_masks(answer: tuple[npt.NDArray[Any], ...]) -> list[list[list[FilledToken]]]:
    """Return the tokens of each mask of each row of a request.

    Args:
        answer: the outputs of `MASK_TASK`, whose rows are padded.
    """
    token_ids, scores, tokens, counts = answer
    return [
        [
            [
                FilledToken(token_id, text.decode(errors="replace"), score)
                for token_id, text, score in zip(
                    token_ids[row, mask].tolist(),
                    tokens[row, mask].tolist(),
                    scores[row, mask].tolist(),
                    strict=True,
                )
            ]
            for mask in range(count)
        ]
        for row, count in enumerate(counts[:, 0].tolist())
    ]
