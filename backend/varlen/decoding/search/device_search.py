"""Beam searches whose steps are taken where the logits are, without the host.

The rules of such a step depend only on the number of tokens. The host keeps the beams that each step has chosen, and
puts the answers together once the search has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from varlen.decoding.sampling.token_bias import NOTHING_FORBIDDEN, ForbiddenTokens
from varlen.decoding.search.beam_search import length_penalty, stops_when_full
from varlen.decoding.search.token_edits import TokenEditor, TokenRules
from varlen.request.generation import GenerationOptions
from varlen.request.request import FinishReason, Float32Array, Int32Array
from varlen.scheduling.device_plan import NOT_TAKEN, BeamAnswer, BeamStep, SearchRules

# The divisors that `SearchRules` has, step by step.
Divisors: TypeAlias = list[tuple[float, float]]


def can_leave_to_device(options: GenerationOptions, forbidden: ForbiddenTokens) -> bool:
    """Return whether the steps of a search depend neither on its tokens nor on chance.

    Args:
        forbidden: tokens of its bad words.
    """
    return not (
        options.do_sample
        or options.num_beam_groups > 1
        or options.diversity_type == "sibling"
        or options.logit_bias
        or options.repetition_penalty != 1
        or options.no_repeat_ngram_size
        or forbidden.longest
    )


class DeviceSearch:
    """A search of one prompt, as the host knows it."""

    def __init__(
        self,
        options: GenerationOptions,
        prompt_ids: Sequence[int],
        *,
        rules: TokenRules,
        vocab_size: int,
        forbidden: ForbiddenTokens = NOTHING_FORBIDDEN,
    ) -> None:
        """Start a search; arguments as in `BeamSearch`."""
        self._options = options
        self._editor = TokenEditor.of_request(
            rules, options, prompt_ids, vocab_size=vocab_size, forbidden=forbidden
        )
        self._end_ids = self._editor.end_ids
        # of each step: parents of its beams and their tokens, `[beams, 2]`
        self._steps: list[Int32Array] = []

    def rules(self, num_generated: int) -> SearchRules:
        """Return the rules of the step that chooses the token after this number of them."""
        options, length = self._options, num_generated + 1
        return SearchRules(
            options.num_beams,
            length >= options.max_tokens,
            stops_when_full(options),
            self._editor.forced(num_generated),
            self._end_ids,
            self._editor.banned(num_generated),
            *self._divisors(length),
        )

    def later(self, num_generated: int, rules: SearchRules, count: int) -> Divisors | None:
        """Return the divisors of later steps; None if more of their rules differs.

        Args:
            num_generated: number of tokens of each beam before the first step.
            count: number of later steps, at least one.
        """
        last = num_generated + count
        # bans end with a number of tokens, so the steps between have the same ones
        if rules.is_last or rules.forced is not None or last + 1 >= self._options.max_tokens:
            return None
        if self._editor.forced(last) is not None:
            return None
        if not np.array_equal(self._editor.banned(last), rules.banned):
            return None
        return [self._divisors(length) for length in range(num_generated + 2, last + 2)]

    def _divisors(self, length: int) -> tuple[float, float]:
        """Return both divisors of a step that chooses the last of these tokens."""
        options = self._options
        is_never = options.early_stopping == "never" and options.length_penalty > 0
        divisor = length_penalty(options, length)
        return divisor, length_penalty(options, options.max_tokens) if is_never else divisor

    def read(
        self,
        num_generated: int,
        ends: Sequence[Sequence[int]],
        beams: Int32Array,
        scores: Float32Array,
    ) -> BeamStep:
        """Return what a launch has chosen, without the tokens unless the search has ended.

        Args:
            num_generated: number of tokens of each beam before its first step.
            ends, beams, scores: the part of `ChosenBeams` of this search.
        """
        count = sum([end[0] != NOT_TAKEN for end in ends])
        # a step that failed was taken again
        del self._steps[num_generated:]
        # not a view of the beams of all searches of the step
        self._steps.extend(beams[:count, :, :2].copy())
        if not count or not ends[count - 1][0]:
            return BeamStep(tuple(beams[:count, :, 0].ravel().tolist()), (), count=count)
        rows = range(min(ends[count - 1][1], self._options.n))
        best, of_best = beams[count - 1], scores[count - 1]
        answers = tuple([self._answer(best[i], float(of_best[i])) for i in rows])
        return BeamStep((), (), answers, count=count)

    def _answer(self, found: Int32Array, score: float) -> BeamAnswer:
        token, beam, length = found[2:].tolist()
        reason: FinishReason = "stop" if token in self._end_ids else "length"
        tokens = [token]
        for step in reversed(self._steps[: length - 1]):
            beam, token = step[beam].tolist()
            tokens.append(token)
        return BeamAnswer(tuple(reversed(tokens)), score, reason)
