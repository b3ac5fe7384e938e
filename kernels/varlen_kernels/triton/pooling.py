"""Pooling of each packed sequence to one vector: first, last, maximum, sum or a mean.

A product with a vocabulary is pooled slice by slice of the terms.

A program owns BLOCK features of one sequence, or of a part of it, and reads ROWS tokens at a time. It owns all features
if the vector is normalised. Every mode but the maximum is a sum: the first token is a sequence of one token.

If sequences are long on average, one kernel pools parts of each, and a second one merges them: each read of ROWS tokens
waits for memory, so one program would take long for a long sequence. The parts of a sequence depend only on its length,
but whether there are parts depends on its batch, and with it the last bits of a mean.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels import Pooling, TermPooling
from varlen_kernels.reference.vocabulary import SLICE_TERMS, log1p_relu_, logit_slices, new_outputs
from varlen_kernels.triton.checks import (
    check_cu_seqlens,
    check_dtype,
    check_out,
    check_row_layout,
    check_table,
    check_width,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.tuning import Launch, pick
from varlen_kernels.vector_ops import NORM_FLOOR, SCALE_OF_HUGE

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


# Parts of a sequence at most, and tokens of a part at least.
_PARTS = 8
_MIN_PART = 32


@triton.jit
def part_length(length, PARTS: tl.constexpr, MIN_PART: tl.constexpr):
    """Return the number of tokens of each part but the last."""
    return tl.maximum(tl.cdiv(length, PARTS), MIN_PART)


@triton.jit
def _pool_parts_kernel(
    x_ptr,  # [tokens, HIDDEN]
    cu_seqlens_ptr,  # [batch + 1]
    unpooled_lengths_ptr,  # [batch], read if HAS_UNPOOLED
    parts_ptr,  # [batch, PARTS, HIDDEN]; parts without tokens are not written
    X_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    MODE: tl.constexpr,
    HAS_UNPOOLED: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (PARTS * TILES)
    part = tl.program_id(0) // TILES % PARTS
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    unpooled = load_unpooled(unpooled_lengths_ptr, sequence, HAS_UNPOOLED)
    begin = tl.load(cu_seqlens_ptr + sequence) + unpooled
    length = tl.load(cu_seqlens_ptr + sequence + 1) - begin
    size = part_length(length, PARTS, MIN_PART)
    tokens = tl.minimum(length - part * size, size)
    if tokens <= 0:
        return

    # int64: tokens * X_STRIDE may pass 2**31
    tokens_ptr = x_ptr + (begin + part * size).to(tl.int64) * X_STRIDE
    if MODE == "max":
        pooled = max_tokens(tokens_ptr, col, tokens, HIDDEN, X_STRIDE, ROWS)
    else:
        pooled = sum_tokens(
            tokens_ptr,
            col,
            tokens,
            part * size + (unpooled + 1),
            HIDDEN,
            X_STRIDE,
            ROWS,
            MODE == "weighted_mean",
        )
    row = sequence.to(tl.int64) * PARTS + part
    tl.store(parts_ptr + row * HIDDEN + col, pooled, mask=col < HIDDEN)


@triton.jit
def _merge_parts_kernel(
    parts_ptr,  # [batch, PARTS, HIDDEN]
    cu_seqlens_ptr,  # [batch + 1]
    unpooled_lengths_ptr,  # [batch], read if HAS_UNPOOLED
    normalize_ptr,  # [batch], read if NORMALIZE
    out_ptr,  # [batch, HIDDEN]
    norm_floor,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    MODE: tl.constexpr,
    HAS_UNPOOLED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HIDDEN if NORMALIZE
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // TILES
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    length = tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)
    unpooled = load_unpooled(unpooled_lengths_ptr, sequence, HAS_UNPOOLED)
    parts = tl.cdiv(length - unpooled, part_length(length - unpooled, PARTS, MIN_PART))
    # int64: batch * PARTS * HIDDEN may pass 2**31
    parts_ptr += sequence.to(tl.int64) * (PARTS * HIDDEN)
    if MODE == "max":
        pooled = max_tokens(parts_ptr, col, parts, HIDDEN, HIDDEN, ROWS)
    else:
        pooled = sum_tokens(parts_ptr, col, parts, 1, HIDDEN, HIDDEN, ROWS, False)
    pooled = finish_pooling(
        pooled, length, unpooled, sequence, col, normalize_ptr, norm_floor, HIDDEN, MODE, NORMALIZE
    )
    tl.store(out_ptr + sequence.to(tl.int64) * OUT_STRIDE + col, pooled, mask=col < HIDDEN)


def pool_parts(
    x: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    form: dict[str, Any],
    *,
    normalized: bool,
) -> Tensor:
    """Write the pooled vectors into `out` by two kernels."""
    batch, hidden = out.shape
    parts = torch.empty((batch, _PARTS, hidden), dtype=torch.float32, device=x.device)
    form = {**form, "PARTS": _PARTS, "MIN_PART": _MIN_PART}
    launch = pick("pool_parts", (hidden, x.dtype, form["MODE"], False), candidate_launches)
    tiles = triton.cdiv(hidden, launch["BLOCK"])
    _pool_parts_kernel[(batch * _PARTS * tiles,)](
        x,
        *tables[:2],
        parts,
        X_STRIDE=x.stride(0),
        **form,
        **launch,
        **dependent_launch(),
    )
    key = (hidden, parts.dtype, form["MODE"], normalized)
    launch = pick("merge_parts", key, candidate_launches)
    _merge_parts_kernel[(batch * triton.cdiv(hidden, launch["BLOCK"]),)](
        parts,
        *tables,
        out,
        NORM_FLOOR,
        OUT_STRIDE=out.stride(0),
        NORMALIZE=normalized,
        **form,
        **launch,
        **dependent_launch(),
    )
    return out


# Mean length from which sequences are pooled in parts.
_LONG = 64


@triton.jit
def _pool_kernel(
    x_ptr,  # [tokens, HIDDEN]
    cu_seqlens_ptr,  # [batch + 1]
    unpooled_lengths_ptr,  # [batch], read if HAS_UNPOOLED
    normalize_ptr,  # [batch], read if NORMALIZE
    out_ptr,  # [batch, HIDDEN]
    norm_floor,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    MODE: tl.constexpr,
    HAS_UNPOOLED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HIDDEN if NORMALIZE
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // TILES
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    begin = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    length = end - begin
    unpooled = load_unpooled(unpooled_lengths_ptr, sequence, HAS_UNPOOLED)
    if HAS_UNPOOLED and MODE == "cls":
        # without a pooled token, the first of all
        unpooled = tl.where(unpooled < length, unpooled, 0)
    begin += unpooled
    if MODE == "cls":
        end = tl.minimum(end, begin + 1)
    if MODE == "last":
        begin = tl.maximum(begin, end - 1)
    # int64: tokens * X_STRIDE may pass 2**31
    tokens_ptr = x_ptr + begin.to(tl.int64) * X_STRIDE

    if MODE == "max":
        pooled = max_tokens(tokens_ptr, col, end - begin, HIDDEN, X_STRIDE, ROWS)
    else:
        pooled = sum_tokens(
            tokens_ptr,
            col,
            end - begin,
            unpooled + 1,
            HIDDEN,
            X_STRIDE,
            ROWS,
            MODE == "weighted_mean",
        )
    pooled = finish_pooling(
        pooled, length, unpooled, sequence, col, normalize_ptr, norm_floor, HIDDEN, MODE, NORMALIZE
    )
    tl.store(out_ptr + sequence.to(tl.int64) * OUT_STRIDE + col, pooled, mask=col < HIDDEN)


def pool(
    x: Tensor,
    cu_seqlens: Tensor,
    normalize: Tensor | None = None,
    unpooled_lengths: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    mode: Pooling,
    out: Tensor | None = None,
) -> Tensor:
    """Return one fp32 vector per sequence, `[batch, hidden]`, see `reference.pool`.

    Raises:
        ValueError: a shape, dtype or layout is not supported, or hidden is over MAX_ROW.
    """
    _check(x, cu_seqlens)
    if rows is not None and len(rows):
        x = x.index_select(0, rows)
    shape = (len(cu_seqlens) - 1, x.shape[1])
    check_table(shape[:1], torch.bool, normalize=normalize)
    check_table(shape[:1], torch.int32, unpooled_lengths=unpooled_lengths)
    if out is None:
        out = x.new_empty(shape, dtype=torch.float32)
    check_out(out, shape, torch.float32)
    return _run_kernel("pool", x, cu_seqlens, normalize, unpooled_lengths, mode=mode, out=out)


def first_tokens(x: Tensor, cu_seqlens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the first token of each sequence, `[batch, hidden]`, see `reference.first_tokens`.

    Raises:
        ValueError: a shape, dtype or layout is not supported, or hidden is over MAX_ROW.
    """
    _check(x, cu_seqlens)
    shape = (len(cu_seqlens) - 1, x.shape[1])
    if out is None:
        out = x.new_empty(shape)
    check_out(out, shape, x.dtype)
    return _run_kernel("first_tokens", x, cu_seqlens, None, None, mode="cls", out=out)


def _run_kernel(
    op: str,
    x: Tensor,
    cu_seqlens: Tensor,
    normalize: Tensor | None,
    unpooled_lengths: Tensor | None,
    *,
    mode: Pooling,
    out: Tensor,
) -> Tensor:
    batch, hidden = out.shape
    if batch == 0:
        return out
    tables = (
        cu_seqlens,
        cu_seqlens if unpooled_lengths is None else unpooled_lengths,
        cu_seqlens if normalize is None else normalize,
    )
    has_unpooled, normalized = unpooled_lengths is not None, normalize is not None
    form = {"HIDDEN": hidden, "MODE": mode, "HAS_UNPOOLED": has_unpooled}
    if mode not in {"cls", "last"} and len(x) >= _LONG * batch:
        return pool_parts(x, tables, out, form, normalized=normalized)
    launch = pick(op, (hidden, x.dtype, mode, normalized), candidate_launches)
    tiles = triton.cdiv(hidden, launch["BLOCK"])
    _pool_kernel[(batch * tiles,)](
        x,
        *tables,
        out,
        NORM_FLOOR,
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        NORMALIZE=normalized,
        **form,
        **launch,
        **dependent_launch(),
    )
    return out


def _check(x: Tensor, cu_seqlens: Tensor) -> None:
    check_dtype(x=x)
    check_row_layout(x=x)
    check_width(x.shape[1])
    check_cu_seqlens(cu_seqlens)


def term_weights(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    mode: TermPooling,
    logs: int = 1,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each term for each sequence, see `reference.term_weights`.

    Raises:
        ValueError: a shape, dtype or layout is not supported.
    """
    check_dtype(x=x)
    check_row_layout(x=x)
    check_cu_seqlens(cu_seqlens)
    weights, scratch = new_outputs(x, weight, cu_seqlens) if out is None else out
    check_out(weights, (len(cu_seqlens) - 1, weight.shape[1]), torch.float32)
    check_out(scratch, (len(x), min(weight.shape[1], SLICE_TERMS)), x.dtype)
    for terms, logits in logit_slices(x, weight, bias, scratch):
        if mode == "sum":
            log1p_relu_(logits, logs)
        pool(logits, cu_seqlens, mode=mode, out=weights[:, terms])
    if mode == "max":
        log1p_relu_(weights, logs)
    return weights, scratch
