"""The device's choice of tokens in a step, and the tokens and answers that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.errors import VarlenError
from varlen.request.request import FinishReason, Float32Array, Int32Array, TokenLogprobs


class EditLimits(NamedTuple):
    """Room for edit lists on the device.

    Attributes:
        entries: largest number of tokens of a list.
    """

    slots: int
    entries: int


# Instead of whether a search has ended: the launch was over before.
NOT_TAKEN = -1
# Seconds of a launch of steps: until its end no client is found to be gone.
LAUNCH_SECONDS = 0.04


class Edits(NamedTuple):
    """Changes of logits before tokens are drawn, as `reference.edit_logits` takes them.

    Attributes:
        rows: `[edited rows, EDIT_COLUMNS]` int32.
        penalties: `[edited rows, 3]` fp32.
        tokens, counts, biases: `[entries]`, the lists that the host sends, see `EditLists`.
    """

    rows: Int32Array
    penalties: Float32Array
    tokens: Int32Array
    counts: Int32Array
    biases: Float32Array


class Draws(NamedTuple):
    """Random numbers, limits and edits with which the tokens of a step are drawn.

    Attributes:
        limits: temperature, top-k, top-p and min-p of each row.
        uniform: `[rows]` fp64, a random number from 0 to below 1 for each; None if all temperatures are 0.
        edits: changes of the logits before that, if there are any.
    """

    limits: Sequence[tuple[float, int, float, float]]
    uniform: npt.NDArray[np.float64] | None
    edits: Edits | None = None


class SearchRules(NamedTuple):
    """Rules of a step of a search, beside log probabilities and its steps so far.

    Attributes:
        is_last: whether the token that is chosen is the last one.
        ends_when_full: whether it ends once there are as many answers as beams.
        forced: the only token that may come; None if there is a choice.
        banned: `[banned]` int32, tokens that may not come.
        divisor: length penalty of an answer that ends with this token.
        best_divisor: length penalty of the best answer that a beam may still become.
    """

    num_beams: int
    is_last: bool
    ends_when_full: bool
    forced: int | None
    end_ids: tuple[int, ...]
    banned: Int32Array
    divisor: float
    best_divisor: float


class DevicePlan(NamedTuple):
    """Rules of the choices that the device makes in a step.

    Attributes:
        draws: numbers that tokens are drawn with, for each row of logits; None if the host chooses them, or there are
            none.
        searches: rules of each search of the step that chooses; None if the host takes its step.
        is_whole: whether the host chooses nothing.
        renormalizes: whether log probabilities are normalized again without banned tokens.
        later: `[later steps, searches, 2]` fp64, the divisors of each search in the steps that may follow in the same
            launch. All else is as in this step.
    """

    draws: Draws | None = None
    searches: Sequence[SearchRules | None] = ()
    is_whole: bool = False
    renormalizes: bool = False
    later: npt.NDArray[np.float64] | None = None


class ChosenBeams(NamedTuple):
    """Results of searches on the device, see `reference.SearchResults`.

    Each array has a row for each step of a launch. A step that a search did not take has `NOT_TAKEN` in `ends`.
    """

    ends: Int32Array
    beams: Int32Array
    scores: Float32Array


class Chosen(NamedTuple):
    """Tokens and beams that the device has chosen.

    Attributes:
        token_ids: token of each row of logits, if tokens were drawn; else empty.
        searches: steps of searches, if any were taken.
        guesses: tokens that a draft model has drafted, one for each drafted row.
    """

    token_ids: Sequence[int] = ()
    searches: ChosenBeams | None = None
    guesses: Sequence[int] = ()


class SampledToken(NamedTuple):
    """A token that was chosen for a sequence; a tuple, as `Chunk` is one.

    Attributes:
        logprobs: log probabilities, if the request asks for them.
        error: reason why no token could be chosen; ends the request.
        is_pending: whether no token could be chosen yet; the same token is computed again in the next step.
        guess: the token of its row, if a draft model has drafted it.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: VarlenError | None = None
    is_pending: bool = False
    guess: int | None = None


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
    """Beams that one step of a search has chosen, or its answers.

    Attributes:
        parents: parent index of each new beam; none once the search has ended. Several steps follow one another.
        token_ids: token appended to each beam; none where the device has chosen them, which tells only answers.
        answers: set once the search has ended: the best first. There are fewer than the request asks for, perhaps none,
            only if its rules allow fewer.
        error: reason why the search cannot go on; ends the request.
        count: number of its steps in one launch; 0 if it has to be launched again.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    answers: tuple[BeamAnswer, ...] | None = None
    error: VarlenError | None = None
    count: int = 1
