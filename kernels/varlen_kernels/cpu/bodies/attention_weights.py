"""Scores of attention on a CPU, their weights, weighted values, and scores of distances.

Scores are read in blocks, with a running maximum and a running sum of weights for each query.

A table of distances has one row for each, so the products of 16 queries with the distances that a block of keys has are
one small matrix. Query i reads its row of that matrix from one place further left than query i - 1: rows of a matrix
that is one column narrower, in the same memory. No product is computed that no score reads, but for the corners.
Source: Milakov, Gimelshein 2018, arXiv:1805.02867. Distances: He et al. 2020, arXiv:2006.03654, section 3.1; the
narrower matrix is the relative shift of Dai et al. 2019, arXiv:1901.02860, appendix B.
"""

import numpy as np

from varlen_kernels.cpu.bodies.epilogues import tanh
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
    transpose,
)
from varlen_kernels.cpu.native.native import aligned, fp32_matrix, inlined, inlined_view
from varlen_kernels.cpu.native.target_cpu import LANES

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


@inlined
def copy_distances(tables, column, head_dim, scale, lanes, distances):
    """Write one head of both tables as panels of 16 distances, scaled.

    Args:
        tables: see `make_distances`.
        column: first feature of the head.
        lanes: 16 rows, overwritten.
        distances: result of `make_distances`.
    """
    rows, keys, queries = tables
    _copy_table(keys, rows, column, head_dim, scale, 1, lanes, distances[0])
    _copy_table(queries, rows, column, head_dim, scale, -1, lanes, distances[1])


@inlined
def _copy_table(table, rows, column, head_dim, scale, direction, lanes, panels):
    """Write one head of a table as panels; distances ascend times `direction`."""
    width = lanes.shape[1]
    count = panels.shape[0] // width
    reach = rows.shape[0] // 2
    for panel in range(count):
        for lane in range(LANES):
            distance = direction * ((panel - count // 2) * LANES + lane)
            row = rows[min(max(distance, -reach), reach) + reach]
            copy_head(table, row, column, head_dim, lanes, lane)
        for feature in range(0, width, LANES):
            transpose(lanes, feature, panels, panel * width + feature, splat(scale))


@inlined
def write_distance_scores(scores, queries, count, tile, key_rows, keys, block, distances):
    """Write what distances add to the scores of some queries and keys.

    Args:
        scores: `[16, keys]`.
        queries: `count` rows from the sequence's query `tile` on, then zeros.
        key_rows: keys of the sequence; `keys` of them are read, from `block` on.
        distances: result of `make_distances`.
    """
    key_panels, query_panels, by_query, by_query_shifted, by_key, by_key_shifted, square = distances
    width = queries.shape[1]
    rows = (count + ROWS - 1) // ROWS * ROWS
    if key_panels.shape[0]:
        # from the distance of the first key to the last query
        first = (block - tile) // LANES - 1 + key_panels.shape[0] // width // 2
        for column in range(0, keys + LANES, LANES):
            panel = (first + column // LANES) * width
            for row in range(0, rows, ROWS):
                multiply(by_query, row, column, queries, width, key_panels, panel, 0, True)
    for column in range(0, keys, LANES):
        if query_panels.shape[0]:
            group = key_rows[block + column : block + column + LANES]
            first = (tile - block - column) // LANES - 1 + query_panels.shape[0] // width // 2
            for half in range(2):
                panel = (first + half) * width
                for row in range(0, LANES, ROWS):
                    multiply(by_key, row, half * LANES, group, width, query_panels, panel, 0, True)
            transpose(by_key_shifted, LANES, square, 0, splat(_ONE))
        for row in range(rows):
            total = splat(_ZERO)
            if query_panels.shape[0]:
                total = load(square, row, 0)
            if key_panels.shape[0]:
                total = total + load(by_query_shifted, row, column + LANES)
            store(scores, row, column, total)


@inlined
def _table_bytes(table, longest, width):
    """Return the size of the panels of a table."""
    panels = 2 * ((longest + LANES - 1) // LANES)
    return 4 * LANES * panels * width if len(table) else 0


@inlined
def distance_bytes(tables, longest, width, queries, keys):
    """Return the size of the memory of `make_distances`."""
    _, key_table, query_table = tables
    panels = _table_bytes(key_table, longest, width) + _table_bytes(query_table, longest, width)
    products = aligned(4 * queries * (keys + LANES)) + 4 * LANES * 2 * LANES
    return panels + products + 4 * LANES * LANES


@inlined_view
def make_distances(memory, tables, longest, width, queries, keys):
    """Return panels of distances, and room for the products with them.

    Args:
        memory: address of memory of the size `distance_bytes`.
        tables: the row of each distance, `[2 * reach + 1]`, and keys and queries of distances,
            `[rows, num_heads * head_dim]` or no rows.
        longest: tokens of the longest sequence.
        width: features of a head, rounded up to a multiple of 16.
        queries, keys: number of queries and keys of a tile.

    Returns:
        Panels of the keys of distances, ascending, and of their queries, descending, with 0 in the middle; the
        products of queries and the products of 16 keys, each again as a matrix one column narrower; and a square.
    """
    _, key_table, query_table = tables
    rows = 2 * ((longest + LANES - 1) // LANES) * width
    key_panels = fp32_matrix(memory, rows if len(key_table) else 0, LANES)
    memory += _table_bytes(key_table, longest, width)
    query_panels = fp32_matrix(memory, rows if len(query_table) else 0, LANES)
    by_query = memory + _table_bytes(query_table, longest, width)
    by_key = by_query + aligned(4 * queries * (keys + LANES))
    return (
        key_panels,
        query_panels,
        fp32_matrix(by_query, queries, keys + LANES),
        fp32_matrix(by_query, queries, keys + LANES - 1),
        fp32_matrix(by_key, LANES, 2 * LANES),
        fp32_matrix(by_key, LANES, 2 * LANES - 1),
        fp32_matrix(by_key + 4 * LANES * 2 * LANES, LANES, LANES),
    )
