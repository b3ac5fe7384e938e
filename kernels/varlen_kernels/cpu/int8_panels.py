"""Linear layers in int8 with what follows them, compiled by numba.

A block of tokens becomes codes, and its products with each panel of the weight become numbers while they are in
registers and the first-level cache: scales, outliers, bias, activation and residual cost no pass over memory. A layer
norm reads the block's rows while they are in the second-level cache. A token has the same result by
itself and in a batch, to the last bit.
Source: the specifications are the functions of `reference.linear_int8`.
"""

import numba
import numpy as np
from numba.core import types

from varlen_kernels.cpu.gelu import gelu_erf, gelu_tanh, sigmoid
from varlen_kernels.cpu.int8_rows import FACTORS, kept_columns, quantize_row
from varlen_kernels.cpu.int8_tile import (
    TILE_FEATURES,
    TILE_ROWS,
    multiply_pair,
    multiply_row,
    multiply_tile,
    prefetch,
)
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

# Tokens whose codes and results stay in the second-level cache; a multiple of TILE_ROWS.
BLOCK = 96
_ZERO, _ONE = np.float32(0), np.float32(1)
# Activations by number.
NO_ACTIVATION, GELU, GELU_TANH, SILU, RELU = range(5)


@numba.njit(forceinline=True, _nrt=False)
def _load(array, row, column):
    """Return a vector of a row; zeros past its end."""
    count = array.shape[1] - column
    return load(array, row, column) if count >= LANES else load_first(array, row, column, count)


@numba.njit(forceinline=True, _nrt=False)
def _store(array, row, column, value):
    """Write a vector of a row; nothing past its end."""
    count = array.shape[1] - column
    if count >= LANES:
        store(array, row, column, value)
    else:
        store_first(array, row, column, value, count)


@numba.njit(forceinline=True, _nrt=False)
def _activated(value, kind):
    if kind == GELU:
        return gelu_erf(value)
    if kind == GELU_TANH:
        return gelu_tanh(value)
    if kind == SILU:
        return value * sigmoid(value)
    return maximum(splat(_ZERO), value) if kind == RELU else value


@numba.njit(forceinline=True, _nrt=False)
def _prefetch_tile(out, to_row, rows, first_column):
    """Have the memory of a tile's results in the cache when they are there."""
    for i in range(rows):
        for column in range(first_column, min(first_column + TILE_FEATURES, out.shape[1]), LANES):
            prefetch(out, to_row + i, column)


@numba.njit(forceinline=True, _nrt=False)
def _multiply_tile(codes, tile, rows, panels, panel, sums):
    """Write the products of the rows of a tile; others have no meaning."""
    if rows == 1:
        multiply_row(codes, tile, panels, panel, sums)
    elif rows == 2:
        multiply_pair(codes, tile, panels, panel, sums)
    else:
        multiply_tile(codes, tile, panels, panel, sums)


@numba.njit(forceinline=True, _nrt=False)
def _scale_tile(
    sums, rows, factors, tile, scale, fp32_rows, first_column, residual, out, to_row, to_column
):
    """Write the values of sums, with outliers, bias and a residual that is not empty.

    Args:
        sums: `[TILE_ROWS, TILE_FEATURES]`; the first rows count.
        factors: `[tokens, FACTORS]`, the rows of the tile start at row `tile`.
        first_column: column of the tile in `scale` and `fp32_rows`.
        out: may be `sums`.
    """
    for lane in range(0, min(TILE_FEATURES, scale.shape[1] - first_column), LANES):
        column = first_column + lane
        scales = _load(scale, 0, column)
        weight_sums, bias = _load(fp32_rows, 0, column), _load(fp32_rows, 1, column)
        # one name for each of OUTLIERS
        first, second = _load(fp32_rows, 2, column), _load(fp32_rows, 3, column)
        third, fourth = _load(fp32_rows, 4, column), _load(fp32_rows, 5, column)
        for i in range(rows):
            row = tile + i
            value = multiply_add(splat(factors[row, 1]), weight_sums, bias)
            value = multiply_add(splat(factors[row, 2]), first, value)
            value = multiply_add(splat(factors[row, 3]), second, value)
            value = multiply_add(splat(factors[row, 4]), third, value)
            value = multiply_add(splat(factors[row, 5]), fourth, value)
            steps = load(sums, i, lane) * splat(factors[row, 0])
            value = multiply_add(steps, scales, value)
            if len(residual):
                value = value + _load(residual, to_row + i, column)
            _store(out, to_row + i, to_column + lane, value)


@numba.njit(forceinline=True, _nrt=False)
def _activate_tile(values, rows, first_column, kind, out, to_row):
    """Write the activation of the first rows of a tile."""
    for i in range(rows):
        for column in range(first_column, min(first_column + TILE_FEATURES, out.shape[1]), LANES):
            value = load(values, i, column - first_column)
            _store(out, to_row + i, column, _activated(value, kind))


@numba.njit(forceinline=True, _nrt=False)
def _normalize_row(matrix, row, weight, bias, eps, is_rms, normed):
    """Write the layer or RMS norm of a row into `normed`, perhaps `matrix`."""
    features = matrix.shape[1]
    whole = features // LANES * LANES
    mean = _ZERO
    if not is_rms:
        total = splat(_ZERO)
        for column in range(0, features, LANES):
            total = total + _load(matrix, row, column)
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
        centered = _load(matrix, row, column) - splat(mean)
        scaled = centered * splat(factor)
        value = multiply_add(scaled, _load(weight, 0, column), _load(bias, 0, column))
        _store(normed, row, column, value)


_VECTOR, _MATRIX = types.float32[::1], types.float32[:, ::1]


# compiled when this file is loaded, under the lock of `choose_product`; error_model as for `multiply_rows`
@numba.njit(
    types.void(_MATRIX, _VECTOR, _VECTOR, _VECTOR, _MATRIX, types.boolean),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def normalize_rows(matrix, weight, bias, eps, normed, is_rms):
    """Write the norms of rows; weight, bias and eps are vectors."""
    norm = weight.reshape((1, len(weight))), bias.reshape((1, len(bias)))
    for row in range(len(matrix)):
        _normalize_row(matrix, row, *norm, eps[0], is_rms, normed)


# a row without variance divides by zero where eps is 0, which gives NaN
@numba.njit(nogil=True, cache=True, error_model="numpy")
def multiply_rows(
    first_token,
    last_token,
    first_panel,
    last_panel,
    x,  # [tokens, hidden]
    panels,  # see int8_tile.pack_panels
    scale,  # [features]
    fp32_rows,  # [2 + OUTLIERS, features]
    outliers,  # [OUTLIERS], ascending
    residual,  # [tokens, features], or without tokens for none
    weight,  # [features] of the norm, or [0] for none
    bias,  # the same
    eps,  # [1]
    out,  # [tokens, features]
    normed,  # the same, for the norms; may be `out`
    levels,
    kind,
    is_rms,  # whether the norm is an RMS norm
):
    """Write the results of some tokens, or of some panels if there is no norm."""
    kept = kept_columns(outliers, x.shape[1])
    scales = scale.reshape((1, len(scale)))
    norm = weight.reshape((1, len(weight))), bias.reshape((1, len(bias)))
    # the last tile has rows past the last token, whose results are not written
    codes = np.zeros((BLOCK, kept.shape[1]), np.uint8)
    factors = np.zeros((BLOCK, FACTORS), np.float32)
    sums = np.empty((TILE_ROWS, TILE_FEATURES), np.float32)
    for block in range(first_token, last_token, BLOCK):
        count = min(BLOCK, last_token - block)
        for i in range(count):
            quantize_row(x, block + i, outliers, kept, levels, 0, codes, factors, i)
        for panel in range(first_panel, last_panel):
            for tile in range(0, count, TILE_ROWS):
                column, rows = panel * TILE_FEATURES, min(TILE_ROWS, count - tile)
                _prefetch_tile(out, block + tile, rows, column)
                _multiply_tile(codes, tile, rows, panels, panel, sums)
                of_tile = sums, rows, factors, tile, scales, fp32_rows, column
                if kind == NO_ACTIVATION:
                    _scale_tile(*of_tile, residual, out, block + tile, column)
                else:
                    _scale_tile(*of_tile, residual, sums, 0, 0)
                    _activate_tile(sums, rows, column, kind, out, block + tile)
        if len(weight):
            for i in range(count):
                _normalize_row(out, block + i, *norm, eps[0], is_rms, normed)
