"""Copies between packed and padded tokens, which systems that pad make around attention.

One program owns ROWS places of one padded sequence by BLOCK features. It finds the tokens that belong there from the
sequence's start, so no list of indices is made.
"""

# ruff: noqa: N803, N806  # constants of a kernel are in capitals
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.checks import (
    check_cu_seqlens,
    check_dtype,
    check_out,
    check_row_layout,
    row_strides,
)
from varlen_kernels.rows import tile_launches, vector_width
from varlen_kernels.tuning import Launch, pick


@triton.jit
def find_rows(
    cu_seqlens_ptr,  # [batch + 1]
    max_seqlen,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return what a program owns: rows of both forms, features, and which rows are places and which hold tokens.

    Returns:
        packed, padded: [ROWS, 1] int64, row numbers.
        col: [1, BLOCK].
        is_place, is_token: [ROWS, 1].
    """
    PARTS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    tile = tl.program_id(0) // PARTS
    col = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)[None, :]
    tiles = tl.cdiv(max_seqlen, ROWS)
    sequence = tile // tiles
    place = tile % tiles * ROWS + tl.arange(0, ROWS)[:, None]
    begin = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    is_place = place < max_seqlen
    packed = begin.to(tl.int64) + place
    padded = sequence.to(tl.int64) * max_seqlen + place
    return packed, padded, col, is_place, is_place & (place < end - begin)


@triton.jit(do_not_specialize=["max_seqlen"])
def _unpack_kernel(
    x_ptr,  # [tokens, HIDDEN]
    cu_seqlens_ptr,  # [batch + 1]
    out_ptr,  # [batch, max_seqlen, HIDDEN]
    max_seqlen,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill one of the tiles that a padded sequence is cut into, with tokens and then zeros."""
    packed, padded, col, is_place, is_token = find_rows(
        cu_seqlens_ptr, max_seqlen, HIDDEN, ROWS, BLOCK
    )
    inside = col < HIDDEN
    x = tl.load(x_ptr + packed * X_STRIDE + col, mask=is_token & inside, other=0.0)
    tl.store(out_ptr + padded * OUT_STRIDE + col, x, mask=is_place & inside)


@triton.jit(do_not_specialize=["tokens", "max_seqlen"])
def _pack_kernel(
    x_ptr,  # [batch, max_seqlen, HIDDEN]
    cu_seqlens_ptr,  # [batch + 1]
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    max_seqlen,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the tokens out of one of the tiles that a padded sequence is cut into."""
    packed, padded, col, _is_place, is_token = find_rows(
        cu_seqlens_ptr, max_seqlen, HIDDEN, ROWS, BLOCK
    )
    moved = is_token & (packed < tokens) & (col < HIDDEN)
    x = tl.load(x_ptr + padded * X_STRIDE + col, mask=moved, other=0.0)
    tl.store(out_ptr + packed * OUT_STRIDE + col, x, mask=moved)


def unpack(x: Tensor, cu_seqlens: Tensor, *, max_seqlen: int, out: Tensor | None = None) -> Tensor:
    """Return the padded form of packed tokens, as `reference.unpack` does.

    Raises:
        ValueError: shapes, dtypes or layout are not as they must be.
    """
    check_dtype(x=x)
    check_row_layout(x=x)
    check_cu_seqlens(cu_seqlens)
    shape = (len(cu_seqlens) - 1, max_seqlen, x.shape[1])
    out = x.new_empty(shape) if out is None else out
    check_out(out, shape, x.dtype)
    if out.numel():
        launch, grid = _launch("unpack", shape, x.dtype)
        strides = {"X_STRIDE": x.stride(0), "OUT_STRIDE": row_strides(out=out)[0]}
        _unpack_kernel[grid](x, cu_seqlens, out, max_seqlen, **strides, **launch)
    return out


def pack(x: Tensor, cu_seqlens: Tensor, *, tokens: int, out: Tensor | None = None) -> Tensor:
    """Return the packed form of padded sequences, as `reference.pack` does.

    Raises:
        ValueError: shapes, dtypes or layout are not as they must be.
    """
    check_dtype(x=x)
    check_row_layout(x=x)
    if x.ndim != 3:
        raise ValueError(f"x is {list(x.shape)}; it must be [batch, max_seqlen, hidden]")
    batch, max_seqlen, hidden = x.shape
    check_cu_seqlens(cu_seqlens, batch)
    out = x.new_empty(tokens, hidden) if out is None else out
    check_out(out, (tokens, hidden), x.dtype)
    if out.numel() and x.numel():
        launch, grid = _launch("pack", (batch, max_seqlen, hidden), x.dtype)
        strides = {"X_STRIDE": row_strides(x=x)[0], "OUT_STRIDE": out.stride(0)}
        _pack_kernel[grid](x, cu_seqlens, out, tokens, max_seqlen, **strides, **launch)
    return out


def candidates(hidden: int, dtype: torch.dtype) -> list[Launch]:
    """Return launches for rows of this width, the first for a GPU on which none was measured."""
    return tile_launches(hidden, vector_width(dtype, hidden))


def _launch(op: str, padded: tuple[int, int, int], dtype: torch.dtype) -> tuple[Launch, tuple[int]]:
    """Return the launch, with the width of a row, and the grid for a padded shape."""
    batch, max_seqlen, hidden = padded
    launch = pick(op, (hidden, dtype), candidates)
    tiles: int = triton.cdiv(max_seqlen, launch["ROWS"]) * triton.cdiv(hidden, launch["BLOCK"])
    return {**launch, "HIDDEN": hidden}, (batch * tiles,)
