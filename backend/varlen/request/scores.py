"""Scores of classifiers: the functions between logits and what clients read."""

from typing import Literal, TypeAlias, get_args

import numpy as np

from varlen.request.request import Float32Array

ScoreFunction: TypeAlias = Literal["softmax", "sigmoid", "none"]
SCORE_FUNCTIONS: tuple[ScoreFunction, ...] = get_args(ScoreFunction)


def scores_of(logits: Float32Array, function: ScoreFunction) -> Float32Array:
    """Return the scores of logits, `[..., labels]` fp32; `none` returns the logits."""
    if function == "softmax":
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores: Float32Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
        return scores
    if function == "sigmoid":
        # tanh does not overflow
        scores = 0.5 * np.tanh(0.5 * logits) + 0.5
        return scores.astype(np.float32, copy=False)
    return logits
