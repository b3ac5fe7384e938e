"""Activations on a CPU, compiled by numba.

Torch takes two to five times as long for the tanh form of GELU. Other forms are for ops that do more.
Source: the specifications are `reference.activate` and `reference.activate_gate`.
"""

import numba
import numpy as np
from torch import Tensor

from varlen_kernels.cpu.lanes import (
    LANES,
    as_array,
    exp,
    load,
    load_first,
    maximum,
    minimum,
    multiply_add,
    power_of_two,
    select_greater,
    splat,
    store,
    store_first,
)
from varlen_kernels.cpu.stored_code import stored
from varlen_kernels.cpu.threads import run_parts, usable_cores

# 1 + tanh(y) is 2 · sigmoid(2 y), so the result is x · sigmoid(x · (_LINEAR + _CUBIC · x²)).
_LINEAR = np.float32(2 * (2 / np.pi) ** 0.5)
_CUBIC = np.float32(2 * (2 / np.pi) ** 0.5 * 0.044715)
# Coefficients of a ** 1, a ** 2, ... in a polynomial for log2(erfc(a / sqrt(2))); see `activation._LOG2_ERFC`.
_E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9 = (
    np.float32(x)
    for x in (
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
_MAX_ERFC_INPUT = np.float32(8)
# Coefficients of a polynomial for 2 ** x between -0.5 and 0.5: the minimax fit, with a relative error of 7.5e-8.
_P0, _P1, _P2, _P3, _P4, _P5 = (
    np.float32(x)
    for x in (
        1.0000000716545046,
        0.6931469670591993,
        0.24022119724423258,
        0.055507132825847336,
        0.009675541311022249,
        0.0013276469055040472,
    )
)
# Added to a number, it leaves the nearest integer in the last bits.
_SHIFT = np.float32(3 << 22)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
# Numbers below which a second thread costs more than it saves.
_LEAST_SHARED_WORK = 1 << 17


@numba.njit(forceinline=True, _nrt=False)
def _load(array, row, column, count):
    """Return the first numbers of a row's vector; zeros past them."""
    return load(array, row, column) if count >= LANES else load_first(array, row, column, count)


@numba.njit(forceinline=True, _nrt=False)
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    power = exp(splat(_ZERO) - maximum(x, splat(_ZERO) - x))
    return select_greater(x, splat(_ZERO), splat(_ONE), power) / (splat(_ONE) + power)


@numba.njit(forceinline=True, _nrt=False)
def gelu_tanh(x):
    """Return the tanh form of GELU."""
    return x * sigmoid(x * multiply_add(x * x, splat(_CUBIC), splat(_LINEAR)))


@numba.njit(forceinline=True, _nrt=False)
def gelu_erf(x):
    """Return exact GELU: max(x, 0) - 0.5 a erfc(a / sqrt(2)) with a = |x|."""
    a = minimum(maximum(x, splat(_ZERO) - x), splat(_MAX_ERFC_INPUT))
    y = multiply_add(a, splat(_E9), splat(_E8))
    y = multiply_add(a, y, splat(_E7))
    y = multiply_add(a, y, splat(_E6))
    y = multiply_add(a, y, splat(_E5))
    y = multiply_add(a, y, splat(_E4))
    y = multiply_add(a, y, splat(_E3))
    y = multiply_add(a, y, splat(_E2))
    y = a * multiply_add(a, y, splat(_E1))
    # 2 ** y, which is above 2 ** -60
    shifted = y + splat(_SHIFT)
    rest = y - (shifted - splat(_SHIFT))
    power = multiply_add(rest, splat(_P5), splat(_P4))
    power = multiply_add(rest, power, splat(_P3))
    power = multiply_add(rest, power, splat(_P2))
    power = multiply_add(rest, power, splat(_P1))
    power = multiply_add(rest, power, splat(_P0))
    return maximum(splat(_ZERO), x) - splat(_HALF) * a * (power * power_of_two(shifted))


@stored(_nrt=False)
def _activate_rows(
    first,
    last,
    x,  # [rows, features], or with the factors behind them [rows, 2 * features]
    bias,  # [1, features], or [1, 0] for none
    out,  # [rows, features]
):
    features = out.shape[1]
    for row in range(first, last):
        for column in range(0, features, LANES):
            count = features - column
            value = _load(x, row, column, count)
            if bias.shape[1]:
                value = value + _load(bias, 0, column, count)
            value = gelu_tanh(value)
            if x.shape[1] > features:
                value = value * _load(x, row, features + column, count)
            if count >= LANES:
                store(out, row, column, value)
            else:
                store_first(out, row, column, value, count)


def gelu_tanh_rows(x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the activation of x + bias.

    If x is twice as wide as `out`, its second half multiplies the activation of the first.

    Args:
        x, out: fp32 or bf16 matrices, contiguous; `out` may be `x`.
        bias: `[features]`.
    """
    parts = usable_cores() if out.numel() >= _LEAST_SHARED_WORK else 1
    bounds = [len(out) * part // parts for part in range(parts + 1)]
    bias = x.new_empty(0) if bias is None else bias
    run_parts(_activate_rows, bounds, as_array(x), as_array(bias[None]), as_array(out))
