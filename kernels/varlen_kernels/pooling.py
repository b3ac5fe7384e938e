"""One vector for each packed sequence: its first or last token, or the mean or maximum of all, normalised if asked.

One program owns BLOCK features of one sequence, all of them where a norm is needed, and reads ROWS tokens at a time.
The first or last token is the mean of a sequence cut down to it, so all but the maximum are one sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels import Pooling
from varlen_kernels.checks import (
    check_cu_seqlens,
    check_dtype,
    check_out,
    check_row_layout,
    check_width,
)
from varlen_kernels.reference import NORM_FLOOR
from varlen_kernels.tuning import Launch, pick

_LANES = 32
_LOAD_BYTES = 16
_MAX_WARPS = 16
# Widest part of a row that one program reads where no norm ties the parts together.
_WIDEST_PART = 256
# Held by a lane; more of them would spill.
_MOST_VALUES = 32


@triton.jit
def sum_tokens(x_ptr, col, tokens, HIDDEN: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return the sum of the first `tokens` rows, [1, BLOCK] fp32."""
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, col.shape[1]], tl.float32)
    for first in range(0, tokens, ROWS):
        # int64: a sequence's tokens * STRIDE may pass 2**31
        rows_ptr = x_ptr + tl.cast(first, tl.int64) * STRIDE
        there = (row < tokens - first) & (col < HIDDEN)
        total += tl.load(rows_ptr + row * STRIDE + col, mask=there, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0, keep_dims=True)


@triton.jit
def max_tokens(x_ptr, col, tokens, HIDDEN: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return the maximum of the first `tokens` rows, [1, BLOCK] fp32: NaN where one is NaN."""
    row = tl.arange(0, ROWS)[:, None]
    top = tl.full([ROWS, col.shape[1]], float("-inf"), tl.float32)
    for first in range(0, tokens, ROWS):
        rows_ptr = x_ptr + tl.cast(first, tl.int64) * STRIDE
        there = (row < tokens - first) & (col < HIDDEN)
        x = tl.load(rows_ptr + row * STRIDE + col, mask=there, other=float("-inf")).to(tl.float32)
        top = tl.where((x > top) | (x != x), x, top)  # noqa: PLR0124  # NaN
    # tl.max passes over NaN
    has_nan = tl.max((top != top).to(tl.int32), axis=0, keep_dims=True) > 0  # noqa: PLR0124
    return tl.where(has_nan, float("nan"), tl.max(top, axis=0, keep_dims=True))


@triton.jit
def _pool_kernel(
    x_ptr,  # [tokens, HIDDEN]
    cu_seqlens_ptr,  # [batch + 1]
    normalize_ptr,  # [batch], read if NORMALIZE
    out_ptr,  # [batch, HIDDEN]
    norm_floor,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    MODE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HIDDEN if NORMALIZE
):
    """Pool one of the parts that the features of a sequence are cut into."""
    PARTS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // PARTS
    col = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)[None, :]
    begin = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    is_empty = begin == end
    if MODE == "cls":
        end = tl.minimum(end, begin + 1)
    if MODE == "last":
        begin = tl.maximum(begin, end - 1)
    # int64: tokens * X_STRIDE may pass 2**31
    tokens_ptr = x_ptr + begin.to(tl.int64) * X_STRIDE

    if MODE == "max":
        pooled = max_tokens(tokens_ptr, col, end - begin, HIDDEN, X_STRIDE, ROWS)
        pooled = tl.where(is_empty, 0.0, pooled)
    else:
        pooled = sum_tokens(tokens_ptr, col, end - begin, HIDDEN, X_STRIDE, ROWS)
        if MODE == "mean":
            pooled = pooled / tl.maximum(end - begin, 1).to(tl.float32)
    if NORMALIZE:
        squares = tl.where(col < HIDDEN, pooled * pooled, 0.0)
        norm = tl.sqrt(tl.sum(squares, axis=1, keep_dims=True))
        # a norm of NaN is not below the floor, and stays
        norm = tl.where(norm < norm_floor, norm_floor, norm)
        wanted = tl.load(normalize_ptr + sequence) != 0
        pooled = tl.where(wanted, pooled / norm, pooled)
    tl.store(out_ptr + sequence.to(tl.int64) * OUT_STRIDE + col, pooled, mask=col < HIDDEN)


def pool(
    x: Tensor,
    cu_seqlens: Tensor,
    normalize: Tensor | None = None,
    *,
    mode: Pooling,
    out: Tensor | None = None,
) -> Tensor:
    """Return one fp32 vector per sequence, `[batch, hidden]`, as `reference.pool` does.

    Raises:
        ValueError: shapes, dtypes or layout are not as they must be, or hidden is over MAX_ROW.
    """
    _check(x, cu_seqlens, normalize)
    shape = (len(cu_seqlens) - 1, x.shape[1])
    if out is None:
        out = x.new_empty(shape, dtype=torch.float32)
    check_out(out, shape, torch.float32)
    return _launch("pool", x, cu_seqlens, normalize, mode, out)


def first_tokens(x: Tensor, cu_seqlens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the first token of each sequence, `[batch, hidden]`, as `reference.first_tokens` does.

    Raises:
        ValueError: shapes, dtypes or layout are not as they must be, or hidden is over MAX_ROW.
    """
    _check(x, cu_seqlens, None)
    shape = (len(cu_seqlens) - 1, x.shape[1])
    if out is None:
        out = x.new_empty(shape)
    check_out(out, shape, x.dtype)
    return _launch("first_tokens", x, cu_seqlens, None, "cls", out)


def candidates(hidden: int, dtype: torch.dtype, mode: Pooling, normalized: bool) -> list[Launch]:
    """Return launches for rows of this width, the first for a GPU on which none was measured."""
    padded = triton.next_power_of_2(hidden)
    block = padded if normalized else min(padded, _WIDEST_PART)
    in_one_go = _LANES * _LOAD_BYTES // dtype.itemsize
    if mode in {"cls", "last"}:
        warps = min(max(block // in_one_go, 1), _MAX_WARPS)
        return [{"ROWS": 1, "BLOCK": block, "num_warps": warps}]
    launches: list[Launch] = []
    # warps, loads of a lane under way: one program reads a long sequence alone, so it asks for much at once
    for warps, loads in ((8, 4), (16, 4), (4, 4), (8, 2), (16, 2)):
        rows = max(1, warps * loads * in_one_go // block)
        launch = {"ROWS": rows, "BLOCK": block, "num_warps": warps}
        if rows * block <= warps * _LANES * _MOST_VALUES and launch not in launches:
            launches.append(launch)
    return launches


def _launch(
    op: str, x: Tensor, cu_seqlens: Tensor, normalize: Tensor | None, mode: Pooling, out: Tensor
) -> Tensor:
    batch, hidden = out.shape
    if batch == 0:
        return out
    launch = pick(op, (hidden, x.dtype, mode, normalize is not None), candidates)
    parts = triton.cdiv(hidden, launch["BLOCK"])
    _pool_kernel[(batch * parts,)](
        x,
        cu_seqlens,
        cu_seqlens if normalize is None else normalize,
        out,
        NORM_FLOOR,
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        MODE=mode,
        NORMALIZE=normalize is not None,
        **launch,
    )
    return out


def _check(x: Tensor, cu_seqlens: Tensor, normalize: Tensor | None) -> None:
    check_dtype(x=x)
    check_row_layout(x=x)
    check_width(x.shape[1])
    check_cu_seqlens(cu_seqlens)
    if normalize is None:
        return
    wanted = (len(cu_seqlens) - 1,)
    if normalize.shape != wanted or normalize.dtype != torch.bool or not normalize.is_contiguous():
        raise ValueError(
            f"normalize is {list(normalize.shape)} {normalize.dtype}, strides {normalize.stride()};"
            f" it must be {list(wanted)} torch.bool, contiguous"
        )
