"""One step of beam search in two kernels: the best continuations of each sequence.

Both kernels work alike, without a sort. Entries are in groups, and only the best entry of each group is known. There
is one round per candidate: the best of these is selected, and its group is searched for the next entry. The order is
total, so every run gives the same result.
In the first kernel the groups are parts of a chunk, which is a part of a row; the pass that finds the best entry of
each group also sums exp. In the second kernel the groups are the beams of a sequence, and the entries are the results
of the first.

Edits need one small kernel before these, which takes the edited tokens out of the logits and sums their exponentials,
and one after them, which merges the candidates that were found with the edited tokens. It reads all edits of a sequence
for each one that it selects, because they are few.
Source: the hierarchical search of Wang et al. 2021 (LightSeq), arXiv:2010.13887, section 3.2, which instead sorts all
entries that reach the lowest of the groups' maxima.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.functions import NO_TOKEN
from varlen_kernels.reference import beam as beam_reference
from varlen_kernels.reference.beam import BeamCandidates, BeamEdits, check_beams
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
from varlen_kernels.triton.rows import vector_width
from varlen_kernels.tuning import Launch, pick

_NO_TOKEN = tl.constexpr(NO_TOKEN)
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


_LOG2_E = tl.constexpr(math.log2(math.e))

# Upper bounds of the buckets of logits rows; more rows than the last bound are in the last bucket.
_ROW_BUCKETS = (32, 128, 512)
# With this number of warps a large GPU is bound by memory, not by the latency of a warp's rounds.
_ENOUGH_WARPS = 2048
_MIN_CHUNK = 1024
# Maximum entries per beam in the second kernel, where one warp reads all entries of a beam in each round.
_MAX_FOUND = 512
# Elements that a thread loads at once.
_THREAD_VALUES = 32
_WARP_THREADS = 32


@triton.jit
def _search_chunk_kernel(
    logits_ptr,  # [sequences * BEAMS, VOCABULARY]
    finished_ptr,  # [sequences] uint8, read if HAS_FINISHED
    found_ptr,  # [sequences * BEAMS, 2, CHUNKS, BEST] int32: sort keys of logits, and their tokens
    sums_ptr,  # [sequences * BEAMS, 2, SUMS]: maximum, and sum of exp(logit - maximum)
    STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BEAMS: tl.constexpr,
    BEST: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUMS: tl.constexpr,  # at least CHUNKS
    HAS_FINISHED: tl.constexpr,
    CHUNK: tl.constexpr,  # a multiple of TILE
    TILE: tl.constexpr,  # loaded at once; a multiple of GROUPS * VECTOR
    GROUPS: tl.constexpr,  # a multiple of the threads, so that each thread has whole groups
    VECTOR: tl.constexpr,  # adjacent elements of one load
    DEPENDENT: tl.constexpr,
):
    """Find the BEST logits of one chunk of a row, and its sum of exponentials."""
    wait_for_kernels(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)  # int64: rows * VOCABULARY may pass 2**31
    chunk = tl.program_id(1)
    if HAS_FINISHED:  # noqa: SIM102  # decided by the compiler
        if tl.load(finished_ptr + row // BEAMS) != 0:
            return
    logits_ptr += row * STRIDE
    start = chunk * CHUNK

    next_keys, next_tokens, sums = _read_chunk(
        logits_ptr, start, VOCABULARY, CHUNK, TILE, GROUPS, VECTOR
    )
    peaks = value_of(next_keys)
    peak = value_of(tl.max(next_keys, axis=0))
    total = tl.sum(sums * tl.exp(peaks - tl.where(peak > float("-inf"), peak, 0.0)), axis=0)
    sums_ptr += row * 2 * SUMS + chunk
    tl.store(sums_ptr, peak)
    tl.store(sums_ptr + SUMS, total)

    found_ptr += (row * 2 * CHUNKS + chunk) * BEST
    group = tl.arange(0, GROUPS)
    # [CHUNK / GROUPS] offsets of a group's entries from its first one
    entry = tl.arange(0, CHUNK // GROUPS)
    entry = entry // VECTOR * (GROUPS * VECTOR) + entry % VECTOR
    rounds = tl.minimum(BEST, VOCABULARY - start)
    for rank in range(rounds, BEST):
        tl.store(found_ptr + rank, NO_KEY)
    for rank in range(rounds):
        best = tl.max(next_keys, axis=0)
        token = tl.min(tl.where(next_keys == best, next_tokens, NO_INDEX), axis=0)
        tl.store(found_ptr + rank, best)
        tl.store(found_ptr + CHUNKS * BEST + rank, token)

        best_group = (token - start) // VECTOR % GROUPS
        at = start + best_group * VECTOR + entry
        inside = at < VOCABULARY
        key = key_of(without_nan(tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)))
        key, token = first_after(best, token, tl.where(inside, key, NO_KEY), at)
        next_keys = tl.where(group == best_group, key, next_keys)
        next_tokens = tl.where(group == best_group, token, next_tokens)


@triton.jit
def _read_chunk(
    logits_ptr,  # [VOCABULARY]
    start,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Return each group's largest key, its first token, and the sum of exp(logit - largest)."""
    DEPTH: tl.constexpr = TILE // (GROUPS * VECTOR)
    # [GROUPS, VECTOR] offsets of the first VECTOR entries of each group: one of the DEPTH slices of a tile
    entry = tl.arange(0, GROUPS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    next_keys = tl.full([GROUPS], NO_KEY, tl.int32)
    next_tokens = tl.full([GROUPS], NO_INDEX, tl.int32)
    sums = tl.zeros([GROUPS], tl.float32)
    tiles = 1
    if CHUNK > TILE:
        tiles = tl.cdiv(tl.minimum(CHUNK, VOCABULARY - start), TILE)
    for tile in range(tiles):
        token = start + tile * TILE + entry
        x = _load_tile(logits_ptr, token, VOCABULARY, DEPTH, GROUPS * VECTOR, VECTOR)
        largest = x[0]
        for i in tl.static_range(1, DEPTH):
            largest = tl.maximum(largest, x[i])
        largest = tl.max(largest, axis=1)
        first = tl.full([GROUPS, VECTOR], NO_INDEX, tl.int32)
        for i in tl.static_range(DEPTH):
            at = token + i * (GROUPS * VECTOR)
            first = tl.minimum(first, tl.where(x[i] == largest[:, None], at, NO_INDEX))
        first = tl.min(first, axis=1)
        key = tl.where(first < VOCABULARY, key_of(largest), NO_KEY)
        # among equal logits, the logit of the earlier tile
        next_tokens = tl.where(key > next_keys, first, next_tokens)
        key = tl.maximum(key, next_keys)

        peak = value_of(key)
        peak = tl.where(peak > float("-inf"), peak, 0.0)
        tile_sums = tl.zeros([GROUPS, VECTOR], tl.float32)
        for i in tl.static_range(DEPTH):
            tile_sums += tl.exp2((x[i] - peak[:, None]) * _LOG2_E)
        sums = sums * tl.exp2((value_of(next_keys) - peak) * _LOG2_E) + tl.sum(tile_sums, axis=1)
        next_keys = key
    return next_keys, next_tokens, sums


@triton.jit
def _load_tile(
    logits_ptr,  # [VOCABULARY]
    token,  # [GROUPS, VECTOR], of the first slice
    VOCABULARY: tl.constexpr,
    DEPTH: tl.constexpr,
    STEP: tl.constexpr,  # from slice to slice
    VECTOR: tl.constexpr,
):
    """Return a tile as DEPTH slices of [GROUPS, VECTOR] fp32, -inf past the vocabulary."""
    READABLE: tl.constexpr = (VOCABULARY + VECTOR - 1) // VECTOR * VECTOR
    slices = ()
    for i in tl.static_range(DEPTH):
        at = token + i * STEP
        # whole aligned vectors, which cannot cross the end of the allocation
        x = tl.load(logits_ptr + at, mask=at < READABLE, other=float("-inf")).to(tl.float32)
        if VOCABULARY % VECTOR != 0:
            x = tl.where(at < VOCABULARY, x, float("-inf"))
        slices += (without_nan(x),)  # type: ignore[assignment]  # a longer tuple
    return slices


def search_chunks(
    logits: Tensor,
    flags: Tensor,
    found: Tensor,
    sums: Tensor,
    launch: Launch,
    *,
    beams: int,
    vector: int,
    has_finished: bool,
) -> None:
    """Write the best logits of each chunk, and its sum of exponentials.

    Args:
        logits: `[sequences · beams, vocabulary]`.
        flags: `[sequences]` uint8, 1 for a finished sequence; read if `has_finished`.
        found: `[sequences · beams, 2, chunks, width]` int32: sort keys of logits, and their tokens.
        sums: `[sequences · beams, 2, chunks or more]` fp32: maximum, and sum of exp(logit - maximum).
        vector: elements of one load, see `launch_key`.
        has_finished: whether there are flags.
    """
    rows, _, chunks, width = found.shape
    _search_chunk_kernel[(rows, chunks)](
        logits,
        flags,
        found,
        sums,
        STRIDE=logits.stride(0),
        VOCABULARY=logits.shape[1],
        BEAMS=beams,
        BEST=width,
        CHUNKS=chunks,
        SUMS=sums.shape[2],
        HAS_FINISHED=has_finished,
        VECTOR=vector,
        **launch,
        **dependent_launch(),
    )


def launch_key(logits: Tensor, width: int) -> tuple[int, int, int, int, torch.dtype]:
    """Return the launch key, whose entries are the arguments of `candidate_launches`."""
    rows, vocabulary = logits.shape
    bucket = next((bound for bound in _ROW_BUCKETS if rows <= bound), _ROW_BUCKETS[-1])
    # the last vector of a row may reach past the vocabulary, but not past the memory if every vector is aligned
    first = logits.data_ptr() // logits.dtype.itemsize
    vector = vector_width(logits.dtype, logits.stride(0), first)
    return width, vocabulary, bucket, vector, logits.dtype


def candidate_launches(
    width: int, vocabulary: int, rows: int, vector: int, dtype: torch.dtype
) -> list[Launch]:
    """Return the candidate launches of the first kernel; the first is the default.

    Args:
        width: candidates per sequence.
        rows: the bucket of sequences · beams.
    """
    del dtype
    max_chunks = max(1, min(_MAX_FOUND // width, _ENOUGH_WARPS // rows))
    chunk = max(_MIN_CHUNK, triton.next_power_of_2(triton.cdiv(vocabulary, max_chunks)))
    warps = min(max(chunk // 4096, 1), 4)
    shapes = [(chunk, warps), (chunk, 2 * warps), (2 * chunk, warps), (2 * chunk, 2 * warps)]
    shapes += [(chunk, 4 * warps), (4 * chunk, 2 * warps), (4 * chunk, 4 * warps)]
    if chunk > _MIN_CHUNK:
        shapes.append((chunk // 2, warps))
    return [_launch(chunk, warps, vector) for chunk, warps in shapes]


def _launch(chunk: int, warps: int, vector: int) -> Launch:
    """Return a launch whose rounds take equal time for both steps.

    The steps are to find the best group, and to search that group again.
    """
    groups = min(chunk // _WARP_THREADS, 2 << (math.isqrt(chunk).bit_length() - 1))
    groups = max(groups, _WARP_THREADS * warps)
    tile = min(chunk, max(_THREAD_VALUES * _WARP_THREADS * warps, groups * vector))
    return {"CHUNK": chunk, "TILE": tile, "GROUPS": groups, "num_warps": warps}


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
