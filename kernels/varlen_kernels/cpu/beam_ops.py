"""The ops of searches with beams on CPUs, compiled where they can be."""

import numpy as np
import torch
from torch import Tensor

from varlen_kernels import reference
from varlen_kernels.cpu.calls.compiled_ops import has_compiled_ops
from varlen_kernels.reference.beam import BeamCandidates, BeamEdits, check_beams
from varlen_kernels.reference.beam_search import SearchResults, SearchState

# Multiplications that take as long as one logit of a beam step.
_OF_SEARCHED_LOGIT = 64


def beam_step(
    logits: Tensor,
    scores: Tensor,
    finished: Tensor | None = None,
    *,
    width: int | None = None,
    edits: BeamEdits | None = None,
    out: BeamCandidates | None = None,
) -> BeamCandidates:
    """Return the best continuations of each sequence, see `reference.beam_step`."""
    if not has_compiled_ops():
        return reference.beam_step(logits, scores, finished, width=width, edits=edits, out=out)
    from varlen_kernels.cpu.calls.calls import call

    width = check_beams(logits, scores, finished, width, edits, out)
    if out is None:
        out = BeamCandidates.empty(len(scores), width, logits.device)
    if finished is None:
        finished = torch.zeros(len(scores), dtype=torch.bool)
    bounds, tokens, factors = _edits_of_rows(edits, len(logits))
    call(
        "step_beams",
        (logits.float(), scores, finished, bounds, tokens, factors),
        out,
        dtypes="ff?lifiif",
        units=len(scores),
        multiplications=_OF_SEARCHED_LOGIT * logits.numel(),
    )
    return out


def follow_beams(
    state: SearchState,
    searches: Tensor,
    places: Tensor,
    given: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
    cu_blocks: Tensor,
    block_ids: Tensor,
    slots: Tensor,
    copies: Tensor,
    *,
    block_size: int,
) -> None:
    """Give each beam its token and its block table, see `reference.follow_beams`."""
    if not has_compiled_ops():
        of_step = token_ids, context_lens, cu_blocks, block_ids, slots, copies
        reference.follow_beams(state, searches, places, given, *of_step, block_size=block_size)
        return
    from varlen_kernels.cpu.calls.calls import call

    call(
        "follow_beams",
        (searches, places, given, context_lens, cu_blocks),
        (state.tables, state.parents, state.tokens, token_ids, block_ids, slots, copies),
        (block_size,),
        dtypes="iiiiiiiiiili",
        units=len(searches),
    )


def advance_searches(
    found: BeamCandidates,
    searches: Tensor,
    places: Tensor,
    divisors: Tensor,
    ends: Tensor,
    state: SearchState,
    out: SearchResults,
) -> None:
    """Choose the beams of the next step, and the answers, see `reference.advance_searches`."""
    if not has_compiled_ops():
        reference.advance_searches(found, searches, places, divisors, ends, state, out)
        return
    from varlen_kernels.cpu.calls.calls import call

    _, *kept = state
    heads = torch.empty(len(out.beams), dtype=torch.int32)
    call(
        "advance_searches",
        (found.tokens, found.scores, searches, places, divisors, ends),
        (*kept, heads, *out),
        dtypes="ifiifiiififiiiif",
        units=len(searches),
    )


def _edits_of_rows(edits: BeamEdits | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds of the edits of each row, their tokens and their factors."""
    if edits is None:
        none = torch.empty(0)
        return torch.zeros(rows + 1, dtype=torch.int64), none.int(), none
    bounds = np.searchsorted(edits.rows.numpy(), np.arange(rows + 1))
    return torch.from_numpy(bounds), edits.tokens, edits.factors
