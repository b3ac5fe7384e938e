"""Tokens as int8 codes on CPUs, compiled by numba.

Source: the specification is `linear_int8_reference.quantize_rows`.
"""

import numba
import numpy as np

from varlen_kernels.int8_tile_cpu import store_codes
from varlen_kernels.lanes_cpu import (
    LANES,
    largest_of,
    load,
    load_first,
    maximum,
    minimum,
    multiply_add,
    smallest_of,
    splat,
    store,
    sum_of,
)
from varlen_kernels.linear_int8_reference import OUTLIERS, SMALLEST_SCALE

# Numbers of a token beside its codes: the value of a step, the value of code 0, the outliers.
FACTORS = 2 + OUTLIERS

_SMALLEST_SCALE = np.float32(SMALLEST_SCALE)
_ZERO, _HALF, _ONE, _NAN = (np.float32(x) for x in (0, 0.5, 1, np.nan))


@numba.njit(forceinline=True, _nrt=False)
def first_kept(outliers):
    """Return the first column that is no outlier; outliers are ascending."""
    column = 0
    for outlier in outliers:
        if outlier == column:
            column += 1
    return column


@numba.njit(forceinline=True, _nrt=False)
def _copy_row(x, token, row):
    """Copy a token, and return whether its numbers are finite."""
    # zero times a number is zero, unless the number is NaN or infinite
    total, zero = splat(_ZERO), splat(_ZERO)
    hidden = x.shape[1]
    whole = hidden // LANES * LANES
    for column in range(0, whole, LANES):
        value = load(x, token, column)
        store(row, 0, column, value)
        total = multiply_add(value, zero, total)
    if whole < hidden:
        value = load_first(x, token, whole, hidden - whole)
        store(row, 0, whole, value)
        total = multiply_add(value, zero, total)
    return sum_of(total) == _ZERO


@numba.njit(forceinline=True, _nrt=False)
def quantize_row(x, token, outliers, kept, levels, lowest, row, codes, factors, to_row):
    """Write the codes and factors of a token; NaN if it is not finite.

    Args:
        x: `[tokens, hidden]`.
        kept: a column that is no outlier.
        lowest: code of the lowest value.
        row: `[1, columns]`, overwritten; hidden, rounded up to whole vectors.
        codes: `[rows, columns]` of bytes.
        factors: `[rows, FACTORS]`.
        to_row: row of codes and factors.
    """
    hidden, columns = x.shape[1], row.shape[1]
    is_finite = _copy_row(x, token, row)
    # in the place of outliers, and past the last column, stands the value of another column
    other = x[token, kept]
    for k in range(OUTLIERS):
        factors[to_row, 2 + k] = x[token, outliers[k]]
        row[0, outliers[k]] = other
    for column in range(hidden, columns):
        row[0, column] = other
    lows = highs = splat(other)
    for column in range(0, columns, LANES):
        value = load(row, 0, column)
        lows = minimum(value, lows)
        highs = maximum(value, highs)
    low = smallest_of(lows)
    scale = max((largest_of(highs) - low) / np.float32(levels), _SMALLEST_SCALE)
    if not is_finite:
        scale = _NAN
    inverse = _ONE / scale if is_finite else _ZERO
    for column in range(0, columns, LANES):
        value = load(row, 0, column) - splat(low) if is_finite else splat(_ZERO)
        # not one multiply_add: codes are those of the reference, bit by bit
        store_codes(codes, to_row, column, value * splat(inverse) + splat(_HALF), lowest)
    factors[to_row, 0] = scale
    factors[to_row, 1] = low - scale * np.float32(lowest)
