"""Runs the beam searches of a step.

One op finds the best tokens of all rows; then each search goes on by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from varlen.decoding.beam_search import BeamSearch
from varlen.decoding.token_edits import TokenEdits, TokenRules
from varlen.errors import EngineError
from varlen.request import Float32Array, Int32Array
from varlen.sequence import BeamStep, GeneratedSequence
from varlen_kernels.beam_reference import BeamEdits
from varlen_kernels.dispatch import decoder_kernels_for

_log = logging.getLogger(__name__)

# Probability that edits leave; below it, a difference of fp32 numbers says too little.
_LEAST_REST = 1e-3
_SEARCH_FAILED = "the search for an answer failed; the server's log says why"


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one search in a step: its live beams, in order."""

    search: BeamSearch
    begin: int
    end: int


class Searcher:
    """Searches for the best answers of sequences of one model."""

    def __init__(
        self, vocab_size: int, rules: TokenRules, device: torch.device, *, renormalizes: bool
    ) -> None:
        """Prepare searches.

        Args:
            vocab_size: width of the logits.
            rules: of the checkpoint.
            device: of the logits.
            renormalizes: whether log probabilities are normalized again after edits.
        """
        self._vocab_size = vocab_size
        self._rules = rules
        self._device = device
        self._renormalizes = renormalizes
        self._kernels = decoder_kernels_for(device)

    def advance(self, logits: Tensor, sequences: Sequence[GeneratedSequence]) -> list[BeamStep]:
        """Return the step of each row's search; all rows of one search have the same.

        Args:
            logits: `[sequences, vocabulary]` fp32; overwritten.
            sequences: the beams of one search after those of another. One that has no search yet begins one.
        """
        groups = list(self._groups(sequences))
        steps: dict[int, BeamStep] = {}
        chosen = []
        for group in groups:
            search, begin, end = group.search, group.begin, group.end
            if search.forced is not None:
                steps[begin] = _guarded(search.advance_forced)
            elif search.is_sampled:
                # one search at a time: these need the whole rows on the host
                rows = torch.log_softmax(logits[begin:end], dim=1).cpu().numpy()
                steps[begin] = _guarded(partial(search.advance_sampled, rows))
            else:
                chosen.append(group)
        if chosen:
            steps |= self._choose(logits, chosen)
        return [steps[group.begin] for group in groups for _ in range(group.begin, group.end)]

    def _groups(self, sequences: Sequence[GeneratedSequence]) -> Iterator[_Rows]:
        begin = 0
        while begin < len(sequences):
            sequence = sequences[begin]
            search = sequence.sampler_state
            if search is None:
                search = sequence.sampler_state = BeamSearch(
                    sequence.generation,
                    sequence.token_ids,
                    rules=self._rules,
                    vocab_size=self._vocab_size,
                )
            assert isinstance(search, BeamSearch)
            yield _Rows(search, begin, begin + search.num_rows)
            begin += search.num_rows

    def _choose(self, logits: Tensor, groups: Sequence[_Rows]) -> dict[int, BeamStep]:
        """Return the step of each group that reads its best tokens, by its first row."""
        sizes = [group.end - group.begin for group in groups]
        if sum(sizes) < len(logits):
            rows = np.concatenate([np.arange(group.begin, group.end) for group in groups])
            logits = logits[torch.from_numpy(rows).to(self._device)]
        bounds = np.cumsum([0, *sizes]).tolist()
        edits = _joined([group.search.edits() for group in groups], bounds)
        width = max(group.search.width for group in groups)
        tokens, logprobs = self._best(logits, edits, width)
        steps = {}
        for group, begin, end in zip(groups, bounds, bounds[1:], strict=False):
            search = group.search
            best = tokens[begin:end, : search.width], logprobs[begin:end, : search.width]
            steps[group.begin] = _guarded(partial(search.advance, *best))
        return steps

    def _best(
        self, logits: Tensor, edits: TokenEdits | None, width: int
    ) -> tuple[Int32Array, Float32Array]:
        """Return the best tokens of each row and their log probabilities, `[rows, width]`."""
        on_device, raw = None, None
        if edits is not None:
            arrays = (edits.rows, edits.tokens, edits.factors)
            on_device = BeamEdits(*(torch.from_numpy(each).to(self._device) for each in arrays))
            if self._renormalizes:
                # the op may overwrite them
                raw = logits[on_device.rows.long(), on_device.tokens.long()].cpu().numpy()
        scores = torch.zeros(len(logits), 1, device=self._device)
        found = self._kernels.beam_step(logits, scores, width=width, edits=on_device)
        tokens, logprobs = found.tokens.cpu().numpy(), found.scores.cpu().numpy()
        if edits is not None and raw is not None:
            best = logits.gather(1, found.tokens.long().clamp(min=0)).cpu().numpy()
            logprobs = logprobs - log_of_rest(edits, raw, tokens, best, logprobs)[:, None]
        return tokens, logprobs


def log_of_rest(
    edits: TokenEdits,
    raw: Float32Array,
    tokens: Int32Array,
    logits: Float32Array,
    logprobs: Float32Array,
) -> Float32Array:
    """Return the log of the sum of each row's probabilities after the edits, `[rows]`.

    It follows from the few numbers that are known, without another look at the logits. Where edits leave hardly
    anything, or every known token is edited, it is 0: nothing is normalized.

    Args:
        edits: of all rows.
        raw: `[edits]`, the logits of the edited tokens.
        tokens, logits, logprobs: `[rows, width]`, the best tokens, their logits, and log probabilities after the edits.
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
    log_rest: Float32Array = np.log(np.where(is_usable, rest, 1)).astype(np.float32)
    return log_rest


def _joined(edits: Sequence[TokenEdits | None], bounds: Sequence[int]) -> TokenEdits | None:
    """Return the edits of all searches, whose rows begin at `bounds`; None without any."""
    found = [(begin, each) for begin, each in zip(bounds, edits, strict=False) if each is not None]
    if not found:
        return None
    return TokenEdits(
        np.concatenate([each.rows + np.int32(begin) for begin, each in found]),
        np.concatenate([each.tokens for _, each in found]),
        np.concatenate([each.factors for _, each in found]),
    )


def _guarded(advance: Callable[[], BeamStep]) -> BeamStep:
    """Return a step, or the error that ends its request and no other."""
    try:
        return advance()
    except Exception:
        _log.exception("a beam search failed; its request fails")
        return BeamStep((), (), error=EngineError(_SEARCH_FAILED))
