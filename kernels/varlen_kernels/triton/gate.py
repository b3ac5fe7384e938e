"""The gate of a gated feed-forward layer: the activation of gate, times up.

One tensor holds gate and up. One program owns ROWS tokens by BLOCK features of the output.
Source: Shazeer 2020, arXiv:2002.05202.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels import Activation
from varlen_kernels.triton.activation import activated
from varlen_kernels.triton.checks import check_dtype, check_out, check_row_layout
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.rows import tile_launches, vector_width
from varlen_kernels.tuning import Launch, pick


@triton.jit(do_not_specialize=["tokens"])
def _activate_gate_kernel(
    x_ptr,  # [tokens, 2 * FEATURES]
    out_ptr,  # [tokens, FEATURES]
    tokens,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Gate one tile of ROWS tokens by BLOCK features."""
    wait_for_kernels(DEPENDENT)
    TILES: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    # int64: tokens * FEATURES may pass 2**31
    token = (tl.program_id(0) // TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens) & (col < FEATURES)

    gate_ptr = x_ptr + token * X_STRIDE + col
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + FEATURES, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * OUT_STRIDE + col, activated(gate, KIND) * up, mask=inside)


def activate_gate(x: Tensor, *, kind: Activation, out: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up, see `reference.activate_gate`.

    Raises:
        ValueError: `x` has an odd number of features, or a shape, dtype or layout is not supported.
    """
    check_dtype(x=x)
    check_row_layout(x=x)
    tokens, width = x.shape
    if width % 2:
        raise ValueError(f"x has {width} features; it must be an even number")
    features = width // 2
    out = x.new_empty(tokens, features) if out is None else out
    check_out(out, (tokens, features), x.dtype)
    if out.numel() == 0:
        return out
    launch = pick("activate_gate", (features, x.dtype), candidate_launches)
    tiles = triton.cdiv(tokens, launch["ROWS"]) * triton.cdiv(features, launch["BLOCK"])
    _activate_gate_kernel[(tiles,)](
        x,
        out,
        tokens,
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        FEATURES=features,
        KIND=kind,
        **launch,
        **dependent_launch(),
    )
    return out


def candidate_launches(features: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for rows of this width; the first is the default."""
    return tile_launches(features, vector_width(dtype, features))
