"""Beam search of one prompt: from the candidates of each step to the best answers.

The model runs every beam as one row; live ones come first. A step takes the most likely tokens of each row, with their
log probabilities, and tells which rows go on with which tokens. Beams are in one group, or in several that are kept
apart by a penalty. Up to `num_beams` beams of a group are live. A candidate ends if its token is an end token or the
last one that may come; it is an answer only if it is among the best `num_beams` candidates. The best answers, as many,
are kept.
Source: `_beam_search` of Hugging Face's `generate`, version 5, without placeholders. GNMT's length penalty: Wu et al.
2016, arXiv:1609.08144, section 7. Groups: Vijayakumar et al. 2016, arXiv:1610.02424, with Hamming diversity as in
version 4.56. Sibling rank: Li, Monroe, Jurafsky 2016, arXiv:1611.08562, section 3.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.decoding.sampling.sampler_state import random_key, uniform_range
from varlen.decoding.token_edits import (
    NOTHING_FORBIDDEN,
    ForbiddenTokens,
    TokenEditor,
    TokenEdits,
    TokenHistory,
    TokenRules,
    bias_arrays,
)
from varlen.request.generation import GenerationOptions
from varlen.request.request import FinishReason, Float32Array, Int32Array
from varlen.scheduling.device_plan import NOT_TAKEN, BeamAnswer, BeamStep, SearchRules

# Score, index of the parent, and token. The score is the sum of log probabilities.
Candidate: TypeAlias = tuple[float, int, int]
# The divisors that `SearchRules` has, step by step.
Divisors: TypeAlias = tuple[tuple[float, float], ...]

by_score = itemgetter(0)


@dataclass(slots=True, eq=False)
class Beam:
    """Generated tokens, linked from the last to the first, and their score.

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


class BeamGroup:
    """Live beams and answers of one group.

    Attributes:
        beams: the live ones, the best first; none once the search has ended.
        histories: token history of each live beam, for edits.
        parents: parent index of each live beam, among the live beams before the last step.
        answers: finished beams and their scores divided by the length penalty, the best first; at most `num_beams`.
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
        # apart from beams, which keep their ancestors
        self.histories = [editor.start]
        self.parents: list[int] = []
        self.answers: list[tuple[float, Beam]] = []

    def advance(self, best: Sequence[Candidate], ranked: Sequence[Candidate]) -> list[int]:
        """Take a step and return the chosen tokens that do not end an answer.

        Args:
            best: the candidates that may be answers, at most `num_beams`.
            ranked: all candidates, the best first.
        """
        self._num_generated += 1
        is_last = self._num_generated >= self._options.max_tokens
        ends, num_beams = self._end_ids, self._num_beams
        live = [candidate for candidate in ranked if candidate[2] not in ends][:num_beams]
        beams, extend = self.beams, self._editor.extend
        ended = best if is_last else [candidate for candidate in best if candidate[2] in ends]
        if ended:
            divisor = length_penalty(self._options, self._num_generated)
            for score, parent, token in ended:
                self.answers.append((score / divisor, Beam(beams[parent], token, score)))
            # stable: the earlier answer comes first among equal ones
            self.answers.sort(key=by_score, reverse=True)
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
        return best / length_penalty(options, length) <= self.answers[-1][0]


def stops_when_full(options: GenerationOptions) -> bool:
    """Return whether a search ends once there are as many answers as beams."""
    # a single beam ends with its first answer, as greedy search does
    return options.early_stopping is True or options.num_beams == 1


def length_penalty(options: GenerationOptions, length: int) -> float:
    """Return the divisor of the score of an answer of this length."""
    base = (5 + length) / 6 if options.length_penalty_type == "gnmt" else length
    return float(base**options.length_penalty)


class BeamSearch:
    """Live beams of one prompt, and the answers that they lead to.

    In each step the first rows of the model are the live beams, in order. In the first step there is one.

    Attributes:
        logit_bias: token ids, and the number to add to the logit of each, in every row; None without any.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompt_ids: Sequence[int],
        *,
        rules: TokenRules,
        vocab_size: int,
        forbidden: ForbiddenTokens = NOTHING_FORBIDDEN,
    ) -> None:
        """Start a search; with one beam it is greedy.

        Args:
            prompt_ids: tokens before the first generated one; for an encoder-decoder, tokens of the decoder.
        """
        self._options = options
        # the same in every step
        self.logit_bias = bias_arrays(options.logit_bias) if options.logit_bias else None
        self._vocab_size = vocab_size
        self._editor = TokenEditor.of_request(
            rules, options, prompt_ids, vocab_size=vocab_size, forbidden=forbidden
        )
        self._end_ids = frozenset(self._editor.end_ids)
        num_beams = options.num_beams // options.num_beam_groups
        self._groups = [
            BeamGroup(options, num_beams, self._end_ids, self._editor)
            for _ in range(options.num_beam_groups)
        ]
        # before the first step all groups continue the same row
        self._beams: list[Beam] = self._groups[0].beams
        self._histories: list[TokenHistory] = self._groups[0].histories
        self._first_rows = [0] * len(self._groups)
        self._num_generated = 0
        self.step = BeamStep((), ())
        if options.do_sample:
            seed = secrets.randbits(64) if options.seed is None else options.seed
            self._key = random_key(seed, sample=0)

    @property
    def is_sampled(self) -> bool:
        """Whether steps need all log probabilities of each row, for `advance_sampled`."""
        return self._options.do_sample

    @property
    def num_candidates(self) -> int:
        """Number of candidates that a step needs of each row.

        They hold the best `num_beams` tokens that do not end an answer. Penalties of other groups may lower as many
        tokens as these have beams.
        """
        return min(self._options.num_beams + len(self._end_ids), self._vocab_size)

    @property
    def num_rows(self) -> int:
        """Number of live beams; 0 once the search has ended."""
        return len(self._beams)

    @property
    def forced(self) -> int | None:
        """The only token that may come next, for `advance_forced`; None if there is a choice."""
        return self._editor.forced(self._num_generated)

    @property
    def scores(self) -> list[float]:
        return [beam.score for beam in self._beams]

    def edits(self) -> TokenEdits | None:
        """Return the edits of the next log probabilities; None if there are none."""
        return self._editor.edits(self._histories, self._num_generated)

    def advance(self, candidates: Sequence[Candidate]) -> BeamStep:
        """Choose the next tokens out of the best ones of each row.

        Args:
            candidates: the best `num_candidates` tokens of each row, or more, with edits. The best candidate comes
                first; among equal scores, the candidate of the lower row.
        """
        if len(self._groups) > 1:
            self._advance_groups(candidates)
        else:
            if self._options.diversity_type == "sibling":
                candidates = self._ranked_with_siblings(candidates)
            self._groups[0].advance(candidates[: self._options.num_beams], candidates)
        return self._finish_step()

    def advance_forced(self) -> BeamStep:
        """Continue each row with the forced token, whose log probability counts as 0."""
        token = self.forced
        assert token is not None
        candidates = [(score, row, token) for row, score in enumerate(self.scores)]
        return self.advance(sorted(candidates, key=by_score, reverse=True))

    def advance_sampled(self, logprobs: Float32Array, *, renormalizes: bool = False) -> BeamStep:
        """Choose the next tokens at random: beam sampling, where `is_sampled`.

        Candidates are drawn without replacement, each with a probability proportional to the exponential of its score.
        The first ones that are drawn may be answers; the best ones go on.

        Args:
            logprobs: `[num_rows, vocab_size]` fp32, log probabilities without the edits.
            renormalizes: whether log probabilities of each row are normalized again after edits and limits.
        """
        options, num_ends = self._options, len(self._end_ids)
        scores = edited(logprobs, self.edits())
        scores = limited(scores, options, keep=max(2, 1 + num_ends))
        if renormalizes:
            scores = normalized(scores)
        scores += np.array(self.scores)[:, None]
        count = max(2, 1 + num_ends) * options.num_beams
        first = self._num_generated * options.num_beams * self._vocab_size
        drawn = draw(scores, uniform_range(self._key, first, scores.size), count)
        self._groups[0].advance(
            drawn[: options.num_beams], sorted(drawn, key=by_score, reverse=True)
        )
        return self._finish_step()

    def _advance_groups(self, candidates: Sequence[Candidate]) -> None:
        num_beams = self._options.num_beams // len(self._groups)
        penalty = self._options.diversity_penalty if self.forced is None else 0.0
        taken: Counter[int] = Counter()
        for group, first_row in zip(self._groups, self._first_rows, strict=True):
            if not group.beams:
                continue
            rows = range(first_row, first_row + len(group.beams))
            own = [
                (score - penalty * taken[token], row - first_row, token)
                for score, row, token in candidates
                if row in rows
            ]
            own.sort(key=_by_score_and_parent)
            taken.update(group.advance(own[:num_beams], own))

    def _ranked_with_siblings(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return candidates by their score minus a penalty for each better sibling."""
        penalty = self._options.diversity_penalty
        better: Counter[int] = Counter()
        keyed: list[tuple[float, int, Candidate]] = []
        for candidate in candidates:
            score, parent, _ = candidate
            keyed.append((penalty * better[parent] - score, parent, candidate))
            better[parent] += 1
        keyed.sort(key=itemgetter(0, 1))
        return [candidate for *_, candidate in keyed]

    def _finish_step(self) -> BeamStep:
        self._num_generated += 1
        parents: list[int] = []
        self._beams, self._histories = [], []
        for index, group in enumerate(self._groups):
            parents += [self._first_rows[index] + parent for parent in group.parents]
            self._first_rows[index] = len(self._beams)
            self._beams += group.beams
            self._histories += group.histories
        answers = None if self._beams else self._answers()
        tokens = tuple(beam.token for beam in self._beams)
        self.step = BeamStep(tuple(parents), tokens, answers)
        return self.step

    def _answers(self) -> tuple[BeamAnswer, ...]:
        found = [answer for group in self._groups for answer in group.answers]
        found.sort(key=by_score, reverse=True)
        return tuple(
            BeamAnswer(beam.token_ids(), score, "stop" if beam.token in self._end_ids else "length")
            for score, beam in found[: self._options.n]
        )


def _by_score_and_parent(candidate: Candidate) -> tuple[float, int]:
    score, parent, _ = candidate
    return -score, parent


# Scores of random candidates. Limits apply to each row, after the edits and before the score of its beam is added.
_Scores = npt.NDArray[np.float64]


def edited(logprobs: Float32Array, edits: TokenEdits | None) -> _Scores:
    """Return log probabilities with their edits, `[rows, vocabulary]` fp64."""
    scores = logprobs.astype(np.float64)
    if edits is not None:
        is_banned = np.isinf(edits.factors)
        # log probability 0 times infinity is no number
        scores[edits.rows, edits.tokens] *= np.where(is_banned, 1, edits.factors)
        scores[edits.rows[is_banned], edits.tokens[is_banned]] = -np.inf
    return scores


def limited(scores: _Scores, options: GenerationOptions, *, keep: int) -> _Scores:
    """Return the scores divided by the temperature; -inf beyond top-k, top-p and min-p.

    Args:
        scores: `[rows, vocabulary]` fp64.
        keep: smallest number of tokens that the limits leave.
    """
    scores = scores / options.temperature
    size = scores.shape[1]
    keep = min(keep, size)
    if 0 < options.top_k < size:
        rank = size - max(options.top_k, keep)
        lowest = np.partition(scores, rank, axis=1)[:, rank, None]
        scores = np.where(scores < lowest, -np.inf, scores)
    if options.top_p == 1 and options.min_p == 0:
        return scores

    order = np.argsort(scores, axis=1, kind="stable")
    ascending = np.take_along_axis(scores, order, axis=1)
    weights = _weights(ascending, ascending[:, -1:])
    if options.top_p < 1:
        shares = np.cumsum(weights, axis=1) / np.sum(weights, axis=1, keepdims=True)
        is_excluded = shares <= 1 - options.top_p
        is_excluded[:, size - keep :] = False
        weights[is_excluded] = 0
    # the largest weight is 1
    is_excluded = (weights == 0) | (weights < options.min_p)
    is_excluded[:, size - keep :] = False
    ascending[is_excluded] = -np.inf
    np.put_along_axis(scores, order, ascending, axis=1)
    return scores


def normalized(scores: _Scores) -> _Scores:
    """Return the scores of each row minus the log of the sum of their exponentials."""
    peaks = scores.max(axis=1, keepdims=True)
    sums = _weights(scores, peaks).sum(axis=1, keepdims=True)
    # a row without tokens stays as it is
    sums[sums == 0] = 1
    logs: _Scores = np.where(np.isneginf(peaks), 0, peaks) + np.log(sums)
    return scores - logs


def draw(scores: _Scores, uniform: npt.NDArray[np.float64], count: int) -> list[Candidate]:
    """Return distinct entries, in the order in which they are drawn.

    Each is drawn from those that are left, in proportion to the exponential of its score: the entries with the largest
    sums of score and Gumbel noise are such draws (Vieira 2014, "Gumbel-max trick and weighted reservoir sampling").

    Args:
        scores: `[rows, vocabulary]` fp64.
        uniform: `[rows * vocabulary]`, random numbers from 0 to below 1.
        count: number of entries; fewer are drawn if there are fewer above -inf.
    """
    # exponential waiting times, never 0, and their negative logarithms
    noise = -np.log(np.maximum(-np.log1p(-uniform), 2.0**-54))
    flat = scores.ravel()
    keys = flat + noise
    count = min(count, int(np.isfinite(flat).sum()))
    if not count:
        return []
    best = np.argpartition(-keys, count - 1)[:count]
    best = best[np.argsort(-keys[best], kind="stable")]
    rows, tokens = np.divmod(best, scores.shape[1])
    return list(zip(flat[best].tolist(), rows.tolist(), tokens.tolist(), strict=True))


def _weights(scores: _Scores, peak: _Scores | float) -> _Scores:
    """Return exp(scores - peak); 0 where all scores are -inf."""
    weights: _Scores = np.exp(scores - np.where(np.equal(peak, -np.inf), 0, peak))
    return weights


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


@lru_cache(maxsize=64)
def _editor_of(
    rules: TokenRules,
    options: GenerationOptions,
    prompt_ids: tuple[int, ...],
    vocab_size: int,
    always: tuple[int, ...],
) -> TokenEditor:
    # most searches have the options of one before
    forbidden = ForbiddenTokens(always)
    return TokenEditor.of_request(
        rules, options, prompt_ids, vocab_size=vocab_size, forbidden=forbidden
    )


# most searches of a launch have the same ones
@lru_cache(maxsize=64)
def _rules_of(editor: TokenEditor, num_generated: int) -> SearchRules:
    options, length = editor.options, num_generated + 1
    return SearchRules(
        options.num_beams,
        length >= options.max_tokens,
        stops_when_full(options),
        editor.forced(num_generated),
        editor.end_ids,
        editor.banned(num_generated),
        *_divisors(options, length)[0],
    )


@lru_cache(maxsize=64)
def _later_of(editor: TokenEditor, num_generated: int, count: int) -> Divisors | None:
    last, rules = num_generated + count, _rules_of(editor, num_generated)
    # bans end with a number of tokens, so the steps between have the same ones
    if rules.is_last or rules.forced is not None or last + 1 >= editor.options.max_tokens:
        return None
    if editor.forced(last) is not None:
        return None
    banned = editor.banned(last)
    if banned is not rules.banned and not np.array_equal(banned, rules.banned):
        return None
    return _divisors(editor.options, num_generated + 2, count)


def _divisors(options: GenerationOptions, length: int, count: int = 1) -> Divisors:
    """Return the divisors of steps whose answers have `length` tokens, and more."""
    is_never = options.early_stopping == "never" and options.length_penalty > 0
    lengths = range(length, length + count)
    own = [length_penalty(options, each) for each in lengths]
    best = [length_penalty(options, options.max_tokens)] * count if is_never else own
    return tuple(zip(own, best, strict=True))


class DeviceSearch:
    """A search whose steps are taken where the logits are, without the host.

    The rules of such a step depend only on the number of tokens. The host keeps the beams that each step has chosen,
    and puts the answers together once the search has ended.
    """

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
        # its rules depend on no token of the prompt, only on whether there are several
        self._editor = _editor_of(
            rules, options, tuple(prompt_ids[:2]), vocab_size, forbidden.always
        )
        # of each beam of each step
        self._parents: list[int] = []
        self._tokens: list[int] = []

    def rules(self, num_generated: int) -> SearchRules:
        """Return the rules of the step that chooses the token after this number of them."""
        return _rules_of(self._editor, num_generated)

    def later(self, num_generated: int, count: int) -> Divisors | None:
        """Return the divisors of later steps; None if more of their rules differs.

        Args:
            num_generated: number of tokens of each beam before the first step.
            count: number of later steps, at least one.
        """
        return _later_of(self._editor, num_generated, count)

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
        parents, tokens = beams[:count, :, :2].reshape(-1, 2).T.tolist()
        # a step that failed was taken again
        begin = num_generated * self._editor.options.num_beams
        self._parents[begin:], self._tokens[begin:] = parents, tokens
        if not count or not ends[count - 1][0]:
            return BeamStep(tuple(parents), (), count=count)
        rows = range(min(ends[count - 1][1], self._editor.options.n))
        best, of_best = beams[count - 1], scores[count - 1]
        answers = tuple([self._answer(best[i], float(of_best[i])) for i in rows])
        return BeamStep((), (), answers, count=count)

    def _answer(self, found: Int32Array, score: float) -> BeamAnswer:
        token, beam, length = found[2:].tolist()
        reason: FinishReason = "stop" if token in self._editor.end_ids else "length"
        tokens = [token]
        for step in reversed(range(length - 1)):
            at = step * self._editor.options.num_beams + beam
            beam = self._parents[at]
            tokens.append(self._tokens[at])
        return BeamAnswer(tuple(reversed(tokens)), score, reason)
