"""Tokens as int8 codes on CPUs, compiled by numba.

Source: the specification is `reference.linear_int8.quantize_rows`.
"""

import numpy as np

from varlen_kernels.cpu.bodies.epilogues import load_within
from varlen_kernels.cpu.bodies.int8_tile import store_codes
from varlen_kernels.cpu.native.lanes import (
    largest_of,
    load,
    maximum,
    minimum,
    multiply_add,
    select_greater,
    smallest_of,
    splat,
    sum_of,
)
from varlen_kernels.cpu.native.native import (
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.reference.linear_int8 import OUTLIERS, SMALLEST_SCALE

# NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}

_SMALLEST_SCALE = np.float32(SMALLEST_SCALE)
_ZERO, _HALF, _ONE, _NAN = (np.float32(x) for x in (0, 0.5, 1, np.nan))
_LARGEST = np.finfo(np.float32).max


@inlined
def whole_vectors(columns):
    """Return a number of columns, rounded up to whole vectors."""
    return (columns + LANES - 1) // LANES * LANES


@inlined
def keep_columns(outliers, hidden, kept):
    """Write 1 for columns that get codes, else 0.

    Args:
        hidden: number of columns.
        kept: `[1, columns]`, in whole vectors.
    """
    for column in range(kept.shape[1]):
        kept[0, column] = _ONE if column < hidden else _ZERO
    for i in range(len(outliers)):
        kept[0, outliers[i]] = _ZERO


@inlined
def quantize_row(x, token, outliers, kept, levels, lowest, codes, factors, to_row):
    """Write the codes and factors of a token; NaN if it is not finite.

    Codes of outliers, and past the last column, have no meaning.

    Args:
        x: `[tokens, hidden]`.
        kept: see `keep_columns`.
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
        value, weight = load_within(x, token, column), load(kept, 0, column)
        total = multiply_add(value, zero, total)
        lows = minimum(select_greater(weight, zero, value, splat(_LARGEST)), lows)
        highs = maximum(select_greater(weight, zero, value, splat(-_LARGEST)), highs)
    low = smallest_of(lows)
    if sum_of(total) == _ZERO:
        scale = max((largest_of(highs) - low) / np.float32(levels), _SMALLEST_SCALE)
        inverse = _ONE / scale
        for column in range(0, hidden, LANES):
            value = load_within(x, token, column) - splat(low)
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


@inlined_body
def quantize(
    first,
    last,
    x,  # [tokens, hidden]
    outliers,  # [OUTLIERS], ascending
    levels,
    lowest,  # the code of a token's lowest value
    codes,  # [tokens, hidden]
    factors,  # [tokens, FACTORS]
):
    """Write the codes and factors of some tokens; return whether memory ran out."""
    columns = whole_vectors(x.shape[1])
    memory = new_memory(4 * columns)
    if memory == 0:
        return 1
    kept = fp32_matrix(memory, 1, columns)
    keep_columns(outliers, x.shape[1], kept)
    for token in range(first, last):
        quantize_row(x, token, outliers, kept, levels, lowest, codes, factors, token)
    free_memory(memory)
    return 0


@inlined_body(fastmath=_FAST)
def dequantize(
    first,
    last,
    sums,  # [tokens, features] int32 or fp32
    factors,  # [tokens, FACTORS]
    scale,  # [1, features]
    fp32_rows,  # [2 + OUTLIERS, features]
    out,  # [tokens, features]
):
    """Write the values of sums of codes."""
    for token in range(first, last):
        step, offset = factors[token, 0], factors[token, 1]
        # one name for each of OUTLIERS
        x_first, x_second = factors[token, 2], factors[token, 3]
        x_third, x_fourth = factors[token, 4], factors[token, 5]
        for i in range(sums.shape[1]):
            out[token, i] = (
                np.float32(sums[token, i]) * step * scale[0, i]
                + offset * fp32_rows[0, i]
                + fp32_rows[1, i]
                + x_first * fp32_rows[2, i]
                + x_second * fp32_rows[3, i]
                + x_third * fp32_rows[4, i]
                + x_fourth * fp32_rows[5, i]
            )
    return 0
