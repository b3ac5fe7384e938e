"""Scores of attention on a CPU, their weights, and the weighted values.

Scores are read in blocks, with a running maximum and a running sum of weights for each query.
Source: Milakov, Gimelshein 2018, arXiv:1805.02867.
"""

import numpy as np

from varlen_kernels.cpu.bodies.gelu import tanh
from varlen_kernels.cpu.native.lanes import (
    exp,
    largest_of,
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

_ZERO = np.float32(0)
# Rows that are multiplied together: their sums are in registers.
ROWS = 4


@inlined
def copy_head(source, row, column, head_dim, destination, to_row):
    """Copy the features of one head as fp32, with zeros up to a whole vector."""
    whole = head_dim // LANES * LANES
    for feature in range(0, whole, LANES):
        store(destination, to_row, feature, load(source, row, column + feature))
    if whole < head_dim:
        rest = load_first(source, row, column + whole, head_dim - whole)
        store(destination, to_row, whole, rest)


@inlined
def clear_rows(matrix, first, last):
    """Write zeros into the rows from `first` to `last` - 1."""
    for row in range(first, last):
        for column in range(0, matrix.shape[1], LANES):
            store(matrix, row, column, splat(_ZERO))


@inlined
def multiply(out, row, column, factors, depth, matrix, first, matrix_column, is_first):
    """Write 4 x 16 numbers of a product, or add them to `out`."""
    if is_first:
        a = b = c = d = splat(_ZERO)
    else:
        a = load(out, row, column)
        b = load(out, row + 1, column)
        c = load(out, row + 2, column)
        d = load(out, row + 3, column)
    for i in range(depth):
        lanes = load(matrix, first + i, matrix_column)
        a = multiply_add(splat(factors[row, i]), lanes, a)
        b = multiply_add(splat(factors[row + 1, i]), lanes, b)
        c = multiply_add(splat(factors[row + 2, i]), lanes, c)
        d = multiply_add(splat(factors[row + 3, i]), lanes, d)
    store(out, row, column, a)
    store(out, row + 1, column, b)
    store(out, row + 2, column, c)
    store(out, row + 3, column, d)


# Below every score; not infinite: the difference of two is 0.
LOWEST = np.float32(-1e30)
# Below it is the largest score of a query that may read no key.
_READS_NOTHING = np.float32(-1e29)
_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined
def write_score_bias(score_bias, length, bias, head, is_causal, window):
    """Write what is added to a score, by distance from 1 - length on."""
    # -1 without a bias
    reach = (bias.shape[1] + 1) // 2 - 1
    for i in range(2 * length - 1):
        distance = i - (length - 1)
        if (is_causal and distance > 0) or (window > 0 and abs(distance) >= window):
            score_bias[0, i] = LOWEST
        elif reach >= 0:
            score_bias[0, i] = bias[head, min(max(distance, -reach), reach) + reach]
        else:
            score_bias[0, i] = _ZERO


@inlined
def cap_scores(scores, rows, count, soft_cap):
    """Limit the scores of some queries, see `reference.attention_varlen`."""
    for row in range(rows):
        for column in range(0, count, LANES):
            part = load(scores, row, column) / splat(soft_cap)
            store(scores, row, column, tanh(part) * splat(soft_cap))


@inlined
def weigh(scores, row, count, score_bias, offset, top, totals, context, is_first):
    """Replace the scores of a query by weights.

    What was summed with a smaller maximum counts less.
    """
    if score_bias.shape[1]:
        for column in range(0, count, LANES):
            biased = load(scores, row, column) + load(score_bias, 0, offset + column)
            store(scores, row, column, biased)
    largest = splat(LOWEST if is_first else top[row])
    for column in range(0, count, LANES):
        largest = maximum(load(scores, row, column), largest)
    new_top = largest_of(largest)
    total = splat(_ZERO)
    for column in range(0, count, LANES):
        weights = exp(load(scores, row, column) - splat(new_top))
        store(scores, row, column, weights)
        total = total + weights
    if not is_first:
        rescale = exp(splat(top[row] - new_top))
        total = multiply_add(load(totals, row, 0), rescale, total)
        for feature in range(0, context.shape[1], LANES):
            store(context, row, feature, load(context, row, feature) * rescale)
    store(totals, row, 0, total)
    top[row] = new_top


@inlined
def write_context(context, row, total, out, to_row, column, head_dim):
    """Write the weighted sum of a query's values, divided by its weights."""
    factor = splat(_ONE) / splat(total)
    whole = head_dim // LANES * LANES
    for feature in range(0, whole, LANES):
        store(out, to_row, column + feature, load(context, row, feature) * factor)
    if whole < head_dim:
        rest = load(context, row, whole) * factor
        store_first(out, to_row, column + whole, rest, head_dim - whole)


@inlined
def forget_keys(totals, top, count):
    """Write the numbers of queries that have read no key."""
    for row in range(count):
        top[row] = LOWEST
        store(totals, row, 0, splat(_ONE))


@inlined
def clear_unread(context, totals, top, count):
    """Clear the context of queries that may read no key, given their largest scores."""
    for row in range(count):
        # scores of NaN leave the largest one low too, but their weights are 0
        if top[row] < _READS_NOTHING and sum_of(load(totals, row, 0)) > 0:
            clear_rows(context, row, row + 1)
