"""Edits of the beam step: the kernels before and after the search.

The first one takes the edited tokens out of the logits and sums their exponentials. So the search finds the best of the
other tokens, with the right sums. The last one merges two lists: the candidates that were found, which are sorted, and
the edited tokens. It reads all edits of a sequence for each one that it selects, because they are few.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference import beam as beam_reference
from varlen_kernels.reference.beam import BeamCandidates, BeamEdits
from varlen_kernels.triton.beam_keys import (
    NO_INDEX,
    NO_KEY,
    first_after,
    key_of,
    value_of,
    without_nan,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels

_NO_TOKEN = tl.constexpr(beam_reference.NO_TOKEN)
_NO_PARENT = tl.constexpr(beam_reference.NO_PARENT)
# Edits that a program reads at once.
_BLOCK = 128


class TakenEdits(NamedTuple):
    """The edits of a step, with what their tokens had in the logits.

    Attributes:
        logits: `[edits]` fp32, without NaN.
        bounds: `[rows + 1]` int32, the first edit of each row.
    """

    edits: BeamEdits
    logits: Tensor
    bounds: Tensor


@triton.jit
def _take_edits_kernel(
    logits_ptr,  # [rows, vocabulary], -inf is written for edited tokens
    bounds_ptr,  # [rows + 1]
    tokens_ptr,  # [edits]
    taken_ptr,  # [edits]
    sums_ptr,  # [rows, 2, SUMS]: maximum, and sum of exp(logit - maximum), in the last column
    STRIDE: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Take the edited tokens of one row out of its logits."""
    wait_for_kernels(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)  # int64: rows * STRIDE may pass 2**31
    logits_ptr += row * STRIDE
    begin, end = tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
    peak = float("-inf")
    total = 0.0
    for first in range(begin, end, BLOCK):
        edit = first + tl.arange(0, BLOCK)
        inside = edit < end
        token = tl.load(tokens_ptr + edit, mask=inside, other=0)
        x = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
        x = without_nan(x)
        tl.store(taken_ptr + edit, x, mask=inside)
        tl.store(logits_ptr + token, float("-inf"), mask=inside)
        new_peak = tl.maximum(peak, tl.max(x, axis=0))
        shift = tl.where(new_peak > float("-inf"), new_peak, 0.0)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift), axis=0)
        peak = new_peak
    sums_ptr += row * 2 * SUMS + SUMS - 1
    tl.store(sums_ptr, peak)
    tl.store(sums_ptr + SUMS, total)


@triton.jit
def _best_edit(
    key,
    index,
    first_row,
    begin,
    end,
    rows_ptr,
    tokens_ptr,
    factors_ptr,
    taken_ptr,
    totals_ptr,
    beam_scores_ptr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return key and index of the edit after the one with this key and index.

    The index of an edit is its beam * VOCABULARY + its token.
    """
    best_key = tl.full([], NO_KEY, tl.int32)
    best_index = tl.full([], NO_INDEX, tl.int32)
    for first in range(begin, end, BLOCK):
        edit = first + tl.arange(0, BLOCK)
        inside = edit < end
        token = tl.load(tokens_ptr + edit, mask=inside, other=0)
        row = tl.load(rows_ptr + edit, mask=inside, other=0)
        factor = tl.load(factors_ptr + edit, mask=inside, other=0.0)
        x = tl.load(taken_ptr + edit, mask=inside, other=0.0)
        peak = tl.load(totals_ptr + row * 2, mask=inside, other=0.0)
        log_total = tl.load(totals_ptr + row * 2 + 1, mask=inside, other=0.0)
        beam_score = tl.load(beam_scores_ptr + row, mask=inside, other=0.0)
        log_prob = ((x - peak) - log_total) * factor
        score = without_nan(beam_score) + log_prob
        # a score of -inf is no candidate, and +inf bans the token
        possible = inside & (factor < float("inf")) & (score > float("-inf"))
        score_key = tl.where(possible, key_of(score), NO_KEY)
        block_key, block_index = first_after(
            key, index, score_key, (row - first_row) * VOCABULARY + token
        )
        is_better = (block_key > best_key) | ((block_key == best_key) & (block_index < best_index))
        best_key = tl.where(is_better, block_key, best_key)
        best_index = tl.where(is_better, block_index, best_index)
    return best_key, best_index


@triton.jit
def _merge_edits_kernel(
    found_tokens_ptr,  # [sequences, BEST], the best without an edit
    found_parents_ptr,  # [sequences, BEST]
    found_scores_ptr,  # [sequences, BEST]
    bounds_ptr,  # [sequences * BEAMS + 1]
    rows_ptr,  # [edits]
    edit_tokens_ptr,  # [edits]
    factors_ptr,  # [edits]
    taken_ptr,  # [edits]
    totals_ptr,  # [sequences * BEAMS, 2]: maximum, and log Σ exp(logit - maximum)
    beam_scores_ptr,  # [sequences * BEAMS]
    finished_ptr,  # [sequences] uint8, read if HAS_FINISHED
    tokens_ptr,  # [sequences, BEST]
    parents_ptr,  # [sequences, BEST]
    scores_ptr,  # [sequences, BEST]
    VOCABULARY: tl.constexpr,
    BEAMS: tl.constexpr,
    BEST: tl.constexpr,
    HAS_FINISHED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the sorted candidates of one sequence with its edited tokens."""
    wait_for_kernels(DEPENDENT)
    sequence = tl.program_id(0)
    first_row = sequence * BEAMS
    begin, end = tl.load(bounds_ptr + first_row), tl.load(bounds_ptr + first_row + BEAMS)
    if HAS_FINISHED:  # noqa: SIM102  # decided by the compiler
        if tl.load(finished_ptr + sequence) != 0:
            end = begin
    edit_key, edit_index = _best_edit(
        NO_INDEX,
        -1,
        first_row,
        begin,
        end,
        rows_ptr,
        edit_tokens_ptr,
        factors_ptr,
        taken_ptr,
        totals_ptr,
        beam_scores_ptr,
        VOCABULARY,
        BLOCK,
    )
    found = sequence * BEST
    for rank in range(BEST):
        score = tl.load(found_scores_ptr + found)
        token, parent = tl.load(found_tokens_ptr + found), tl.load(found_parents_ptr + found)
        is_edit = value_of(edit_key) > score
        at = sequence * BEST + rank
        tl.store(tokens_ptr + at, tl.where(is_edit, edit_index % VOCABULARY, token))
        tl.store(parents_ptr + at, tl.where(is_edit, edit_index // VOCABULARY, parent))
        tl.store(scores_ptr + at, tl.where(is_edit, value_of(edit_key), score))
        if is_edit:
            edit_key, edit_index = _best_edit(
                edit_key,
                edit_index,
                first_row,
                begin,
                end,
                rows_ptr,
                edit_tokens_ptr,
                factors_ptr,
                taken_ptr,
                totals_ptr,
                beam_scores_ptr,
                VOCABULARY,
                BLOCK,
            )
        else:
            found += 1


def take_edits(logits: Tensor, edits: BeamEdits, sums: Tensor) -> TakenEdits:
    """Replace the logits of edited tokens by -inf, and write the sums of their exponentials.

    Args:
        logits: `[rows, vocabulary]`.
        sums: `[rows, 2, any]` fp32. The last column receives the maximum, and the sum of exp(logit - maximum).
    """
    rows = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
    bounds = torch.searchsorted(edits.rows, rows, out_int32=True)
    taken = torch.empty_like(edits.factors)
    _take_edits_kernel[(len(logits),)](
        logits,
        bounds,
        edits.tokens,
        taken,
        sums,
        STRIDE=logits.stride(0),
        SUMS=sums.shape[2],
        BLOCK=_BLOCK,
        num_warps=1,
        enable_fp_fusion=False,
        **dependent_launch(),
    )
    return TakenEdits(edits, taken, bounds)


def merge_edits(
    found: BeamCandidates,
    taken: TakenEdits,
    totals: Tensor,
    scores: Tensor,
    finished: Tensor | None,
    vocabulary: int,
    out: BeamCandidates,
) -> None:
    """Write the best of the candidates `found` and of the edited tokens into `out`.

    Args:
        totals: `[sequences · beams, 2]` fp32: maximum of each row, and log Σ exp(logit - maximum).
        scores: `[sequences, beams]` fp32, of each beam so far.
        finished: `[sequences]` bool: sequences without candidates, or None.
    """
    sequences, beams = scores.shape
    _merge_edits_kernel[(sequences,)](
        *found,
        taken.bounds,
        *taken.edits,
        taken.logits,
        totals,
        scores,
        scores if finished is None else finished.view(torch.uint8),
        *out,
        VOCABULARY=vocabulary,
        BEAMS=beams,
        BEST=out.tokens.shape[1],
        HAS_FINISHED=finished is not None,
        BLOCK=_BLOCK,
        num_warps=1,
        # the reference rounds a product before it adds
        enable_fp_fusion=False,
        **dependent_launch(),
    )
