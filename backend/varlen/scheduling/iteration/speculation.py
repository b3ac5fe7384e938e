"""Drafts of the next tokens of a sequence, which one step verifies.

The last tokens are looked up in the tokens before them, and what followed there is the draft. Or a smaller model drafts
them in the step itself. Each drafted token is a row of the step, as a token of another sequence is. Its choice counts
if the rows before it chose the drafted tokens. docs/decisions/0134-drafted-tokens.md has the reasons.

Source: prompt lookup decoding (Saxena 2023) and LLMA (Yang et al. 2023, arXiv:2304.04487); draft models as in Leviathan
et al. 2023 (arXiv:2211.17192), but drawn with the random number of each position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

# Places of an n-gram that are compared, up to this many tokens, and tokens that a step adds to the index of a sequence.
_PLACES, _LONGEST, _INDEXED = 8, 16, 1024
# Weight of a guess, relative to the next one; what is kept of guesses of a model in a step.
_MEMORY, _KEPT = 0.9, 63 / 64
# Instead of a drafted token that is not known before the step.
UNKNOWN_GUESS = -1


@dataclass(frozen=True, slots=True)
class Speculation:
    """Limits of drafts.

    Attributes:
        num_tokens: longest draft, in tokens.
        shortest: number of last tokens that have to be found again; 0 if a model drafts.
    """

    num_tokens: int
    shortest: int

    def new_drafter(self) -> Drafter | ModelDrafter:
        return Drafter(self) if self.shortest else ModelDrafter(self)


class ModelDrafter:
    """Decides how many tokens of one sequence a model drafts in a step."""

    def __init__(self, limits: Speculation) -> None:
        self._num_tokens = limits.num_tokens
        # weighted numbers of right guesses and of all
        self._right, self._all = 1.0, 2.0

    def draft(
        self,
        token_ids: Sequence[int],  # noqa: ARG002  # of every drafter
        num_unknown: int,
        most: int,
        least: float,
    ) -> tuple[list[int], float]:
        """Return places of guesses, and how many are probably chosen; see `Drafter.draft`."""
        # one that drafts nothing is tried again
        self._right = _KEPT * self._right + (1 - _KEPT)
        self._all = _KEPT * self._all + 2 * (1 - _KEPT)
        rate = self._right / self._all
        count, expected = _count_of(rate, rate, min(most, self._num_tokens), least)
        return [UNKNOWN_GUESS] * (num_unknown + count if count else 0), expected

    def learn(self, rows: int, accepted: int) -> None:
        """Learn how many of the rows that ran were chosen; the next one was wrong."""
        for row in range(min(rows, accepted + 1)):
            self._all = _MEMORY * self._all + 1
            self._right = _MEMORY * self._right + (row < accepted)


def _count_of(rate: float, probability: float, longest: int, least: float) -> tuple[int, float]:
    """Return how many tokens are drafted, and how many of these are probably chosen.

    Args:
        rate: probability that a guess is right if those before it are.
        probability: the first token's.
    """
    count, expected = 0, 0.0
    while count < longest and probability >= least:
        count, expected = count + 1, expected + probability
        probability *= rate
    return count, expected


class Drafter:
    """Guesses the tokens of one sequence in each step, whether they run or not."""

    def __init__(self, limits: Speculation) -> None:
        self._num_tokens, self._size = limits.num_tokens, limits.shortest
        # end of the last n-gram by its tokens, and for each end of one the end of the equal one before it, or 0
        self._ends: dict[tuple[int, ...], int] = {}
        self._before = array("i")
        # the last guess and its position; weighted numbers of right guesses and of all
        self._guess: list[int] = []
        self._position = 0
        self._right, self._all = 1.0, 2.0

    def draft(
        self, token_ids: Sequence[int], num_unknown: int, most: int, least: float
    ) -> tuple[list[int], float]:
        """Return guesses of the next tokens, and how many drafted ones are probably chosen.

        Args:
            token_ids: known tokens of the sequence; grows from call to call.
            num_unknown: tokens behind them that steps in flight choose; they are guessed before the draft.
            most: longest draft.
            least: least probability of a drafted token, above 0.
        """
        known = token_ids[self._position :]
        for guess, token_id in zip(self._guess, known, strict=False):
            self._all = _MEMORY * self._all + 1
            self._right = _MEMORY * self._right + (guess == token_id)
            if guess != token_id:
                self._guess = []
                break
        longest = min(most, self._num_tokens)
        self._position = len(token_ids)
        self._guess = self._guess[len(known) :]
        if len(self._guess) < num_unknown + longest:
            self._guess = self._look_up(token_ids, num_unknown + longest + _LONGEST)
        rate = self._right / self._all
        count, expected = _count_of(rate, rate ** (num_unknown + 1), longest, least)
        return (
            (self._guess[: num_unknown + count], expected) if count and self._guess else ([], 0.0)
        )

    def learn(self, rows: int, accepted: int) -> None:
        """Do nothing: guesses are compared in each step."""

    def _look_up(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return what followed the last tokens where they came before; none if they are new."""
        length, size, before, ends = len(token_ids), self._size, self._before, self._ends
        first = size + len(before)
        for end in range(first, min(length, first + _INDEXED)):
            ngram = tuple(token_ids[end - size : end])
            before.append(ends.get(ngram, 0))
            ends[ngram] = end
        if not size < length <= size + len(before):
            return []
        end = ends.get(tuple(token_ids[-size:]), 0)
        found = most = 0
        for _ in range(_PLACES):
            if not end:
                break
            equal = size
            while equal < min(_LONGEST, end) and token_ids[end - equal - 1] == token_ids[~equal]:
                equal += 1
            if equal > most:
                found, most = end, equal
            end = before[end - size]
        # a guess that reaches the end of the text goes on with itself
        return [token_ids[found + i % (length - found)] for i in range(count)] if found else []
