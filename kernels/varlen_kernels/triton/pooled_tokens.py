"""Sums and maxima of tokens, and the vector that a pooling mode makes of them.

A program owns BLOCK features of one sequence, or of a part of it, and reads ROWS tokens at a time. It owns all features
if the vector is normalised, because the norm needs them. Every mode but the maximum is a sum: the first or last token
is the sum of a sequence of one token.
"""

import torch
import triton
import triton.language as tl

from varlen_kernels import Pooling
from varlen_kernels.tuning import Launch
from varlen_kernels.vector_ops import SCALE_OF_HUGE

_WARP_THREADS = 32
_LOAD_BYTES = 16
_MAX_WARPS = 16
# Maximum features per program without a norm.
_MAX_BLOCK = 256
# Maximum elements per thread; more would spill.
_MAX_THREAD_VALUES = 32
# Hardware limit per thread.
_MAX_REGISTERS = 255
# The squares of a huge vector overflow.
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_SCALE_OF_HUGE = tl.constexpr(SCALE_OF_HUGE)


@triton.jit
def sum_tokens(
    x_ptr,
    col,
    tokens,
    first_place,
    HIDDEN: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Return the sum of the first `tokens` rows, [1, BLOCK] fp32.

    If WEIGHTED, a row is multiplied by its place; the place of the first row is `first_place`.
    """
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, col.shape[1]], tl.float32)
    for first in range(0, tokens, ROWS):
        # int64: a sequence's tokens * STRIDE may pass 2**31
        rows_ptr = x_ptr + tl.cast(first, tl.int64) * STRIDE
        inside = (row < tokens - first) & (col < HIDDEN)
        x = tl.load(rows_ptr + row * STRIDE + col, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            x *= (first_place + first + row).to(tl.float32)
        total += x
    return tl.sum(total, axis=0, keep_dims=True)


@triton.jit
def max_tokens(x_ptr, col, tokens, HIDDEN: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return the maximum of the first `tokens` rows, [1, BLOCK] fp32; NaN propagates."""
    row = tl.arange(0, ROWS)[:, None]
    peak = tl.full([ROWS, col.shape[1]], float("-inf"), tl.float32)
    for first in range(0, tokens, ROWS):
        rows_ptr = x_ptr + tl.cast(first, tl.int64) * STRIDE
        inside = (row < tokens - first) & (col < HIDDEN)
        x = tl.load(rows_ptr + row * STRIDE + col, mask=inside, other=float("-inf")).to(tl.float32)
        peak = tl.where((x > peak) | (x != x), x, peak)  # noqa: PLR0124  # NaN
    # tl.max ignores NaN
    has_nan = tl.max((peak != peak).to(tl.int32), axis=0, keep_dims=True) > 0  # noqa: PLR0124
    return tl.where(has_nan, float("nan"), tl.max(peak, axis=0, keep_dims=True))


@triton.jit
def load_unpooled(unpooled_lengths_ptr, sequence, HAS_UNPOOLED: tl.constexpr):
    """Return the number of tokens at the start of a sequence that are not pooled."""
    if HAS_UNPOOLED:
        return tl.load(unpooled_lengths_ptr + sequence)
    return 0


@triton.jit
def finish_pooling(
    pooled,  # [1, BLOCK], sum or maximum of the pooled tokens
    length,
    unpooled,
    sequence,
    col,
    normalize_ptr,
    norm_floor,
    HIDDEN: tl.constexpr,
    MODE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Return the vector of a sequence from its sum or maximum."""
    if MODE == "max":
        pooled = tl.where(length == 0, 0.0, pooled)
    tokens = tl.maximum(length - unpooled, 1).to(tl.float32)
    if MODE == "mean":
        pooled = pooled / tokens
    if MODE == "mean_sqrt":
        pooled = pooled / tl.sqrt(tokens)
    if MODE == "weighted_mean":
        # the sum of places from unpooled + 1 on
        pooled = pooled / (tokens * (tokens + (2 * unpooled + 1)) / 2)
    if NORMALIZE:
        normalize = tl.load(normalize_ptr + sequence) != 0
        if normalize:
            total = _sum_of_squares(pooled, col, HIDDEN)
            if total > _LARGEST:
                # a power of two rounds nothing
                pooled *= _SCALE_OF_HUGE
                total = _sum_of_squares(pooled, col, HIDDEN)
            norm = tl.sqrt(total)
            # not tl.maximum, so that a norm of NaN remains NaN
            pooled = pooled / tl.where(norm < norm_floor, norm_floor, norm)
    return pooled


@triton.jit
def _sum_of_squares(x, col, HIDDEN: tl.constexpr):
    return tl.sum(tl.sum(tl.where(col < HIDDEN, x * x, 0.0), axis=1), axis=0)


def candidate_launches(
    hidden: int, dtype: torch.dtype, mode: Pooling, whole_rows: bool
) -> list[Launch]:
    """Return the candidate launches for rows of this width; the first is the default.

    Args:
        dtype: dtype of the tokens.
        whole_rows: whether a program owns all features.
    """
    padded = triton.next_power_of_2(hidden)
    block = padded if whole_rows else min(padded, _MAX_BLOCK)
    # elements that one warp loads at once
    warp_load = _WARP_THREADS * _LOAD_BYTES // dtype.itemsize
    if mode in {"cls", "last"}:
        warps = min(max(block // warp_load, 1), _MAX_WARPS)
        return [{"ROWS": 1, "BLOCK": block, "num_warps": warps}]
    launches: list[Launch] = []
    # (warps, loads in flight per thread): many, because one program reads a whole sequence
    for warps, loads in ((8, 4), (16, 4), (4, 4), (8, 2), (16, 2)):
        rows = max(1, warps * loads * warp_load // block)
        launch = {"ROWS": rows, "BLOCK": block, "num_warps": warps}
        if mode == "max":
            # without this limit, ptxas spills a register to fit one more program on a multiprocessor
            launch["maxnreg"] = _MAX_REGISTERS
        if rows * block <= warps * _WARP_THREADS * _MAX_THREAD_VALUES and launch not in launches:
            launches.append(launch)
    return launches
