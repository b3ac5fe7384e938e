"""Tokens as int8 codes on CPUs, compiled by numba.

Source: the specification is `reference.linear_int8.quantize_rows`.
"""

import numba
import numpy as np

from varlen_kernels.cpu.int8_tile import store_codes
from varlen_kernels.cpu.lanes import (
    LANES,
    largest_of,
    load,
    load_first,
    maximum,
    minimum,
    multiply_add,
    select_greater,
    smallest_of,
    splat,
    sum_of,
)
from varlen_kernels.reference.linear_int8 import OUTLIERS, SMALLEST_SCALE

# Numbers of a token beside its codes: the value of a step, the value of code 0, the outliers.
FACTORS = 2 + OUTLIERS

_SMALLEST_SCALE = np.float32(SMALLEST_SCALE)
_ZERO, _HALF, _ONE, _NAN = (np.float32(x) for x in (0, 0.5, 1, np.nan))
_LARGEST = np.finfo(np.float32).max


@numba.njit(nogil=True)
def kept_columns(outliers, hidden):
    """Return 1 for columns that get codes, else 0: `[1, columns]`, in whole vectors."""
    kept = np.zeros((1, (hidden + LANES - 1) // LANES * LANES), np.float32)
    kept[0, :hidden] = _ONE
    for outlier in outliers:
        kept[0, outlier] = _ZERO
    return kept


@numba.njit(forceinline=True, _nrt=False)
def _load(x, token, column):
    """Return a vector of a token; zeros past its end."""
    count = x.shape[1] - column
    return load(x, token, column) if count >= LANES else load_first(x, token, column, count)


@numba.njit(forceinline=True, _nrt=False)
def quantize_row(x, token, outliers, kept, levels, lowest, codes, factors, to_row):
    """Write the codes and factors of a token; NaN if it is not finite.

    Codes of outliers, and past the last column, have no meaning.

    Args:
        x: `[tokens, hidden]`.
        kept: made by `kept_columns`.
        lowest: code of the lowest value.
        codes: bytes, `[rows, columns]`; whole vectors are written.
        factors: `[rows, FACTORS]`.
        to_row: row of codes and factors.
    """
    hidden = x.shape[1]
    zero = splat(_ZERO)
    # zero times a number is zero, unless the number is NaN or infinite
    total = zero
    lows, highs = splat(_LARGEST), splat(-_LARGEST)
    for column in range(0, hidden, LANES):
        value, weight = _load(x, token, column), load(kept, 0, column)
        total = multiply_add(value, zero, total)
        lows = minimum(select_greater(weight, zero, value, splat(_LARGEST)), lows)
        highs = maximum(select_greater(weight, zero, value, splat(-_LARGEST)), highs)
    low = smallest_of(lows)
    if sum_of(total) == _ZERO:
        scale = max((largest_of(highs) - low) / np.float32(levels), _SMALLEST_SCALE)
        inverse = _ONE / scale
        for column in range(0, hidden, LANES):
            value = _load(x, token, column) - splat(low)
            # not one multiply_add: codes equal the reference, bit by bit
            store_codes(codes, to_row, column, value * splat(inverse) + splat(_HALF), lowest)
    else:
        scale = _NAN
        for column in range(0, hidden, LANES):
            store_codes(codes, to_row, column, zero, 0)
    factors[to_row, 0] = scale
    factors[to_row, 1] = low - scale * np.float32(lowest)
    for k in range(OUTLIERS):
        factors[to_row, 2 + k] = x[token, outliers[k]]
