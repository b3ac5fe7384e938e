"""Bias, residual and layer norm in one pass: the tail of every post-norm sublayer.

One program owns ROWS tokens. Each token is in the registers of one warp if it is short enough, see rows.py. Mean and
variance are two sums over registers, so no element is read twice and nothing cancels in the variance.
Source: Ba, Kiros, Hinton 2016, arXiv:1607.06450.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.checks import check_rows, check_vector, check_width
from varlen_kernels.rows import (
    add_rows,
    load_row,
    row_launches,
    store_row,
    sum_of_squares,
    sum_row,
    vector_width,
)
from varlen_kernels.tuning import Launch, pick


@triton.jit
def normalize_row(
    x,  # TILES of [ROWS, BLOCK], from `load_row`
    weight_ptr,  # [HIDDEN]
    bias_ptr,  # [HIDDEN]
    eps,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the layer norm of rows in registers, as tiles."""
    mean = sum_row(x) / HIDDEN
    centered = tl.tuple(())
    for i in tl.static_range(len(x)):
        # columns past HIDDEN hold -mean after centering, and must be 0 for the variance
        inside = i * BLOCK + tl.arange(0, BLOCK)[None, :] < HIDDEN
        centered += (tl.where(inside, x[i] - mean, 0.0),)
    scale = tl.rsqrt(sum_of_squares(centered) / HIDDEN + eps)

    weight = load_row(weight_ptr, True, HIDDEN, ROWS, BLOCK, len(x))
    bias = load_row(bias_ptr, True, HIDDEN, ROWS, BLOCK, len(x))
    normed = tl.tuple(())
    for i in tl.static_range(len(x)):
        normed += (centered[i] * scale * weight[i] + bias[i],)
    return normed


@triton.jit(do_not_specialize=["tokens"])
def _add_layer_norm_kernel(
    x_ptr,  # [tokens, HIDDEN]
    residual_ptr,  # [tokens, HIDDEN]
    weight_ptr,  # [HIDDEN]
    bias_ptr,  # [HIDDEN]
    x_bias_ptr,  # [HIDDEN], read if HAS_X_BIAS
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # TILES * BLOCK >= HIDDEN
):
    """Normalise ROWS tokens, from token `program_id(0) * ROWS` on."""
    # int64: tokens * HIDDEN may pass 2**31
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = token < tokens

    x = load_row(x_ptr + token * X_STRIDE, row_mask, HIDDEN, ROWS, BLOCK, TILES)
    residual = load_row(
        residual_ptr + token * RESIDUAL_STRIDE, row_mask, HIDDEN, ROWS, BLOCK, TILES
    )
    x = add_rows(x, residual)
    if HAS_X_BIAS:
        x = add_rows(x, load_row(x_bias_ptr, True, HIDDEN, ROWS, BLOCK, TILES))
    normed = normalize_row(x, weight_ptr, bias_ptr, eps, HIDDEN, ROWS, BLOCK)
    store_row(out_ptr + token * OUT_STRIDE, normed, row_mask, HIDDEN, BLOCK)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    x_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(x + x_bias + residual) * weight + bias, see `reference.add_layer_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    out = torch.empty_like(x) if out is None else out
    check_rows(x, residual=residual, out=out)
    tokens, hidden = x.shape
    check_width(hidden)
    check_vector(hidden, weight=weight, bias=bias, x_bias=x_bias)
    if tokens == 0:
        return out
    launch = pick("add_layer_norm", (hidden, x.dtype), candidate_launches)
    _add_layer_norm_kernel[(triton.cdiv(tokens, launch["ROWS"]),)](
        x,
        residual,
        weight,
        bias,
        weight if x_bias is None else x_bias,
        out,
        tokens,
        eps,
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=residual.stride(0),
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        HAS_X_BIAS=x_bias is not None,
        TILES=triton.cdiv(hidden, launch["BLOCK"]),
        **launch,
    )
    return out


def candidate_launches(hidden: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for rows of this width; the first is the default."""
    return row_launches(hidden, vector_width(dtype, hidden))
