"""Activations and layer norms of rows, for functions that numba compiles."""

import numpy as np

from varlen_kernels.cpu.native.lanes import (
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
    sum_of,
)
from varlen_kernels.cpu.native.native import inlined
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.functions import GELU, GELU_TANH, RELU, SILU

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
# Coefficients of x ** 3, x ** 5, ... of tanh(x), which are exact enough below _SMALL: there 1 - exp(-2 x) loses bits.
_T3, _T5, _T7, _T9 = (np.float32(x) for x in (-1 / 3, 2 / 15, -17 / 315, 62 / 2835))
_SMALL = np.float32(0.25)


@inlined
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    power = exp(splat(_ZERO) - maximum(x, splat(_ZERO) - x))
    return select_greater(x, splat(_ZERO), splat(_ONE), power) / (splat(_ONE) + power)


@inlined
def tanh(x):
    """Return the hyperbolic tangent."""
    size, square = maximum(x, splat(_ZERO) - x), x * x
    power = exp(splat(_ZERO) - size - size)
    large = (splat(_ONE) - power) / (splat(_ONE) + power)
    small = multiply_add(square, splat(_T9), splat(_T7))
    small = multiply_add(square, small, splat(_T5))
    small = multiply_add(square, small, splat(_T3))
    small = multiply_add(square * x, small, x)
    large = select_greater(x, splat(_ZERO), large, splat(_ZERO) - large)
    return select_greater(size, splat(_SMALL), large, small)


@inlined
def gelu_tanh(x):
    """Return the tanh form of GELU."""
    return x * sigmoid(x * multiply_add(x * x, splat(_CUBIC), splat(_LINEAR)))


@inlined
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


@inlined
def load_up_to(array, row, column, count):
    """Return the first numbers of a vector, at most all; zeros past them."""
    return load(array, row, column) if count >= LANES else load_first(array, row, column, count)


@inlined
def store_up_to(array, row, column, value, count):
    """Write the first numbers of a vector, at most all."""
    if count >= LANES:
        store(array, row, column, value)
    else:
        store_first(array, row, column, value, count)


@inlined
def load_within(array, row, column):
    """Return a vector of a row; zeros past its end."""
    return load_up_to(array, row, column, array.shape[1] - column)


@inlined
def store_within(array, row, column, value):
    """Write a vector of a row; nothing past its end."""
    store_up_to(array, row, column, value, array.shape[1] - column)


@inlined
def activated(value, kind):
    """Return an activation; `kind` is one of `functions.ACTIVATIONS`."""
    if kind == GELU:
        return gelu_erf(value)
    if kind == GELU_TANH:
        return gelu_tanh(value)
    if kind == SILU:
        return value * sigmoid(value)
    return maximum(splat(_ZERO), value) if kind == RELU else value


@inlined
def normalize_row(matrix, row, weight, bias, eps, out):
    """Write the layer norm of a row into `out`, which may be `matrix`.

    Args:
        weight, bias: `[1, features]`; the bias may be `[0, 0]` for none.
    """
    features = matrix.shape[1]
    whole = features // LANES * LANES
    total = splat(_ZERO)
    for column in range(0, features, LANES):
        total = total + load_within(matrix, row, column)
    mean = sum_of(total) / np.float32(features)
    total = splat(_ZERO)
    for column in range(0, whole, LANES):
        centered = load(matrix, row, column) - splat(mean)
        total = multiply_add(centered, centered, total)
    squares = sum_of(total)
    for column in range(whole, features):
        number = sum_of(load_first(matrix, row, column, 1))
        squares += (number - mean) * (number - mean)
    factor = _ONE / np.sqrt(squares / np.float32(features) + eps)
    for column in range(0, features, LANES):
        centered = load_within(matrix, row, column) - splat(mean)
        value = centered * splat(factor) * load_within(weight, 0, column)
        if bias.shape[1]:
            value = value + load_within(bias, 0, column)
        store_within(out, row, column, value)
