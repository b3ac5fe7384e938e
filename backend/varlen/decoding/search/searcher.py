"""Takes the steps of searches that are left to the host.

One op finds the best tokens of all their rows; then each search goes on by itself. Most are left to the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.decoding.search.beam_search import (
    BeamSearch,
    Candidate,
    DeviceSearch,
    can_leave_to_device,
)
from varlen.decoding.token_edits import BadWords, TokenEdits, TokenRules, add_to_rows
from varlen.errors import EngineError
from varlen.request.request import Float32Array, Int32Array
from varlen.scheduling.batch import GeneratedSequence
from varlen.scheduling.device_plan import BeamStep, SearchRules
from varlen_kernels.ops import kernels_for
from varlen_kernels.reference.beam import BeamEdits

_log = logging.getLogger(__name__)

# Probability that edits leave; below it, a difference of fp32 numbers says too little.
_LEAST_REST = 1e-3
# A search that has ended may have a step that started before its end was known.
_Kind: TypeAlias = Literal["forced", "sampled", "best", "ended"]
_SEARCH_FAILED = "the search for an answer failed; the server's log says why"


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one search in a step: its live beams, in order."""

    search: BeamSearch
    index: int
    begin: int
    end: int
    kind: _Kind


class Searcher:
    """Searches for answers."""

    def __init__(
        self,
        vocab_size: int,
        rules: TokenRules,
        bad_words: BadWords,
        device: torch.device,
        *,
        renormalizes: bool,
    ) -> None:
        """Prepare searches.

        Args:
            renormalizes: whether log probabilities are normalized again after edits.
        """
        self._vocab_size = vocab_size
        self._rules = rules
        self._bad_words = bad_words
        self._device = device
        self._renormalizes = renormalizes
        self._kernels = kernels_for(device)

    def rules(self, sequence: GeneratedSequence, length: int) -> SearchRules | None:
        """Return the rules of the next step of a search, which may begin now.

        None if only `advance` can take the step.

        Args:
            length: number of tokens of its beams.
        """
        search = self._search_of(sequence)
        return search.rules(length) if isinstance(search, DeviceSearch) else None

    def advance(
        self, logits: Tensor, sequences: Sequence[GeneratedSequence], rows: Sequence[int]
    ) -> list[BeamStep]:
        """Return the next step of each search.

        Args:
            logits: `[rows, vocabulary]` fp32; overwritten.
            sequences: sequences whose answers are searched. One without a search begins it.
            rows: number of rows of each: its live beams come first.
        """
        parts = self._parts(sequences, rows)
        biases = {
            row: part.search.logit_bias
            for part in parts
            if part.search.logit_bias is not None
            for row in range(part.begin, part.end)
        }
        add_to_rows(logits, biases)
        # what may run out of memory comes first: a step that does is repeated, so no search may have gone on
        advances = self._best_of_rows(logits, [part for part in parts if part.kind == "best"])
        for part in parts:
            if part.kind == "sampled":
                # one search at a time: these need the whole rows on the host
                own = torch.log_softmax(logits[part.begin : part.end], dim=1).cpu().numpy()
                advances[part.begin] = partial(
                    part.search.advance_sampled, own, renormalizes=self._renormalizes
                )
            elif part.kind == "forced":
                advances[part.begin] = part.search.advance_forced
            elif part.kind == "ended":
                advances[part.begin] = partial(BeamStep, (), ())
        # others could not begin
        steps = [_failure()] * len(sequences)
        for part in parts:
            steps[part.index] = _guarded(advances[part.begin])
        return steps

    def _parts(self, sequences: Sequence[GeneratedSequence], rows: Sequence[int]) -> list[_Part]:
        parts: list[_Part] = []
        begin = 0
        for index, (sequence, count) in enumerate(zip(sequences, rows, strict=True)):
            search = self._search_of(sequence)
            if search is not None:
                assert isinstance(search, BeamSearch)
                parts.append(_Part(search, index, begin, begin + search.num_rows, _kind(search)))
            begin += count
        return parts

    def _search_of(self, sequence: GeneratedSequence) -> object:
        """Return the search of a sequence, which may begin now; None if it cannot."""
        if sequence.sampler_state is not None:
            return sequence.sampler_state
        options = sequence.generation
        try:
            forbidden = self._bad_words.forbidden(options.bad_words)
            search = DeviceSearch if can_leave_to_device(options, forbidden) else BeamSearch
            sequence.sampler_state = search(
                options,
                sequence.token_ids,
                rules=self._rules,
                vocab_size=self._vocab_size,
                forbidden=forbidden,
            )
        except Exception:
            _log.exception("a beam search could not begin; its request fails")
        return sequence.sampler_state

    def _best_of_rows(
        self, logits: Tensor, parts: Sequence[_Part]
    ) -> dict[int, Callable[[], BeamStep]]:
        """Return a continuation for each deterministic search, keyed by its first row."""
        if not parts:
            return {}
        sizes = [part.end - part.begin for part in parts]
        if sum(sizes) < len(logits):
            rows = np.concatenate([np.arange(part.begin, part.end) for part in parts])
            logits = logits[torch.from_numpy(rows).to(self._device)]
        edits = _joined([part.search.edits() for part in parts], sizes)
        num_candidates = max(part.search.num_candidates for part in parts)
        tokens, logprobs = self._best(logits, edits, num_candidates)
        scores = np.array([score for part in parts for score in part.search.scores])
        found = ranked(tokens, scores[:, None] + logprobs, sizes)
        return {
            part.begin: partial(part.search.advance, candidates)
            for part, candidates in zip(parts, found, strict=True)
        }

    def _best(
        self, logits: Tensor, edits: TokenEdits | None, num_candidates: int
    ) -> tuple[Int32Array, Float32Array]:
        """Return the best tokens of each row and their log probabilities, `[rows, candidates]`."""
        on_device, raw = None, None
        if edits is not None:
            arrays = (edits.rows, edits.tokens, edits.factors)
            on_device = BeamEdits(*(torch.from_numpy(each).to(self._device) for each in arrays))
            if self._renormalizes:
                # the op may overwrite them
                raw = logits[on_device.rows.long(), on_device.tokens.long()].cpu().numpy()
        scores = torch.zeros(len(logits), 1, device=self._device)
        found = self._kernels.beam_step(logits, scores, width=num_candidates, edits=on_device)
        tokens, logprobs = found.tokens.cpu().numpy(), found.scores.cpu().numpy()
        if edits is not None and raw is not None:
            best = logits.gather(1, found.tokens.long().clamp(min=0)).cpu().numpy()
            rest = log_of_rest(edits, raw, tokens, best, logprobs)
            for row in np.flatnonzero(np.isnan(rest)):
                rest[row] = _exact_log_of_rest(logits[row], edits, raw, row)
            logprobs = logprobs - rest[:, None]
        return tokens, logprobs


def _kind(search: BeamSearch) -> _Kind:
    if not search.num_rows:
        return "ended"
    if search.forced is not None:
        return "forced"
    return "sampled" if search.is_sampled else "best"


def ranked(
    tokens: Int32Array, scores: npt.NDArray[np.float64], sizes: Sequence[int]
) -> list[list[Candidate]]:
    """Return the candidates of each search, the best first.

    Among equal scores the lower row comes first, then the better token of the row.

    Args:
        tokens, scores: `[rows, candidates]`, the best of each row first; a score of -inf is no candidate.
        sizes: number of rows of each search.
    """
    num_candidates, most_rows = tokens.shape[1], max(sizes)
    # rows of one search side by side
    shape = (len(sizes), most_rows, num_candidates)
    is_row = np.arange(most_rows) < np.array(sizes)[:, None]
    all_scores, all_tokens = np.full(shape, -np.inf), np.zeros(shape, np.int32)
    all_scores[is_row], all_tokens[is_row] = scores, tokens
    flat = all_scores.reshape(len(sizes), -1), all_tokens.reshape(len(sizes), -1)
    order = np.argsort(-flat[0], axis=1, kind="stable")
    counts = np.isfinite(flat[0]).sum(1)
    sorted_scores, sorted_tokens = (np.take_along_axis(each, order, 1) for each in flat)
    columns = (counts, sorted_scores, order // num_candidates, sorted_tokens)
    return [
        list(zip(row_scores[:count], parents[:count], row_tokens[:count], strict=True))
        for count, row_scores, parents, row_tokens in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def log_of_rest(
    edits: TokenEdits,
    raw: Float32Array,
    tokens: Int32Array,
    logits: Float32Array,
    logprobs: Float32Array,
) -> Float32Array:
    """Return the log of the sum of each row's probabilities after the edits, `[rows]`.

    It follows from the numbers that are known. Where edits leave hardly anything, or every known token is edited, it is
    NaN.

    Args:
        raw: `[edits]`, the logits of the edited tokens.
        tokens, logits, logprobs: `[rows, candidates]`, the best tokens, their logits, and log probabilities after the
            edits.
    """
    is_edited = np.zeros(tokens.shape, np.bool_)
    np.logical_or.at(is_edited, edits.rows, tokens[edits.rows] == edits.tokens[:, None])
    is_known = ~is_edited & np.isfinite(logprobs)
    first = is_known.argmax(1)[:, None]
    log_sums = np.take_along_axis(logits, first, 1) - np.take_along_axis(logprobs, first, 1)
    before = np.minimum(raw - log_sums[edits.rows, 0], 0)
    # probability 1 to the power of infinity is 1, but the token is banned
    after = np.where(np.isinf(edits.factors), 0, np.exp(before * np.minimum(edits.factors, 1e30)))
    rest = np.ones(len(tokens))
    np.add.at(rest, edits.rows, after - np.exp(before))
    is_usable = is_known.any(1) & (rest > _LEAST_REST)
    log_rest: Float32Array = np.log(np.where(is_usable, rest, np.nan)).astype(np.float32)
    return log_rest


def _exact_log_of_rest(logits: Tensor, edits: TokenEdits, raw: Float32Array, row: int) -> float:
    """Return `log_of_rest` of one row from all its logits, `[vocabulary]`."""
    is_own = edits.rows == row
    tokens, factors = torch.from_numpy(edits.tokens[is_own]).long(), edits.factors[is_own]
    whole = logits.cpu().double()
    # the op may have overwritten them
    whole[tokens] = torch.from_numpy(raw[is_own]).double()
    logprobs = whole.log_softmax(0)
    is_banned = torch.from_numpy(np.isinf(factors))
    edited = logprobs[tokens] * torch.from_numpy(np.where(np.isinf(factors), 1, factors))
    logprobs[tokens] = edited.masked_fill(is_banned, -torch.inf)
    rest = float(logprobs.logsumexp(0))
    # nothing is left to normalize
    return rest if rest > -np.inf else 0.0


def _joined(edits: Sequence[TokenEdits | None], sizes: Sequence[int]) -> TokenEdits | None:
    """Return the edits of all searches; None without any."""
    begins = accumulate(sizes, initial=0)
    found = [(begin, each) for begin, each in zip(begins, edits, strict=False) if each is not None]
    if not found:
        return None
    rows = np.concatenate([each.rows for _, each in found])
    rows += np.repeat([begin for begin, _ in found], [len(each.rows) for _, each in found])
    return TokenEdits(
        rows,
        np.concatenate([each.tokens for _, each in found]),
        np.concatenate([each.factors for _, each in found]),
    )


def _guarded(advance: Callable[[], BeamStep]) -> BeamStep:
    """Return a step, or the error that ends its request and no other."""
    try:
        return advance()
    except Exception:
        _log.exception("a beam search failed; its request fails")
        return _failure()


def _failure() -> BeamStep:
    return BeamStep((), (), error=EngineError(_SEARCH_FAILED))
