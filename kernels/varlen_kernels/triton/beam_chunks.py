"""The first kernel of a beam search step: the best logits of each chunk.

A chunk is a part of a row; the kernel also writes its sum of exponentials. The groups are parts of a chunk, see `beam`;
the pass that finds the best entry of each group also sums exp.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.beam_keys import (
    NO_INDEX,
    NO_KEY,
    first_after,
    key_of,
    value_of,
    without_nan,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.rows import vector_width
from varlen_kernels.tuning import Launch

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
