"""Labels of tokens, as the client returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen_client.row_outputs import ANY_WIDTH, RowOutput, RowTask


@dataclass(frozen=True, slots=True)
class TokenLabel:
    """A token and its best label.

    Attributes:
        token: as the tokenizer writes it, such as "[CLS]", "##ing" or "▁London".
        label: its best one.
        score: of this label.
    """

    token: str
    label: str
    score: float


TOKEN_LABEL_TASK = RowTask(
    "predict_tokens",
    (
        RowOutput("scores", 2),
        RowOutput("labels", dtype=np.object_),
        RowOutput("tokens", dtype=np.object_, width=ANY_WIDTH),
        RowOutput("num_tokens", dtype=np.int32),
    ),
)


def read_token_labels(answer: tuple[npt.NDArray[Any], ...]) -> list[list[TokenLabel]]:
    """Return the labels of the tokens of each row of a request.

    Args:
        answer: the outputs of `TOKEN_LABEL_TASK`, whose rows are padded.
    """
    scores, labels, tokens, counts = answer
    best = scores.argmax(axis=2)  # [rows, tokens]
    return [
        [
            TokenLabel(
                tokens[row, at].decode(errors="replace"),
                labels[row, best[row, at]].decode(errors="replace"),
                float(scores[row, at, best[row, at]]),
            )
            for at in range(count)
        ]
        for row, count in enumerate(counts[:, 0].tolist())
    ]
