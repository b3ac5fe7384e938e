"""One group of beams: which candidates continue, which are answers, and when it ends.

Up to `num_beams` beams are live. A candidate ends if its token is an end token or the last one that may come; it is an
answer only if it is among the best `num_beams` candidates. The best `num_beams` answers are kept.
Source: `_beam_search` of Hugging Face's `generate`, version 5. Its placeholder beams and answers with score -1e9, which
fill its tensors, do not exist here. GNMT's length penalty: Wu et al. 2016, arXiv:1609.08144, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TypeAlias

from varlen.decoding.search.token_edits import TokenEditor
from varlen.request.generation import GenerationOptions

# Score, index of the parent, and token. The score is the sum of log probabilities.
Candidate: TypeAlias = tuple[float, int, int]

by_score = itemgetter(0)


@dataclass(slots=True, eq=False)
class Beam:
    """Generated tokens, linked from the last to the first, and their score.

    It is not changed once it is made.

    Attributes:
        parent: the beam without the last token; None before the first token.
        token: the last token; -1 before the first.
        score: sum of log probabilities, with the changes that edits make.
    """

    parent: Beam | None
    token: int
    score: float

    def token_ids(self) -> tuple[int, ...]:
        tokens: list[int] = []
        beam = self
        while beam.parent is not None:
            tokens.append(beam.token)
            beam = beam.parent
        return tuple(reversed(tokens))


@dataclass(slots=True, eq=False)
class Hypothesis:
    """A finished beam; `score` is divided by the length penalty."""

    beam: Beam
    score: float


class BeamGroup:
    """Live beams and answers of one group.

    Attributes:
        beams: the live ones, the best first; none once the search has ended.
        histories: token history of each live beam, for edits.
        parents: parent index of each live beam, among the live beams before the last step.
        answers: the best first, at most `num_beams`.
    """

    def __init__(
        self,
        options: GenerationOptions,
        num_beams: int,
        end_ids: frozenset[int],
        editor: TokenEditor,
    ) -> None:
        """Start with one beam that has no token.

        Args:
            num_beams: number of live beams and of answers.
            editor: extends the histories of beams.
        """
        self._options = options
        self._num_beams = num_beams
        self._end_ids = end_ids
        self._editor = editor
        self._num_generated = 0
        self._stops_when_full = stops_when_full(options)
        self.beams = [Beam(None, -1, 0.0)]
        # apart from beams: these keep their ancestors, whose histories are not read again
        self.histories = [editor.start]
        self.parents: list[int] = []
        self.answers: list[Hypothesis] = []

    def advance(self, best: Sequence[Candidate], ranked: Sequence[Candidate]) -> list[int]:
        """Take a step and return the chosen tokens that do not end an answer.

        Args:
            best: the candidates that may be answers, at most `num_beams`.
            ranked: all candidates, the best first.
        """
        self._num_generated += 1
        is_last = self._num_generated >= self._options.max_tokens
        ends, num_beams = self._end_ids, self._num_beams
        live: list[Candidate] = []
        for candidate in ranked:
            if candidate[2] not in ends:
                live.append(candidate)
                if len(live) == num_beams:
                    break

        beams, extend = self.beams, self._editor.extend
        ended = best if is_last else [candidate for candidate in best if candidate[2] in ends]
        if ended:
            divisor = length_penalty(self._options, self._num_generated)
            for score, parent, token in ended:
                beam = Beam(beams[parent], token, score)
                self.answers.append(Hypothesis(beam, score / divisor))
            # stable: the earlier answer comes first among equal ones
            self.answers.sort(key=attrgetter("score"), reverse=True)
            del self.answers[num_beams:]
        self.parents = [parent for _, parent, _ in live]
        histories = self.histories
        self.histories = [extend(histories[parent], token) for _, parent, token in live]
        self.beams = [Beam(beams[parent], token, score) for score, parent, token in live]
        if is_last or self._is_final():
            self.beams, self.histories, self.parents = [], [], []
        return [token for _, _, token in live]

    def _is_final(self) -> bool:
        """Return whether the answers are final: full, and no live beam may improve them."""
        if not self.beams or len(self.answers) < self._num_beams:
            return not self.beams
        if self._stops_when_full:
            return True
        options = self._options
        length = self._num_generated
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = options.max_tokens
        best = max(beam.score for beam in self.beams)
        return best / length_penalty(options, length) <= self.answers[-1].score


def stops_when_full(options: GenerationOptions) -> bool:
    """Return whether a search ends once there are as many answers as beams."""
    # a single beam ends with its first answer, as greedy search does
    return options.early_stopping is True or options.num_beams == 1


def length_penalty(options: GenerationOptions, length: int) -> float:
    """Return the divisor of the score of an answer of this length."""
    base = (5 + length) / 6 if options.length_penalty_type == "gnmt" else length
    return float(base**options.length_penalty)
