"""Copies between packed and padded tokens, as padding systems run them around attention.

One program owns ROWS positions of one padded sequence and BLOCK features of each. It computes the packed rows from
the start of the sequence in `cu_seqlens`, so no index tensor is needed.
"""

# ruff: noqa: N803, N806  # constants of a kernel are in capitals
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.checks import (
    check_cu_seqlens,
    check_dtype,
    check_out,
    check_row_layout,
    row_strides,
)
from varlen_kernels.triton.rows import tile_launches, vector_width
from varlen_kernels.tuning import Launch, pick


@triton.jit
def _locate_rows(
    cu_seqlens_ptr,  # [batch + 1]
    max_seqlen,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the rows and features of this program, and the masks of its rows.

    Returns:
        packed_row, padded_row: [ROWS, 1] int64, rows of the packed and of the padded tensor.
        col: [1, BLOCK], features.
        is_position, is_token: [ROWS, 1], rows inside the padded sequence, and rows that hold a token.
    """
    COLUMN_TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    row_tile = tl.program_id(0) // COLUMN_TILES
    col = tl.program_id(0) % COLUMN_TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    row_tiles = tl.cdiv(max_seqlen, ROWS)
    sequence = row_tile // row_tiles
    position = row_tile % row_tiles * ROWS + tl.arange(0, ROWS)[:, None]
    begin = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    is_position = position < max_seqlen
    is_token = is_position & (position < end - begin)
    # int64: rows * stride may pass 2**31
    packed_row = begin.to(tl.int64) + position
    padded_row = sequence.to(tl.int64) * max_seqlen + position
    return packed_row, padded_row, col, is_position, is_token


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
    """Write one tile of a padded sequence: its tokens, then zeros."""
    packed_row, padded_row, col, is_position, is_token = _locate_rows(
        cu_seqlens_ptr, max_seqlen, HIDDEN, ROWS, BLOCK
    )
    inside = col < HIDDEN
    x = tl.load(x_ptr + packed_row * X_STRIDE + col, mask=is_token & inside, other=0.0)
    tl.store(out_ptr + padded_row * OUT_STRIDE + col, x, mask=is_position & inside)


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
    """Copy the tokens of one tile of a padded sequence to their packed rows."""
    packed_row, padded_row, col, _is_position, is_token = _locate_rows(
        cu_seqlens_ptr, max_seqlen, HIDDEN, ROWS, BLOCK
    )
    # `tokens` bounds the writes even if `cu_seqlens` ends later
    mask = is_token & (packed_row < tokens) & (col < HIDDEN)
    x = tl.load(x_ptr + padded_row * X_STRIDE + col, mask=mask, other=0.0)
    tl.store(out_ptr + packed_row * OUT_STRIDE + col, x, mask=mask)


def unpack(x: Tensor, cu_seqlens: Tensor, *, max_seqlen: int, out: Tensor | None = None) -> Tensor:
    """Return packed tokens as padded sequences, see `reference.unpack`.

    Raises:
        ValueError: a shape, dtype or layout is wrong.
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
    """Return padded sequences as packed tokens, see `reference.pack`.

    Raises:
        ValueError: a shape, dtype or layout is wrong.
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


def candidate_launches(hidden: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for rows of this width; the first is the default."""
    return tile_launches(hidden, vector_width(dtype, hidden))


def _launch(
    op: str, padded_shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Launch, tuple[int]]:
    """Return the launch, including HIDDEN, and the grid for a padded shape."""
    batch, max_seqlen, hidden = padded_shape
    launch = pick(op, (hidden, dtype), candidate_launches)
    tiles: int = triton.cdiv(max_seqlen, launch["ROWS"]) * triton.cdiv(hidden, launch["BLOCK"])
    return {**launch, "HIDDEN": hidden}, (batch * tiles,)
