"""Products of tokens with the keys and queries of distances, on a CPU.

A table has one row for each distance, so the products of 16 queries with the distances that a block of keys has are
one small matrix. Query i reads its row of that matrix from one place further left than query i - 1: rows of a matrix
that is one column narrower, in the same memory. No product is computed that no score reads, but for the corners.
Source: He et al. 2020, arXiv:2006.03654, section 3.1; the narrower matrix is the relative shift of Dai et al. 2019,
arXiv:1901.02860, appendix B.
"""

import numpy as np

from varlen_kernels.cpu.bodies.attention_weights import ROWS, copy_head, multiply
from varlen_kernels.cpu.native.lanes import load, splat, store, transpose
from varlen_kernels.cpu.native.native import aligned, fp32_matrix, inlined, inlined_view
from varlen_kernels.cpu.native.target_cpu import LANES

_ZERO, _ONE = np.float32(0), np.float32(1)


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
