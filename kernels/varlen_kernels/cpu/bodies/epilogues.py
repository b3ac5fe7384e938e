"""Activations and layer norms of rows, for functions that numba compiles.

Source: the specifications are `reference.activate` and `reference.layer_norm`.
"""

import numpy as np

from varlen_kernels.cpu.bodies.gelu import gelu_erf, gelu_tanh, sigmoid
from varlen_kernels.cpu.native.lanes import (
    load,
    load_first,
    maximum,
    multiply_add,
    splat,
    store,
    store_first,
    sum_of,
)
from varlen_kernels.cpu.native.native import inlined
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.op_table import GELU, GELU_TANH, RELU, SILU

_ZERO, _ONE = np.float32(0), np.float32(1)


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
    """Return an activation; `kind` is one of `op_table.ACTIVATIONS`."""
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
