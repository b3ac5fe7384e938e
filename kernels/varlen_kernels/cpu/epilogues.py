"""Activations and layer norms of rows, for functions that numba compiles.

Source: the specifications are `reference.activate` and `reference.layer_norm`.
"""

from collections.abc import Mapping

import numba
import numpy as np

from varlen_kernels import Activation
from varlen_kernels.cpu.gelu import gelu_erf, gelu_tanh, sigmoid
from varlen_kernels.cpu.lanes import (
    LANES,
    load,
    load_first,
    maximum,
    multiply_add,
    splat,
    store,
    store_first,
    sum_of,
)

NO_ACTIVATION, _GELU, _GELU_TANH, _SILU, _RELU = range(5)
ACTIVATIONS: Mapping[Activation | None, int] = {
    None: NO_ACTIVATION,
    "gelu": _GELU,
    "gelu_tanh": _GELU_TANH,
    "silu": _SILU,
    "relu": _RELU,
}
# Stands for a matrix that is left out.
NO_MATRIX = np.empty((0, 0), np.float32)
_ZERO, _ONE = np.float32(0), np.float32(1)


@numba.njit(forceinline=True, _nrt=False)
def load_within(array, row, column):
    """Return a vector of a row; zeros past its end."""
    count = array.shape[1] - column
    return load(array, row, column) if count >= LANES else load_first(array, row, column, count)


@numba.njit(forceinline=True, _nrt=False)
def store_within(array, row, column, value):
    """Write a vector of a row; nothing past its end."""
    count = array.shape[1] - column
    if count >= LANES:
        store(array, row, column, value)
    else:
        store_first(array, row, column, value, count)


@numba.njit(forceinline=True, _nrt=False)
def activated(value, kind):
    """Return an activation; `kind` is one of `ACTIVATIONS`."""
    if kind == _GELU:
        return gelu_erf(value)
    if kind == _GELU_TANH:
        return gelu_tanh(value)
    if kind == _SILU:
        return value * sigmoid(value)
    return maximum(splat(_ZERO), value) if kind == _RELU else value


@numba.njit(forceinline=True, _nrt=False)
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
        squares += (matrix[row, column] - mean) * (matrix[row, column] - mean)
    factor = _ONE / np.sqrt(squares / np.float32(features) + eps)
    for column in range(0, features, LANES):
        centered = load_within(matrix, row, column) - splat(mean)
        value = centered * splat(factor) * load_within(weight, 0, column)
        if bias.shape[1]:
            value = value + load_within(bias, 0, column)
        store_within(out, row, column, value)
