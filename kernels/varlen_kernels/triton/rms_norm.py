"""RMS norm, with the residual add before it, in one pass.

One program owns ROWS tokens. Each token is in the registers of one warp if
it is short enough, see rows.py.
Source: Zhang, Sennrich 2019, arXiv:1910.07467.
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
    vector_width,
)
from varlen_kernels.tuning import Launch, pick


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm_kernel(
    x_ptr,  # [tokens, HIDDEN]
    residual_ptr,  # [tokens, HIDDEN], read if HAS_RESIDUAL
    weight_ptr,  # [HIDDEN]
    sum_ptr,  # [tokens, HIDDEN], written if HAS_RESIDUAL; may be residual_ptr
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    SUM_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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
        store_row(sum_ptr + token * SUM_STRIDE, x, row_mask, HIDDEN, BLOCK)
    scale = tl.rsqrt(sum_of_squares(x) / HIDDEN + eps)

    weight = load_row(weight_ptr, True, HIDDEN, ROWS, BLOCK, TILES)
    normed = tl.tuple(())
    for i in tl.static_range(TILES):
        normed += (x[i] * scale * weight[i],)
    store_row(out_ptr + token * OUT_STRIDE, normed, row_mask, HIDDEN, BLOCK)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return the RMS norm of x, times weight, see `reference.rms_norm`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or hidden is over MAX_ROW.
    """
    out = torch.empty_like(x, dtype=weight.dtype) if out is None else out
    _launch("rms_norm", x, None, weight, eps, None, out)
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
    _launch("residual_rms_norm", x, residual, weight, eps, total, normed)
    return total, normed


def _launch(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    sum_out: Tensor | None,
    out: Tensor,
) -> None:
    """Check the arguments of `op` and launch the kernel."""
    check_rows(x, residual=residual, sum_out=sum_out)
    check_dtype(weight=weight)
    check_out(out, x.shape, weight.dtype)
    tokens, hidden = x.shape
    check_width(hidden)
    check_vector(hidden, weight=weight)
    if tokens == 0:
        return
    launch = pick(op, (hidden, x.dtype), candidate_launches)
    _rms_norm_kernel[(triton.cdiv(tokens, launch["ROWS"]),)](
        x,
        x if residual is None else residual,
        weight,
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
        TILES=triton.cdiv(hidden, launch["BLOCK"]),
        **launch,
        **dependent_launch(),
    )


def candidate_launches(hidden: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for rows of this width; the first is the default."""
    return row_launches(hidden, vector_width(dtype, hidden))
