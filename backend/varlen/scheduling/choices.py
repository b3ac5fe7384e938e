"""What steps of generation choose: tokens, steps of searches and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.errors import VarlenError
from varlen.request.request import FinishReason, TokenLogprobs


class Draws(NamedTuple):
    """What the tokens of a step are drawn with, if nothing else changes their choice.

    Attributes:
        limits: temperature, top-k, top-p and min-p of each row.
        uniform: `[rows]` fp64, a random number from 0 to below 1 for each; None if all temperatures are 0.
    """

    limits: Sequence[tuple[float, int, float, float]]
    uniform: npt.NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was chosen for a sequence.

    Attributes:
        token_id: the token.
        logprobs: log probabilities, if the request asks for them.
        error: reason why no token could be chosen; ends the request.
        is_pending: whether no token could be chosen yet; the same token is computed again in the next step.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: VarlenError | None = None
    is_pending: bool = False


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """One of the answers that a beam search has found.

    Attributes:
        token_ids: generated tokens, with the end token.
        score: sum of log probabilities, divided by the length penalty.
        finish_reason: whether it ended with an end token, or at `max_tokens`.
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What one step of a beam search has chosen.

    Attributes:
        parents: parent index of each new beam; none once the search has ended.
        token_ids: token appended to each beam.
        answers: set once the search has ended: the best first. There are fewer than the request asks for, perhaps none,
            only if its rules allow fewer.
        error: reason why the search cannot go on; ends the request.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    answers: tuple[BeamAnswer, ...] | None = None
    error: VarlenError | None = None
