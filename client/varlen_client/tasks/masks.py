"""Tokens for masks: `fill_mask`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from typing_extensions import Unpack

from varlen_client.tasks.answers import RowAnswers, RowOutput, text_of
from varlen_client.tasks.command import Command, Flag, shown_score
from varlen_client.tasks.row_task import Asked, RowOptions, RowTask, method
from varlen_client.wire import Inputs


class MaskOptions(RowOptions, total=False):
    """Options of filled masks.

    top_k: tokens of a mask; by default 5.
    """

    top_k: int | None


@dataclass(frozen=True, slots=True)
class FilledToken:
    """A token that may take the place of a mask.

    Attributes:
        token_id, text: number and text of the token.
        score: probability of the token.
    """

    token_id: int
    text: str
    score: float


def _read_filled_masks(answers: RowAnswers) -> list[list[list[FilledToken]]]:
    """Return the tokens of each mask of each row."""
    return [
        [
            [
                FilledToken(token_id, text_of(text), score)
                for token_id, text, score in zip(ids, texts, values, strict=True)
            ]
            for ids, texts, values in zip(
                token_ids[row, :count].tolist(),
                tokens[row, :count].tolist(),
                scores[row, :count].tolist(),
                strict=True,
            )
        ]
        for token_ids, tokens, scores, counts in answers.each(
            "token_ids", "tokens", "scores", "num_masks"
        )
        for row, count in enumerate(counts[:, 0].tolist())
    ]


FILL_MASK: RowTask[list[list[list[FilledToken]]]] = RowTask(
    "fill_mask",
    MaskOptions,
    (
        RowOutput("token_ids", 2, np.int32),
        RowOutput("scores", 2),
        RowOutput("tokens", 2, np.object_),
        RowOutput("num_masks", dtype=np.int32),
    ),
    _read_filled_masks,
    command=Command(
        task="fill_mask",
        words=("fills masks", "tokens for masks", "a masked language model"),
        summary="Print the most likely tokens of each mask.",
        details="A line per mask, the likeliest token first.",
        texts='Texts with masks: "Paris is the [MASK] of France."',
        file="Fill the lines of this UTF-8 file; - is stdin.",
        progress="filling",
        flags={"top_k": Flag(int | None, "Tokens of each mask; default: 5.", min=1)},
        fields=lambda masks: {"masks": [[asdict(token) for token in mask] for mask in masks]},
        lines=lambda masks: [
            ", ".join(f"{each.text} {shown_score(each.score)}" for each in mask) for mask in masks
        ],
    ),
)


class MaskMethods:
    """Methods for masks."""

    @method
    def fill_mask(
        self, inputs: Inputs, **options: Unpack[MaskOptions]
    ) -> Asked[list[list[list[FilledToken]]]]:
        """Return the most likely tokens of each mask of each row, the most likely first.

        Args:
            inputs: texts or lists of token ids with 1 to 8 masks, such as "Paris is the [MASK] of France.".
        """
        return FILL_MASK.of(inputs, options)
