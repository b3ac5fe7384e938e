"""Layer norm and RMS norm, with the residual before it, in one pass.

One program owns ROWS tokens. Each token is in the registers of one warp if it is short enough, see rows.py. Mean and
variance are two sums over registers, so no element is read twice and nothing cancels in the variance. An RMS norm has
no mean and no bias.
Source: Ba, Kiros, Hinton 2016, arXiv:1607.06450; Zhang, Sennrich 2019, arXiv:1910.07467.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.checks import (
    check_dtype,
    check_out,
    check_rows,
    check_vector,
    check_width,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.rows import (
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
    bias_ptr,  # [HIDDEN], read if HAS_BIAS
    eps,
    HIDDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CENTERED: tl.constexpr = True,
):
    """Return the layer norm of rows in registers, or without centering the RMS norm."""
    centered = x
    if IS_CENTERED:
        mean = sum_row(x) / HIDDEN
        centered = tl.tuple(())
        for i in tl.static_range(len(x)):
            # columns past HIDDEN hold -mean after centering, and must be 0 for the variance
            inside = i * BLOCK + tl.arange(0, BLOCK)[None, :] < HIDDEN
            centered += (tl.where(inside, x[i] - mean, 0.0),)
    scale = tl.rsqrt(sum_of_squares(centered) / HIDDEN + eps)

    weight = load_row(weight_ptr, True, HIDDEN, ROWS, BLOCK, len(x))
    normed = tl.tuple(())
    for i in tl.static_range(len(x)):
        normed += (centered[i] * scale * weight[i],)
    if HAS_BIAS:
        normed = add_rows(normed, load_row(bias_ptr, True, HIDDEN, ROWS, BLOCK, len(x)))
    return normed


@triton.jit(do_not_specialize=["tokens"])
def _norm_kernel(
    x_ptr,  # [tokens, HIDDEN]
    residual_ptr,  # [tokens, HIDDEN], read if HAS_RESIDUAL
    weight_ptr,  # [HIDDEN]
    bias_ptr,  # [HIDDEN], read if HAS_BIAS
    sum_ptr,  # [tokens, HIDDEN], written if HAS_SUM; may be residual_ptr
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    SUM_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SUM: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # TILES * BLOCK >= HIDDEN
    DEPENDENT: tl.constexpr,
):
    """Normalise ROWS tokens, from token `program_id(0) * ROWS` on."""
    wait_for_kernels(DEPENDENT)
    # int64: tokens * HIDDEN may pass 2**31
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = token < tokens

    x = load_row(x_ptr + token * X_STRIDE, row_mask, HIDDEN, ROWS, BLOCK, TILES)
    if HAS_RESIDUAL:
        row_ptr = residual_ptr + token * RESIDUAL_STRIDE
        x = add_rows(x, load_row(row_ptr, row_mask, HIDDEN, ROWS, BLOCK, TILES))
    if HAS_SUM:
        store_row(sum_ptr + token * SUM_STRIDE, x, row_mask, HIDDEN, BLOCK)
    normed = normalize_row(x, weight_ptr, bias_ptr, eps, HIDDEN, HAS_BIAS, ROWS, BLOCK, IS_CENTERED)
    store_row(out_ptr + token * OUT_STRIDE, normed, row_mask, HIDDEN, BLOCK)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_norm(x + residual) * weight + bias, see `reference.add_layer_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    out = torch.empty_like(x, dtype=weight.dtype) if out is None else out
    _launch("add_layer_norm", x, weight, bias, eps, out, residual=residual)
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Return the layer norm of each token, see `reference.layer_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    out = torch.empty_like(x, dtype=weight.dtype) if out is None else out
    _launch("layer_norm", x, weight, bias, eps, out)
    return out


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual and its layer norm, see `reference.residual_layer_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    total, normed = out or (torch.empty_like(x), torch.empty_like(x, dtype=weight.dtype))
    _launch("residual_layer_norm", x, weight, bias, eps, normed, residual=residual, sum_out=total)
    return total, normed


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return the RMS norm of x, times weight, see `reference.rms_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    out = torch.empty_like(x, dtype=weight.dtype) if out is None else out
    _launch("rms_norm", x, weight, None, eps, out, is_centered=False)
    return out


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + residual and its RMS norm, see `reference.residual_rms_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    total, normed = out or (torch.empty_like(x), torch.empty_like(x, dtype=weight.dtype))
    _launch(
        "residual_rms_norm",
        x,
        weight,
        None,
        eps,
        normed,
        residual=residual,
        sum_out=total,
        is_centered=False,
    )
    return total, normed


def _launch(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    sum_out: Tensor | None = None,
    is_centered: bool = True,
) -> None:
    check_rows(x, residual=residual, sum_out=sum_out)
    check_dtype(weight=weight)
    check_out(out, x.shape, weight.dtype)
    tokens, hidden = x.shape
    check_width(hidden)
    check_vector(hidden, weight=weight, bias=bias)
    if tokens == 0:
        return
    launch = pick(op, (hidden, x.dtype), candidate_launches)
    _norm_kernel[(triton.cdiv(tokens, launch["ROWS"]),)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out if sum_out is None else sum_out,
        out,
        tokens,
        eps,
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=0 if residual is None else residual.stride(0),
        SUM_STRIDE=0 if sum_out is None else sum_out.stride(0),
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        HAS_SUM=sum_out is not None,
        IS_CENTERED=is_centered,
        TILES=triton.cdiv(hidden, launch["BLOCK"]),
        **launch,
        **dependent_launch(),
    )


def candidate_launches(hidden: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for rows of this width; the first is the default."""
    return row_launches(hidden, vector_width(dtype, hidden))
