"""Activations and layer norms of rows, for functions that numba compiles."""

import numpy as np

from varlen_kernels.cpu.native.lanes import (
    exp,
    load,
    load_first,
    maximum,
    minimum,
    multiply_add,
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
# Past this size of x, erf(x / sqrt(2)) is 1 or -1.
_MOST = np.float32(5.4)
# Coefficients of s ** 0, s ** 1, ... in a polynomial for erf(x / sqrt(2)) / (2 z), with z = x / _MOST and s = 2 z² - 1:
# the minimax fit, whose value for s = 1 is 0.5 as `gelu_erf` computes it. Coefficients of powers of z would
# be up to 5000, and their sum would lose digits.
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9, _E10, _E11, _E12, _E13, _E14, _E15 = (
    np.float32(x)
    for x in (
        0.7070118,
        -0.35277098,
        0.26190025,
        -0.21173777,
        0.17338541,
        -0.13878658,
        0.10637859,
        -0.07664973,
        0.051189546,
        -0.033006035,
        0.021241708,
        -0.010940564,
        0.0035554904,
        -0.0023502018,
        0.002481259,
        -0.00090222986,
    )
)
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
def _cubic(s, squares, a, b, c, d):
    """Return a + b s + c s² + d s³."""
    high = multiply_add(s, splat(d), splat(c))
    return multiply_add(squares, high, multiply_add(s, splat(b), splat(a)))


@inlined
def gelu_erf(x):
    """Return exact GELU, with an error of up to 1.7e-7 of x.

    Parts of the polynomial do not wait for each other, which a chain of sums would: Estrin's scheme.
    """
    z = minimum(maximum(x * splat(_ONE / _MOST), splat(-_ONE)), splat(_ONE))
    s = multiply_add(z + z, z, splat(-_ONE))
    squares = s * s
    fourths = squares * squares
    low = _cubic(s, squares, _E0, _E1, _E2, _E3)
    low = multiply_add(fourths, _cubic(s, squares, _E4, _E5, _E6, _E7), low)
    high = _cubic(s, squares, _E8, _E9, _E10, _E11)
    high = multiply_add(fourths, _cubic(s, squares, _E12, _E13, _E14, _E15), high)
    total = multiply_add(fourths * fourths, high, low)
    return x * multiply_add(z, total, splat(_HALF))


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
def activate_vector(values, rows, lane, kind, out, to_row, column):
    """Write the activation of 16 features of some rows.

    Args:
        values: `[rows, features]` fp32.
        lane, column: the first of the features in `values` and in `out`.
    """
    if kind == GELU:
        # a loop without the other activations has its coefficients in registers
        for i in range(rows):
            store_within(out, to_row + i, column, gelu_erf(load(values, i, lane)))
    else:
        for i in range(rows):
            store_within(out, to_row + i, column, activated(load(values, i, lane), kind))


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
