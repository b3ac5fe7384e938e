"""Activations in one pass, with a bias, as a gate, or in a matrix product.

One program owns ROWS tokens by BLOCK features of the output, and loads the bias of these features once. One tensor
holds a gate and what it multiplies. cuBLASLt computes ReLU and the tanh form of GELU on results that are still in
registers, which saves reading and writing them once more. Its GELU has no exact (erf) form.
Source: Hendrycks, Gimpel 2016, arXiv:1606.08415; Shazeer 2020, arXiv:2002.05202 (gates).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels import IN_EPILOGUE, Activation
from varlen_kernels.reference import linear
from varlen_kernels.triton.checks import (
    check_dtype,
    check_out,
    check_row_layout,
    check_rows,
    check_vector,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.rows import tile_launches
from varlen_kernels.tuning import pick

_LOG2_E = tl.constexpr(1.4426950408889634)
# gelu_tanh(x) is x / (1 + 2 ** (x * (_TANH_1 + _TANH_3 * x * x)))
_TANH_1 = tl.constexpr(-2 * 0.7978845608028654 * 1.4426950408889634)
_TANH_3 = tl.constexpr(-2 * 0.7978845608028654 * 1.4426950408889634 * 0.044715)
# Coefficients of a ** 1, a ** 2, ... in a polynomial for log2(erfc(a / sqrt(2))): the minimax fit over [0, 8],
# weighted by the effect of an error on GELU.
_LOG2_ERFC = tl.constexpr(
    (
        -1.1511071920394897,
        -0.4591888189315796,
        -0.05255434662103653,
        0.007137167267501354,
        -0.00017637618293520063,
        -0.0001832152483984828,
        4.464063749765046e-05,
        -4.765907760884147e-06,
        2.035560981994422e-07,
    )
)
_DEGREE = tl.constexpr(9)
_MAX_ERFC_INPUT = tl.constexpr(8.0)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), by exp2, which is a GPU instruction."""
    return 1.0 / (1.0 + tl.exp2(x * -_LOG2_E))


@triton.jit
def _gelu(x):
    """Return exact GELU: max(x, 0) - 0.5 a erfc(a / sqrt(2)) with a = |x|.

    The library's erf takes twice the instructions, which would make 16-bit tensors compute-bound. The exponential of a
    polynomial has half its error, and nothing cancels for x far below 0.
    """
    a = tl.minimum(tl.abs(x), _MAX_ERFC_INPUT)
    power = a * _LOG2_ERFC[_DEGREE - 1]
    for i in tl.static_range(2, _DEGREE + 1):
        power = a * (power + _LOG2_ERFC[_DEGREE - i])
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return positive - 0.5 * a * tl.exp2(power)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Return the activation of fp32 `x`."""
    if KIND == "gelu":
        return _gelu(x)
    if KIND == "gelu_tanh":
        return x / (1.0 + tl.exp2(x * (x * x * _TANH_3 + _TANH_1)))
    if KIND == "silu":
        return x * sigmoid(x)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["tokens"])
def _activate_kernel(
    x_ptr,  # [tokens, FEATURES], or [tokens, 2 * FEATURES] if IS_GATED
    bias_ptr,  # [FEATURES], read if HAS_BIAS
    out_ptr,  # [tokens, FEATURES]
    tokens,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    TILES: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    # int64: tokens * FEATURES may pass 2**31
    token = (tl.program_id(0) // TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens) & (col < FEATURES)

    x = tl.load(x_ptr + token * X_STRIDE + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + col, mask=col < FEATURES, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + token * OUT_STRIDE + col
    result = activated(x, KIND)
    if IS_GATED:
        up_ptr = x_ptr + FEATURES
        up = tl.load(up_ptr + token * X_STRIDE + col, mask=inside, other=0.0)
        result *= up.to(tl.float32)
    tl.store(out_ptrs, result, mask=inside)


def activate(
    x: Tensor, bias: Tensor | None = None, *, kind: Activation, out: Tensor | None = None
) -> Tensor:
    """Return the activation of x + bias, see `reference.activate`.

    Raises:
        ValueError: shapes or dtypes disagree, or rows are not contiguous.
    """
    out = torch.empty_like(x) if out is None else out
    check_rows(x, out=out)
    check_vector(x.shape[1], bias=bias)
    return _launch("activate", x, bias, kind, out)


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
    shape = tokens, width // 2
    out = x.new_empty(shape) if out is None else out
    check_out(out, shape, x.dtype)
    return _launch("activate_gate", x, None, kind, out)


def _launch(op: str, x: Tensor, bias: Tensor | None, kind: Activation, out: Tensor) -> Tensor:
    tokens, features = out.shape
    if out.numel() == 0:
        return out
    launch = pick(op, (features, x.dtype), tile_launches)
    tiles = triton.cdiv(tokens, launch["ROWS"]) * triton.cdiv(features, launch["BLOCK"])
    _activate_kernel[(tiles,)](
        x,
        x if bias is None else bias,
        out,
        tokens,
        X_STRIDE=x.stride(0),
        OUT_STRIDE=out.stride(0),
        FEATURES=features,
        HAS_BIAS=bias is not None,
        IS_GATED=x.shape[1] != features,
        KIND=kind,
        **launch,
        **dependent_launch(),
    )
    return out


def linear_activate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: Activation,
    out: Tensor | None = None,
) -> Tensor:
    """Return the activation of x @ weight + bias, see `reference.linear_activate`.

    Raises:
        ValueError: shapes or dtypes disagree, or rows are not contiguous.
    """
    # on a CPU, torch's product computes the exact GELU
    if not x.is_cuda or bias is None or kind not in IN_EPILOGUE:
        product = linear(x, weight, bias, out=out)
        return activate(product, kind=kind, out=product)
    if out is None:
        out = x.new_empty(len(x), weight.shape[1])
    torch.ops.aten._addmm_activation.out(bias, x, weight, use_gelu=kind == "gelu_tanh", out=out)
    return out
