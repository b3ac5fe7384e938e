"""Pooling of each packed sequence to one vector: first, last, maximum, sum or a mean.

One program pools BLOCK features of one sequence, see `pooled_tokens`. If sequences are long on average, two kernels
pool parts of them, see `pooling_parts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels import Pooling
from varlen_kernels.triton.checks import (
    check_cu_seqlens,
    check_dtype,
    check_out,
    check_row_layout,
    check_width,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.pooled_tokens import (
    candidate_launches,
    finish_pooling,
    load_unpooled,
    max_tokens,
    sum_tokens,
)
from varlen_kernels.triton.pooling_parts import pool_parts
from varlen_kernels.tuning import pick
from varlen_kernels.vector_ops import NORM_FLOOR

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
    _check_sequences(cu_seqlens, torch.bool, normalize=normalize)
    _check_sequences(cu_seqlens, torch.int32, unpooled_lengths=unpooled_lengths)
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
    form = mode, unpooled_lengths is not None, normalize is not None
    if mode not in {"cls", "last"} and len(x) >= _LONG * batch:
        pool_parts(x, tables, form, out)
        return out
    mode, has_unpooled, normalized = form
    launch = pick(op, (hidden, x.dtype, mode, normalized), candidate_launches)
    tiles = triton.cdiv(hidden, launch["BLOCK"])
    _pool_kernel[(batch * tiles,)](
        x,
        *tables,
        out,
        NORM_FLOOR,
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        MODE=mode,
        HAS_UNPOOLED=has_unpooled,
        NORMALIZE=normalized,
        **launch,
        **dependent_launch(),
    )
    return out


def _check(x: Tensor, cu_seqlens: Tensor) -> None:
    check_dtype(x=x)
    check_row_layout(x=x)
    check_width(x.shape[1])
    check_cu_seqlens(cu_seqlens)


def _check_sequences(cu_seqlens: Tensor, dtype: torch.dtype, **tables: Tensor | None) -> None:
    """Raise ValueError unless each table has one number of this type per sequence."""
    shape = (len(cu_seqlens) - 1,)
    for name, table in tables.items():
        if table is None:
            continue
        if table.shape != shape or table.dtype != dtype or not table.is_contiguous():
            raise ValueError(
                f"{name} is {list(table.shape)} {table.dtype}, strides {table.stride()};"
                f" it must be {list(shape)} {dtype}, contiguous"
            )
