"""Drafts of the next tokens of a sequence, which one step verifies.

Texts repeat their prompts and themselves. The last tokens of a sequence are looked up in the tokens before them, and
what followed there is the draft. Each drafted token is a further row of the step, as a token of another sequence is. A
row chooses the token after its own, with the random number of that position. It counts if the rows before it chose
the drafted tokens. So the tokens are the ones without drafts, several in a step.

Source: prompt lookup decoding (Saxena 2023) and LLMA (Yang et al. 2023, arXiv:2304.04487); names of vLLM.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

# Places of an n-gram that are compared, the last first, and tokens that a step adds to the index of a sequence.
_PLACES, _INDEXED = 8, 1024
# Weight of a guess, relative to the next one.
_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Speculation:
    """Limits of drafts.

    Attributes:
        num_tokens: longest draft, in tokens.
        shortest, longest: tokens at the end of a sequence that have to be found again, and that are compared.
    """

    num_tokens: int
    shortest: int
    longest: int


class Drafter:
    """Drafts the tokens of one sequence.

    It guesses in each step, whether the guess runs or not, and so knows how often it is right.
    """

    def __init__(self, limits: Speculation) -> None:
        self._limits = limits
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
        """Return tokens that probably follow, and how many of them are expected to be chosen.

        Args:
            token_ids: known tokens of the sequence; grows from call to call.
            num_unknown: tokens behind them that steps in flight choose. The draft begins after these.
            most: longest draft.
            least: least probability of a drafted token, above 0.
        """
        self._learn(token_ids)
        longest = min(most, self._limits.num_tokens)
        self._position = len(token_ids)
        self._guess = self._look_up(token_ids, num_unknown + longest)
        rate = self._right / self._all
        count, expected, probability = 0, 0.0, rate ** (num_unknown + 1)
        while count < longest and probability >= least:
            count, expected = count + 1, expected + probability
            probability *= rate
        draft = self._guess[num_unknown : num_unknown + count]
        return draft, expected if draft else 0.0

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Compare the last guess with the tokens that came, up to the first that differs."""
        begin = self._position
        came = token_ids[begin : begin + len(self._guess)]
        for guess, token_id in zip(self._guess, came, strict=False):
            self._all = _MEMORY * self._all + 1
            self._right = _MEMORY * self._right + (guess == token_id)
            if guess != token_id:
                break

    def _look_up(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return what followed the last tokens where they came before; none if they are new."""
        length, (shortest, longest) = len(token_ids), (self._limits.shortest, self._limits.longest)
        if not self._index(token_ids):
            return []
        end = self._ends.get(tuple(token_ids[length - shortest :]), 0)
        found = size = 0
        for _ in range(_PLACES):
            if not end or size == longest:
                break
            equal = shortest
            while equal < min(longest, end) and (
                token_ids[end - equal - 1] == token_ids[length - equal - 1]
            ):
                equal += 1
            if equal > size:
                found, size = end, equal
            end = self._before[end - shortest]
        if not found:
            return []
        # a guess that reaches the end of the text goes on with itself
        period = length - found
        return [token_ids[found + place % period] for place in range(count)]

    def _index(self, token_ids: Sequence[int]) -> bool:
        """Index n-grams before the last one; return whether all are."""
        size, before, ends = self._limits.shortest, self._before, self._ends
        first = size + len(before)
        for end in range(first, min(len(token_ids), first + _INDEXED)):
            ngram = tuple(token_ids[end - size : end])
            before.append(ends.get(ngram, 0))
            ends[ngram] = end
        return size + len(before) >= len(token_ids) > size
