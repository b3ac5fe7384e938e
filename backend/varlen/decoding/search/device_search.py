"""Beam searches whose steps are taken where the logits are, without the host.

The rules of such a step depend only on the number of tokens. The host keeps the beams that each step has chosen, and
puts the answers together once the search has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from varlen.decoding.sampling.token_bias import NOTHING_FORBIDDEN, ForbiddenTokens
from varlen.decoding.search.beam_search import length_penalty, stops_when_full
from varlen.decoding.search.token_edits import TokenEditor, TokenRules
from varlen.request.generation import GenerationOptions
from varlen.request.request import FinishReason, Float32Array, Int32Array
from varlen.scheduling.device_plan import BeamAnswer, BeamStep, SearchRules


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
        is_never = options.early_stopping == "never" and options.length_penalty > 0
        return SearchRules(
            options.num_beams,
            length >= options.max_tokens,
            stops_when_full(options),
            self._editor.forced(num_generated),
            self._end_ids,
            self._editor.banned(num_generated),
            length_penalty(options, length),
            length_penalty(options, options.max_tokens if is_never else length),
        )

    def read(
        self,
        num_generated: int,
        ends: Sequence[int],
        beams: Int32Array,
        scores: Float32Array,
    ) -> BeamStep:
        """Return what a step has chosen, without the tokens unless the search has ended.

        Args:
            num_generated: number of tokens of each beam before the step.
            ends, beams, scores: the part of `SearchResults` of this search.
        """
        # a step that failed was taken again
        del self._steps[num_generated:]
        # not a view of the beams of all searches of the step
        self._steps.append(beams[:, :2].copy())
        has_ended, num_answers = ends
        if not has_ended:
            return BeamStep(tuple(beams[:, 0].tolist()), ())
        rows = range(min(num_answers, self._options.n))
        return BeamStep((), (), tuple(self._answer(beams[i], float(scores[i])) for i in rows))

    def _answer(self, found: Int32Array, score: float) -> BeamAnswer:
        token, beam, length = found[2:].tolist()
        reason: FinishReason = "stop" if token in self._end_ids else "length"
        tokens = [token]
        for step in reversed(self._steps[: length - 1]):
            beam, token = step[beam].tolist()
            tokens.append(token)
        return BeamAnswer(tuple(reversed(tokens)), score, reason)
