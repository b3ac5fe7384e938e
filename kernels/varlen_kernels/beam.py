"""One step of beam search in two launches: the best 2K continuations of a sequence with K beams, without a sort.

Both launches play the same game. Of each group only the best member is known; the best of those is the best of all, and
then its group alone is looked into again, for the member that comes next. 2K such rounds give the exact best 2K in
order. First the groups are slices of a chunk of the vocabulary, in a single pass that also sums exp; then they are the
beams of a sequence, whose members are what the first launch found. The order is total, so every run agrees.
Source: the hierarchical search of Wang et al. 2021 (LightSeq), arXiv:2010.13887, section 3.2, which instead sorts all
that reach the least of the groups' maxima.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels import beam_reference
from varlen_kernels.beam_keys import NO_INDEX, NO_KEY, first_after, key_of, value_of, without_nan
from varlen_kernels.beam_reference import BeamCandidates, check_beams
from varlen_kernels.checks import check_row_layout
from varlen_kernels.rows import vector_width
from varlen_kernels.tuning import Launch, pick

_NO_TOKEN = tl.constexpr(beam_reference.NO_TOKEN)
_NO_PARENT = tl.constexpr(beam_reference.NO_PARENT)
_LOG2_E = tl.constexpr(math.log2(math.e))

# Launches are chosen by the bucket that the rows of logits fall into; more rows than the last are as many.
_ROW_BUCKETS = (32, 128, 512)
# With so many warps at work a large GPU waits for memory and not for a warp's rounds.
_WARPS = 2048
_SMALLEST_CHUNK = 1024
# A warp looks into all that was found for a beam in each round of the second launch.
_MOST_FOUND = 512
# What a lane loads at once, and most members of a group that stand in one lane each.
_VALUES = 32
_LANES = 32


@triton.jit
def _search_chunk_kernel(
    logits_ptr,  # [sequences * BEAMS, VOCABULARY]
    finished_ptr,  # [sequences] uint8, read if HAS_FINISHED
    found_ptr,  # [sequences * BEAMS, 2, CHUNKS, BEST] int32: keys of logits, and their tokens
    sums_ptr,  # [sequences * BEAMS, 2, CHUNKS]: maximum, and sum of exp(logit - maximum)
    STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BEAMS: tl.constexpr,
    BEST: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_FINISHED: tl.constexpr,
    CHUNK: tl.constexpr,  # a multiple of TILE
    TILE: tl.constexpr,  # loaded at once; a multiple of GROUPS * VECTOR
    GROUPS: tl.constexpr,  # every lane has whole groups, if a multiple of the lanes
    VECTOR: tl.constexpr,  # neighbours that one load can take
):
    """Find the BEST logits of one chunk of one row, in order, and the sum of its exponentials."""
    row = tl.program_id(0).to(tl.int64)  # int64: rows * VOCABULARY may pass 2**31
    chunk = tl.program_id(1)
    if HAS_FINISHED:  # noqa: SIM102  # decided by the compiler
        if tl.load(finished_ptr + row // BEAMS) != 0:
            return
    logits_ptr += row * STRIDE
    start = chunk * CHUNK

    heads, tokens, sums = _read_chunk(logits_ptr, start, VOCABULARY, CHUNK, TILE, GROUPS, VECTOR)
    peaks = value_of(heads)
    peak = value_of(tl.max(heads, axis=0))
    total = tl.sum(sums * tl.exp(peaks - tl.where(peak > float("-inf"), peak, 0.0)), axis=0)
    sums_ptr += row * 2 * CHUNKS + chunk
    tl.store(sums_ptr, peak)
    tl.store(sums_ptr + CHUNKS, total)

    found_ptr += (row * 2 * CHUNKS + chunk) * BEST
    group = tl.arange(0, GROUPS)
    # [CHUNK / GROUPS] where a group's members are, after the first
    member = tl.arange(0, CHUNK // GROUPS)
    member = member // VECTOR * (GROUPS * VECTOR) + member % VECTOR
    rounds = tl.minimum(BEST, VOCABULARY - start)
    for rank in range(rounds, BEST):
        tl.store(found_ptr + rank, NO_KEY)
    for rank in range(rounds):
        best = tl.max(heads, axis=0)
        token = tl.min(tl.where(heads == best, tokens, NO_INDEX), axis=0)
        tl.store(found_ptr + rank, best)
        tl.store(found_ptr + CHUNKS * BEST + rank, token)

        winner = (token - start) // VECTOR % GROUPS
        at = start + winner * VECTOR + member
        inside = at < VOCABULARY
        key = key_of(without_nan(tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)))
        key, place = first_after(best, token, tl.where(inside, key, NO_KEY), at)
        heads = tl.where(group == winner, key, heads)
        tokens = tl.where(group == winner, place, tokens)


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
    """Return of each group its largest key, the first token that has it, and the sum of exp(logit - largest)."""
    DEPTH: tl.constexpr = TILE // (GROUPS * VECTOR)
    # [GROUPS, VECTOR] where the first neighbours of each group are; DEPTH such lots make a tile
    member = tl.arange(0, GROUPS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    heads = tl.full([GROUPS], NO_KEY, tl.int32)
    tokens = tl.full([GROUPS], NO_INDEX, tl.int32)
    sums = tl.zeros([GROUPS], tl.float32)
    tiles = 1
    if CHUNK > TILE:
        tiles = tl.cdiv(tl.minimum(CHUNK, VOCABULARY - start), TILE)
    for tile in range(tiles):
        token = start + tile * TILE + member
        x = _load_tile(logits_ptr, token, VOCABULARY, DEPTH, GROUPS * VECTOR, VECTOR)
        top = x[0]
        for i in tl.static_range(1, DEPTH):
            top = tl.maximum(top, x[i])
        top = tl.max(top, axis=1)
        first = tl.full([GROUPS, VECTOR], NO_INDEX, tl.int32)
        for i in tl.static_range(DEPTH):
            at = token + i * (GROUPS * VECTOR)
            first = tl.minimum(first, tl.where(x[i] == top[:, None], at, NO_INDEX))
        first = tl.min(first, axis=1)
        key = tl.where(first < VOCABULARY, key_of(top), NO_KEY)
        # of equal logits the one of an earlier tile stays
        tokens = tl.where(key > heads, first, tokens)
        key = tl.maximum(key, heads)

        peak = value_of(key)
        peak = tl.where(peak > float("-inf"), peak, 0.0)
        here = tl.zeros([GROUPS, VECTOR], tl.float32)
        for i in tl.static_range(DEPTH):
            here += tl.exp2((x[i] - peak[:, None]) * _LOG2_E)
        sums = sums * tl.exp2((value_of(heads) - peak) * _LOG2_E) + tl.sum(here, axis=1)
        heads = key
    return heads, tokens, sums


@triton.jit
def _load_tile(
    logits_ptr,  # [VOCABULARY]
    token,  # [GROUPS, VECTOR] of the first lot
    VOCABULARY: tl.constexpr,
    DEPTH: tl.constexpr,
    STEP: tl.constexpr,  # from lot to lot
    VECTOR: tl.constexpr,
):
    """Return DEPTH lots of logits in fp32, -inf past the vocabulary."""
    READABLE: tl.constexpr = (VOCABULARY + VECTOR - 1) // VECTOR * VECTOR
    lots = ()
    for i in tl.static_range(DEPTH):
        at = token + i * STEP
        # whole vectors, which are aligned and so never leave what was allocated
        x = tl.load(logits_ptr + at, mask=at < READABLE, other=float("-inf")).to(tl.float32)
        if VOCABULARY % VECTOR != 0:
            x = tl.where(at < VOCABULARY, x, float("-inf"))
        lots += (without_nan(x),)  # type: ignore[assignment]  # a longer tuple
    return lots


@triton.jit
def _search_beams_kernel(
    found_ptr,  # [sequences * BEAMS, 2, CHUNKS, BEST] int32: keys of logits, and their tokens
    sums_ptr,  # [sequences * BEAMS, 2, CHUNKS]: maximum, and sum of exp(logit - maximum)
    running_ptr,  # [sequences, BEAMS]
    finished_ptr,  # [sequences] uint8, read if HAS_FINISHED
    tokens_ptr,  # [sequences, BEST] int32
    parents_ptr,  # [sequences, BEST] int32
    scores_ptr,  # [sequences, BEST]
    BEAMS: tl.constexpr,
    BEST: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_FINISHED: tl.constexpr,
    BLOCK_BEAMS: tl.constexpr,  # power of two >= BEAMS
    BLOCK_CHUNKS: tl.constexpr,  # power of two >= CHUNKS
    BLOCK_FOUND: tl.constexpr,  # power of two >= CHUNKS * BEST
):
    """Find the BEST candidates of one sequence among the BEST of each chunk of each beam."""
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
    inside = (beam[:, None] < BEAMS) & (chunk < CHUNKS)
    found_ptr += sequence * BEAMS * 2 * FOUND
    sums_ptr += sequence * BEAMS * 2 * CHUNKS
    peak, log_total = _log_of_sum(sums_ptr + beam[:, None] * 2 * CHUNKS + chunk, inside, CHUNKS)
    running = tl.load(running_ptr + sequence * BEAMS + beam, mask=beam < BEAMS, other=0.0)
    running = without_nan(running)

    # the first of what each chunk found; of equal ones, that of the first chunk has the lowest token
    first = beam[:, None] * 2 * FOUND + chunk * BEST
    first = tl.load(found_ptr + first, mask=inside, other=NO_KEY)
    heads = tl.max(first, axis=1)
    places = tl.min(tl.where(first == heads[:, None], chunk * BEST, NO_INDEX), axis=1)
    member = tl.arange(0, BLOCK_FOUND)
    for rank in range(BEST):
        score = ((value_of(heads) - peak) - log_total) + running
        key = tl.where(heads == NO_KEY, NO_KEY, key_of(score))
        best = tl.max(key, axis=0)
        # beam and place in one number, which is lower for the lower beam
        winner = tl.min(tl.where(key == best, beam * FOUND + places, NO_INDEX), axis=0)
        parent = winner // FOUND
        place = winner % FOUND
        list_ptr = found_ptr + parent * 2 * FOUND
        there = best != NO_KEY
        tl.store(tokens_ptr + rank, tl.where(there, tl.load(list_ptr + FOUND + place), _NO_TOKEN))
        tl.store(parents_ptr + rank, tl.where(there, parent, _NO_PARENT))
        tl.store(scores_ptr + rank, value_of(best))

        key = tl.load(list_ptr + member, mask=member < FOUND, other=NO_KEY)
        key, place = first_after(tl.load(list_ptr + place), place, key, member)
        heads = tl.where(beam == parent, key, heads)
        places = tl.where(beam == parent, place, places)


@triton.jit
def _log_of_sum(
    sums_ptr,  # [BLOCK_BEAMS, BLOCK_CHUNKS]: maxima; the sums are CHUNKS further on
    inside,
    CHUNKS: tl.constexpr,
):
    """Return the maximum of each beam's logits and log Σ exp(logit - maximum), 0 and 0 for -inf alone."""
    peaks = tl.load(sums_ptr, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + CHUNKS, mask=inside, other=0.0)
    peak = tl.max(peaks, axis=1)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(sums * tl.exp(peaks - peak[:, None]), axis=1)
    return peak, tl.log(tl.where(total > 0.0, total, 1.0))


def beam_step(
    logits: Tensor,
    scores: Tensor,
    finished: Tensor | None = None,
    *,
    out: BeamCandidates | None = None,
) -> BeamCandidates:
    """Return the best 2 · beams candidates of each sequence, as `reference.beam_step` does.

    Raises:
        ValueError: as of `reference.beam_step`; or rows of logits, or another tensor, are not contiguous.
    """
    check_beams(logits, scores, finished, out)
    sequences, beams = scores.shape
    rows, vocabulary = logits.shape
    if out is None:
        out = BeamCandidates.empty(sequences, beams, logits.device)
    check_row_layout(logits=logits)
    _check_contiguous(scores=scores, finished=finished)
    _check_contiguous(**{f"out.{name}": tensor for name, tensor in out._asdict().items()})
    if rows == 0:
        return out

    key = launch_key(logits, beams)
    launch = pick("beam_step", key, candidates)
    chunks, best = triton.cdiv(vocabulary, launch["CHUNK"]), 2 * beams
    found = torch.empty((rows, 2, chunks, best), dtype=torch.int32, device=logits.device)
    sums = torch.empty((rows, 2, chunks), dtype=torch.float32, device=logits.device)
    flags = scores if finished is None else finished.view(torch.uint8)
    _search_chunk_kernel[(rows, chunks)](
        logits,
        flags,
        found,
        sums,
        STRIDE=logits.stride(0),
        VOCABULARY=vocabulary,
        BEAMS=beams,
        BEST=best,
        CHUNKS=chunks,
        HAS_FINISHED=finished is not None,
        VECTOR=key[3],
        **launch,
    )
    _search_beams_kernel[(sequences,)](
        found,
        sums,
        scores,
        flags,
        *out,
        BEAMS=beams,
        BEST=best,
        CHUNKS=chunks,
        HAS_FINISHED=finished is not None,
        BLOCK_BEAMS=triton.next_power_of_2(beams),
        BLOCK_CHUNKS=triton.next_power_of_2(chunks),
        BLOCK_FOUND=triton.next_power_of_2(chunks * best),
        num_warps=1,
        enable_fp_fusion=launch["enable_fp_fusion"],
    )
    return out


def launch_key(logits: Tensor, beams: int) -> tuple[int, int, int, int, torch.dtype]:
    """Return what the launch depends on, as `candidates` takes it."""
    rows, vocabulary = logits.shape
    bucket = next((bound for bound in _ROW_BUCKETS if rows <= bound), _ROW_BUCKETS[-1])
    vector = vector_width(logits.dtype, logits.stride(0))
    return beams, vocabulary, bucket, vector, logits.dtype


def candidates(
    beams: int, vocabulary: int, rows: int, vector: int, dtype: torch.dtype
) -> list[Launch]:
    """Return launches of the first kernel, the first for a GPU on which none was measured.

    Args:
        beams: of a sequence.
        vocabulary: of a row.
        rows: the bucket of sequences · beams.
        vector: elements of one load.
        dtype: of the logits.
    """
    del dtype
    most = max(1, min(_MOST_FOUND // (2 * beams), _WARPS // rows))
    chunk = _SMALLEST_CHUNK
    while triton.cdiv(vocabulary, chunk) > most:
        chunk *= 2
    warps = min(max(chunk // 4096, 1), 4)
    shapes = [(chunk, warps), (chunk, 2 * warps), (2 * chunk, warps), (2 * chunk, 2 * warps)]
    shapes += [(chunk, 4 * warps), (4 * chunk, 2 * warps), (4 * chunk, 4 * warps)]
    if chunk > _SMALLEST_CHUNK:
        shapes.append((chunk // 2, warps))
    return [_launch(chunk, warps, vector) for chunk, warps in shapes]


def _launch(chunk: int, warps: int, vector: int) -> Launch:
    """Return a launch in which a round takes about as long to find the best group as to look into it."""
    groups = min(chunk // _LANES, 2 << (math.isqrt(chunk).bit_length() - 1))
    groups = max(groups, _LANES * warps)
    tile = min(chunk, max(_VALUES * _LANES * warps, groups * vector))
    return {"CHUNK": chunk, "TILE": tile, "GROUPS": groups, "num_warps": warps}


def _check_contiguous(**tensors: Tensor | None) -> None:
    """Check that each is contiguous.

    Raises:
        ValueError: one is not; the message names it.
    """
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
