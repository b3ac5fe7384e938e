"""Scores of classifiers: the functions between logits and the scores of clients."""

from typing import Literal, TypeAlias

import numpy as np

from varlen.request.request import Float32Array

ScoreFunction: TypeAlias = Literal["softmax", "sigmoid", "none"]


def scores_of(logits: Float32Array, function: ScoreFunction) -> Float32Array:
    """Return the scores of logits, `[..., labels]` fp32; `none` returns the logits.

    They are computed in fp64 and rounded once; see docs/decisions/0079-scores-to-the-last-digit.md.
    """
    if function == "none":
        return logits
    wide = logits.astype(np.float64)
    if function == "softmax":
        exponentials = np.exp(wide - wide.max(axis=-1, keepdims=True))
        scores = exponentials / exponentials.sum(axis=-1, keepdims=True)
    else:
        # the exponent is never positive, so nothing overflows
        exponentials = np.exp(-np.abs(wide))
        scores = np.where(wide < 0, exponentials, 1) / (1 + exponentials)
    rounded: Float32Array = scores.astype(np.float32)
    return rounded
