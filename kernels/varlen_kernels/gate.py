"""The gate of a gated feed-forward layer: silu(gate) * up, from the one product that made both.

One program owns ROWS tokens by BLOCK features of the result.
Source: Shazeer 2020, arXiv:2002.05202.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.activation import sigmoid
from varlen_kernels.checks import check_dtype, check_out, check_row_layout
from varlen_kernels.rows import tile_launches, vector_width
from varlen_kernels.tuning import Launch, pick


@triton.jit(do_not_specialize=["tokens"])
def _silu_gate_kernel(
    x_ptr,  # [tokens, 2 * FEATURES]
    out_ptr,  # [tokens, FEATURES]
    tokens,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gate one of the tiles that ROWS tokens are cut into."""
    TILES: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    # int64: tokens * FEATURES may pass 2**31
    token = (tl.program_id(0) // TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens) & (col < FEATURES)

    gate_ptr = x_ptr + token * X_STRIDE + col
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + FEATURES, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * OUT_STRIDE + col, gate * sigmoid(gate) * up, mask=inside)


def silu_gate(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, as `reference.silu_gate` does.

    Raises:
        ValueError: `x` has an odd number of features, or shapes, dtypes or layout are not as they must be.
    """
    check_dtype(x=x)
    check_row_layout(x=x)
    tokens, width = x.shape
    if width % 2:
        raise ValueError(f"x has {width} features; a gate and its up are an even number")
    features = width // 2
    out = x.new_empty(tokens, features) if out is None else out
    check_out(out, (tokens, features), x.dtype)
    if out.numel() == 0:
        return out
    launch = pick("silu_gate", (features, x.dtype), candidates)
    tiles = triton.cdiv(tokens, launch["ROWS"]) * triton.cdiv(features, launch["BLOCK"])
    _silu_gate_kernel[(tiles,)](
        x,
        out,
        tokens,
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        FEATURES=features,
        **launch,
    )
    return out


def candidates(features: int, dtype: torch.dtype) -> list[Launch]:
    """Return launches for rows of this width, the first for a GPU on which none was measured."""
    return tile_launches(features, vector_width(dtype, features))
