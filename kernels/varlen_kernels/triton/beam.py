"""One step of beam search in two kernels: the best continuations of each sequence.

Both kernels work alike, without a sort. Entries are in groups, and only the best entry of each group is known.
There is one round per candidate: the best of these is the best of all. It is selected, and its group is searched for
the next entry. This gives the exact best candidates in order. The order is total, so every run gives the same result.
In the first kernel (`beam_chunks`) the groups are parts of a chunk of the vocabulary. In the second kernel the groups
are the beams of a sequence, and the entries are the results of the first.
Edits need one small kernel before and one after these, see `beam_edits`.
Source: the hierarchical search of Wang et al. 2021 (LightSeq), arXiv:2010.13887, section 3.2, which instead sorts all
entries that reach the lowest of the groups' maxima.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference import beam as beam_reference
from varlen_kernels.reference.beam import BeamCandidates, BeamEdits, check_beams
from varlen_kernels.triton.beam_chunks import candidate_launches, launch_key, search_chunks
from varlen_kernels.triton.beam_edits import merge_edits, take_edits
from varlen_kernels.triton.beam_keys import (
    NO_INDEX,
    NO_KEY,
    first_after,
    key_of,
    value_of,
    without_nan,
)
from varlen_kernels.triton.checks import check_contiguous, check_row_layout
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.tuning import pick

_NO_TOKEN = tl.constexpr(beam_reference.NO_TOKEN)
_NO_PARENT = tl.constexpr(beam_reference.NO_PARENT)


@triton.jit
def _search_beams_kernel(
    found_ptr,  # [sequences * BEAMS, 2, CHUNKS, BEST] int32: sort keys of logits, and their tokens
    sums_ptr,  # [sequences * BEAMS, 2, SUMS]: maximum, and sum of exp(logit - maximum)
    beam_scores_ptr,  # [sequences, BEAMS], scores so far
    finished_ptr,  # [sequences] uint8, read if HAS_FINISHED
    tokens_ptr,  # [sequences, BEST] int32
    parents_ptr,  # [sequences, BEST] int32
    scores_ptr,  # [sequences, BEST]
    totals_ptr,  # [sequences * BEAMS, 2]: maximum, and log Σ exp(logit - maximum); written if HAS_EDITS
    BEAMS: tl.constexpr,
    BEST: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUMS: tl.constexpr,  # at least CHUNKS
    HAS_FINISHED: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    BLOCK_BEAMS: tl.constexpr,  # power of two >= BEAMS
    BLOCK_CHUNKS: tl.constexpr,  # power of two >= SUMS
    BLOCK_FOUND: tl.constexpr,  # power of two >= CHUNKS * BEST
    DEPENDENT: tl.constexpr,
):
    """Find the BEST continuations of one sequence among the results of `_search_chunk_kernel`."""
    wait_for_kernels(DEPENDENT)
    FOUND: tl.constexpr = CHUNKS * BEST
    sequence = tl.program_id(0).to(tl.int64)
    tokens_ptr += sequence * BEST
    parents_ptr += sequence * BEST
    scores_ptr += sequence * BEST
    if HAS_FINISHED:  # noqa: SIM102  # decided by the compiler
        if tl.load(finished_ptr + sequence) != 0:
            for rank in range(BEST):
                tl.store(tokens_ptr + rank, _NO_TOKEN)
                tl.store(parents_ptr + rank, _NO_PARENT)
                tl.store(scores_ptr + rank, float("-inf"))
            return

    beam = tl.arange(0, BLOCK_BEAMS)
    chunk = tl.arange(0, BLOCK_CHUNKS)[None, :]
    found_ptr += sequence * BEAMS * 2 * FOUND
    sums_ptr += sequence * BEAMS * 2 * SUMS
    inside = (beam[:, None] < BEAMS) & (chunk < SUMS)
    peak, log_total = _log_of_sum(sums_ptr + beam[:, None] * 2 * SUMS + chunk, inside, SUMS)
    if HAS_EDITS:
        totals_ptr += (sequence * BEAMS + beam) * 2
        tl.store(totals_ptr, peak, mask=beam < BEAMS)
        tl.store(totals_ptr + 1, log_total, mask=beam < BEAMS)
    beam_score = tl.load(beam_scores_ptr + sequence * BEAMS + beam, mask=beam < BEAMS, other=0.0)
    beam_score = without_nan(beam_score)

    # the best entry of each chunk; among equal keys, the first chunk has the lowest token
    inside = (beam[:, None] < BEAMS) & (chunk < CHUNKS)
    first = beam[:, None] * 2 * FOUND + chunk * BEST
    first = tl.load(found_ptr + first, mask=inside, other=NO_KEY)
    next_keys = tl.max(first, axis=1)
    next_indices = tl.min(tl.where(first == next_keys[:, None], chunk * BEST, NO_INDEX), axis=1)
    entry = tl.arange(0, BLOCK_FOUND)
    for rank in range(BEST):
        score = ((value_of(next_keys) - peak) - log_total) + beam_score
        key = tl.where(next_keys == NO_KEY, NO_KEY, key_of(score))
        best = tl.max(key, axis=0)
        # beam and index in one number, which is lower for the lower beam
        winner = tl.min(tl.where(key == best, beam * FOUND + next_indices, NO_INDEX), axis=0)
        # after the last entry nothing changes
        is_entry = best != NO_KEY
        winner = tl.where(is_entry, winner, 0)
        parent = winner // FOUND
        index = winner % FOUND
        list_ptr = found_ptr + parent * 2 * FOUND
        # a score of -inf is no candidate
        exists = value_of(best) > float("-inf")
        tl.store(tokens_ptr + rank, tl.where(exists, tl.load(list_ptr + FOUND + index), _NO_TOKEN))
        tl.store(parents_ptr + rank, tl.where(exists, parent, _NO_PARENT))
        tl.store(scores_ptr + rank, value_of(best))

        key = tl.load(list_ptr + entry, mask=entry < FOUND, other=NO_KEY)
        key, index = first_after(tl.load(list_ptr + index), index, key, entry)
        advances = is_entry & (beam == parent)
        next_keys = tl.where(advances, key, next_keys)
        next_indices = tl.where(advances, index, next_indices)


@triton.jit
def _log_of_sum(
    sums_ptr,  # [BLOCK_BEAMS, BLOCK_CHUNKS]: maxima, with the sums SUMS elements after them
    inside,
    SUMS: tl.constexpr,
):
    """Return the maximum of each beam's logits and log Σ exp(logit - maximum).

    Both are 0 for a beam whose logits are all -inf.
    """
    peaks = tl.load(sums_ptr, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + SUMS, mask=inside, other=0.0)
    peak = tl.max(peaks, axis=1)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(sums * tl.exp(peaks - peak[:, None]), axis=1)
    return peak, tl.log(tl.where(total > 0.0, total, 1.0))


def beam_step(
    logits: Tensor,
    scores: Tensor,
    finished: Tensor | None = None,
    *,
    width: int | None = None,
    edits: BeamEdits | None = None,
    out: BeamCandidates | None = None,
) -> BeamCandidates:
    """Return the best `width` candidates of each sequence, see `reference.beam_step`.

    Logits of edited tokens are overwritten.

    Raises:
        ValueError: as `reference.beam_step`; or rows of logits, or another tensor, are not contiguous.
    """
    width = check_beams(logits, scores, finished, width, edits, out)
    sequences, beams = scores.shape
    rows, vocabulary = logits.shape
    out = out or BeamCandidates.empty(sequences, width, logits.device)
    check_row_layout(logits=logits)
    check_contiguous(scores=scores, finished=finished)
    for kind, tensors in {"out": out, "edits": edits}.items():
        if tensors is not None:
            check_contiguous(**{f"{kind}.{name}": t for name, t in tensors._asdict().items()})
    if rows == 0:
        return out

    key = launch_key(logits, width)
    launch = pick("beam_step", key, candidate_launches)
    chunks = triton.cdiv(vocabulary, launch["CHUNK"])
    # the edited tokens of a row have a sum of their own
    num_sums = chunks if edits is None else chunks + 1
    found = torch.empty((rows, 2, chunks, width), dtype=torch.int32, device=logits.device)
    sums = torch.empty((rows, 2, num_sums), dtype=torch.float32, device=logits.device)
    flags = scores if finished is None else finished.view(torch.uint8)
    unedited, totals, taken = out, sums, None
    if edits is not None:
        unedited = BeamCandidates.empty(sequences, width, logits.device)
        totals = sums.new_empty(rows, 2)
        taken = take_edits(logits, edits, sums)
    has_finished = finished is not None
    search_chunks(
        logits, flags, found, sums, launch, beams=beams, vector=key[3], has_finished=has_finished
    )
    _search_beams_kernel[(sequences,)](
        found,
        sums,
        scores,
        flags,
        *unedited,
        totals,
        BEAMS=beams,
        BEST=width,
        CHUNKS=chunks,
        SUMS=num_sums,
        HAS_FINISHED=has_finished,
        HAS_EDITS=edits is not None,
        BLOCK_BEAMS=triton.next_power_of_2(beams),
        BLOCK_CHUNKS=triton.next_power_of_2(num_sums),
        BLOCK_FOUND=triton.next_power_of_2(chunks * width),
        num_warps=1,
        enable_fp_fusion=launch["enable_fp_fusion"],
        **dependent_launch(),
    )
    if taken is not None:
        merge_edits(unedited, taken, totals, scores, finished, vocabulary, out)
    return out
