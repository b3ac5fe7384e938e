"""Scores of attention on a CPU, their weights, weighted values, and scores of distances.

Scores are read in blocks, with a running maximum and a running sum of weights for each query.

A table of distances has one row for each, so the products of 16 queries with the distances that a block of keys has are
one small matrix. Query i reads its row of that matrix from one place further left than query i - 1: rows of a matrix
that is one column narrower, in the same memory. No product is computed that no score reads, but for the corners.
With `factor_matrix` of bf16 the CPU multiplies pairs of features, or of keys, and adds both products; with AMX, tiles.
Source: Milakov, Gimelshein 2018, arXiv:1805.02867. Distances: He et al. 2020, arXiv:2006.03654, section 3.1; the
narrower matrix is the relative shift of Dai et al. 2019, arXiv:1901.02860, appendix B.
"""

from itertools import chain
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.bodies.epilogues import tanh
from varlen_kernels.cpu.bodies.panel_layout import HAS_PAIRS, PANEL_VECTORS
from varlen_kernels.cpu.bodies.panels import Tile
from varlen_kernels.cpu.native.lanes import (
    element_address,
    exp,
    fetch,
    largest_of,
    load,
    load_first,
    maximum,
    multiply_add,
    repeated,
    row_bytes,
    short_exp,
    splat,
    store,
    store_factors,
    store_first,
    store_paired,
    sum_of,
    transpose,
)
from varlen_kernels.cpu.native.native import (
    aligned,
    array_at,
    fp32_matrix,
    inlined,
    inlined_view,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.cpu.native.tiles import (
    HAS_TILES,
    ROW_BYTES,
    add_product,
    begin_product,
    end_product,
    side_by_side,
)
from varlen_kernels.cpu.native.tiles import ROWS as TILE_ROWS

# Rows that are multiplied together, and at most as many vectors: their sums are in registers.
ROWS = 4
_LINE_BYTES = 64
# Tokens whose values are multiplied together: the rows of a tile are pairs.
TILE_TOKENS = 32 if HAS_TILES else LANES
_HAS_WIDE_TILES = PANEL_VECTORS == 4
_SIZE, _FLOATS = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)


@numba.extending.intrinsic
def factor_matrix(_context, like, _address, _rows, _columns):
    """Return a matrix of factors in memory at an address.

    They are bf16, as uint16, if the CPU multiplies pairs of these and an array has such numbers; else fp32.
    """
    is_half = HAS_PAIRS and like.dtype.bitwidth == 16
    kind: Any = types.Array(types.uint16 if is_half else types.float32, 2, "C")

    def generate(context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        return array_at(kind, context, builder, values[1], values[2:])

    return kind(like, *[types.int64] * 3), generate


@inlined
def copy_head(source, row, column, head_dim, destination, to_row):
    """Copy the features of one head as factors; zeros fill the row."""
    whole = head_dim // LANES * LANES
    for feature in range(0, whole, LANES):
        store_factors(destination, to_row, feature, load(source, row, column + feature))
    if whole < head_dim:
        rest = load_first(source, row, column + whole, head_dim - whole)
        store_factors(destination, to_row, whole, rest)
        whole += LANES
    for feature in range(whole, destination.shape[1], LANES):
        store_factors(destination, to_row, feature, splat(_ZERO))


@inlined
def fetch_head(source, row, column, head_dim):
    """Have the features of one head read into the cache."""
    for feature in range(0, head_dim, _LINE_BYTES // source.itemsize):
        fetch(source, row, column + feature)


@inlined
def copy_value(source, row, column, head_dim, values, position):
    """Copy the features of a token's value, with zeros up to a whole vector.

    Args:
        values: made by `value_matrix`; a pair has the values of two tokens, which come in ascending order.
        position: place of the token in its sequence.
    """
    pairs = 4 // values.itemsize
    to_row, is_second = position // pairs, position % pairs == 1
    whole = head_dim // LANES * LANES
    for feature in range(0, whole, LANES):
        value = load(source, row, column + feature)
        store_paired(values, to_row, feature * pairs, value, is_second)
    if whole < head_dim:
        rest = load_first(source, row, column + whole, head_dim - whole)
        store_paired(values, to_row, whole * pairs, rest, is_second)


@inlined
def clear_rows(matrix, first, last):
    """Write zeros into the rows from `first` to `last` - 1."""
    for row in range(first, last):
        for column in range(0, matrix.shape[1], LANES):
            store_factors(matrix, row, column, splat(_ZERO))


@inlined_view
def panel_matrix(memory, panels, width, like):
    """Return memory of panels of 16 rows of factors, which are its columns."""
    pairs = 4 // factor_matrix(like, memory, 0, 0).itemsize
    return factor_matrix(like, memory, panels * width // pairs, LANES * pairs)


@inlined_view
def value_matrix(memory, tokens, width, like):
    """Return memory of the values of an even number of tokens.

    A row has the values of one token, or pairs of the values of two.
    """
    pairs = 4 // factor_matrix(like, memory, 0, 0).itemsize
    return factor_matrix(like, memory, tokens // pairs, width * pairs)


@inlined
def first_row(panels, panel, width):
    """Return the first row of a panel."""
    return panel * (width * LANES // panels.shape[1])


@inlined
def num_panels(panels, width):
    """Return the number of panels of rows of `width` numbers."""
    return panels.shape[0] * panels.shape[1] // (width * LANES)


@inlined
def write_panel(rows, panels, panel):
    """Write 16 rows of factors as a panel."""
    width, pairs = rows.shape[1], panels.shape[1] // LANES
    for feature in range(0, width, LANES * pairs):
        transpose(rows, feature, panels, (panel * width + feature) // pairs)


def _product_of(vectors: int) -> Any:
    """Return a function that writes `ROWS` rows by some vectors of numbers; see `multiply`."""

    @numba.extending.intrinsic
    def product(
        _context,
        out,
        _row,
        _column,
        factors,
        _depth,
        matrix,
        _first,
        _skipped,
        _apart,
        _scale,
        _new,
    ):
        def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
            to_out, row, column, of_row, depth, of_matrix, first, skipped, apart, scale, new = (
                values
            )
            rows = [builder.add(row, _SIZE(i)) for i in range(ROWS)]

            def address(number: int, array: Any, *place: Any) -> Any:
                return element_address(context, builder, declared.args[number], array, *place)

            places = [
                [
                    builder.bitcast(
                        address(0, to_out, each, builder.add(column, _SIZE(LANES * i))),
                        _FLOATS.as_pointer(),
                    )
                    for i in range(vectors)
                ]
                for each in rows
            ]
            sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in each] for each in places]
            both = [*zip(chain(*places), chain(*sums), strict=True)]
            for _, total in both:
                builder.store(_FLOATS(None), total)
            with builder.if_then(builder.not_(new)):
                for place, total in both:
                    builder.store(builder.load(place, align=4), total)
            widths = tuple(declared.args[i].dtype.bitwidth // 8 for i in (3, 5))
            tile = Tile(
                builder,
                [address(3, of_row, each, _SIZE(0)) for each in rows],
                address(5, of_matrix, first, skipped),
                depth,
                [[builder.load(each) for each in of_sum] for of_sum in sums],
                widths=widths,
                row_bytes=row_bytes(context, builder, declared.args[5], of_matrix),
                vector_bytes=builder.mul(apart, _SIZE(widths[1])),
                unrolled=1,
                is_fetched=False,
            )
            factor = repeated(builder, scale)
            for place, total in zip(chain(*places), chain(*tile.totals), strict=True):
                builder.store(builder.fmul(builder.load(total), factor), place, align=4)
            return context.get_dummy_value()

        whole = types.int64
        arguments = out, whole, whole, factors, whole, matrix, *[whole] * 3
        return types.none(*arguments, types.float32, types.boolean), generate

    return product


_one_vector, _two_vectors, _four_vectors = (_product_of(vectors) for vectors in (1, 2, 4))


def _tiles_of(vectors: int) -> Any:
    """Return a function that writes 16 rows by some vectors of sums; see `multiply`."""

    @numba.extending.intrinsic
    def product(_context, out, _column, factors, _depth, matrix, _first, _skipped, _apart, _new):
        def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
            to_out, column, of_row, depth, of_matrix, first, skipped, apart, new = values
            zero = _SIZE(0)

            def address(number: int, array: Any, *place: Any) -> Any:
                return element_address(context, builder, declared.args[number], array, *place)

            def distance(number: int, array: Any) -> Any:
                return row_bytes(context, builder, declared.args[number], array)

            width = factors.dtype.bitwidth // 8
            numbers = _SIZE(ROW_BYTES // width)
            out_tiles = side_by_side(builder, address(0, to_out, zero, column), vectors)
            sums = out_tiles, distance(0, to_out)
            begin_product(builder, *sums, new)
            last = builder.add(depth, builder.sub(numbers, _SIZE(1)))
            with cgutils.for_range(builder, builder.udiv(last, numbers)) as step:
                row = builder.add(first, builder.mul(step.index, _SIZE(TILE_ROWS)))
                weights = address(4, of_matrix, row, skipped)
                add_product(
                    builder,
                    width,
                    rows=[address(2, of_row, zero, builder.mul(step.index, numbers))],
                    row_bytes=distance(2, of_row),
                    weights=side_by_side(
                        builder, weights, vectors, builder.mul(apart, _SIZE(width))
                    ),
                    weight_bytes=distance(4, of_matrix),
                )
            end_product(builder, *sums)
            return context.get_dummy_value()

        whole = types.int64
        arguments = out, whole, factors, whole, matrix, *[whole] * 3
        return types.none(*arguments, types.boolean), generate

    return product


_one_tile, _two_tiles, _four_tiles = (_tiles_of(vectors) for vectors in (1, 2, 4))


@inlined
def has_tiles(factors):
    """Return whether `multiply` uses tiles of AMX, which read factors up to a whole tile."""
    return HAS_TILES and factors.itemsize == 2


@inlined
def clear_past(values, length):
    """Clear the values past the last token, up to a whole tile.

    Args:
        values: made by `value_matrix`.
    """
    if has_tiles(values):
        whole = (length + TILE_TOKENS - 1) // TILE_TOKENS * TILE_TOKENS
        clear_rows(values, (length + 1) // 2, whole // 2)


@inlined
def _multiply_in_tiles(out, rows, columns, factors, depth, matrix, first, apart, scale, is_new):
    column = 0
    while column < columns:
        rest, skipped = columns - column, column // LANES * apart
        vectors = 4 if rest > 3 * LANES else min(2, (rest + LANES - 1) // LANES)
        place = out, column, factors, depth, matrix, first, skipped, apart, is_new
        if vectors == 4:
            _four_tiles(*place)
        elif vectors == 2:
            _two_tiles(*place)
        else:
            _one_tile(*place)
        column += vectors * LANES
    if scale != _ONE:
        for row in range(rows):
            for lane in range(0, columns, LANES):
                store(out, row, lane, load(out, row, lane) * splat(scale))


@inlined
def multiply(out, rows, columns, factors, depth, matrix, first, apart, scale, is_new):
    """Write a number times the products of rows of factors with a matrix.

    Args:
        out: fp32, of whole vectors.
        rows: number of rows, a multiple of `ROWS`.
        columns: number of columns of `out`; more are written up to a whole vector.
        depth: number of factors of a row.
        matrix: a row has 16 numbers for each of some factors, or 16 pairs for two.
        apart: numbers from a vector of the matrix to the one for the next 16 columns.
        is_new: whether the numbers in `out` do not count; else they are added to the products first.

    With `has_tiles`, `out` and the factors have 16 rows, and factors up to a whole tile past `depth` are 0 where the
    matrix is finite.
    """
    if has_tiles(factors):
        _multiply_in_tiles(out, rows, columns, factors, depth, matrix, first, apart, scale, is_new)
        return
    column = 0
    while column < columns:
        rest, skipped = columns - column, column // LANES * apart
        vectors = 1
        if _HAS_WIDE_TILES:
            vectors = 4 if rest > 3 * LANES else min(2, (rest + LANES - 1) // LANES)
        for row in range(0, rows, ROWS):
            place = out, row, column, factors, depth, matrix, first, skipped, apart, scale, is_new
            if _HAS_WIDE_TILES and vectors == 4:
                _four_vectors(*place)
            elif _HAS_WIDE_TILES and vectors == 2:
                _two_vectors(*place)
            else:
                _one_vector(*place)
        column += vectors * LANES


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
def largest_score(scores, row, count, score_bias, offset):
    """Add a bias to the scores of a query; return the largest one."""
    largest = splat(LOWEST)
    for column in range(0, count, LANES):
        score = load(scores, row, column)
        if score_bias.shape[1]:
            score = score + load(score_bias, 0, offset + column)
            store(scores, row, column, score)
        largest = maximum(score, largest)
    return largest_of(largest)


@inlined
def raise_tops(largest, tops, rescales, is_first):
    """Write the largest score of each query, and the factor of its earlier sums.

    Args:
        largest: `[1, 16]`, the largest scores of a block of keys.
        tops: `[1, 16]`, the largest scores of the blocks before it.
        rescales: `[1, 16]`, gets the factors.
    """
    top = load(largest, 0, 0)
    if not is_first:
        before = load(tops, 0, 0)
        top = maximum(top, before)
        store(rescales, 0, 0, exp(before - top))
    store(tops, 0, 0, top)


@inlined
def weigh(scores, row, count, top, rescale, totals, context, is_first, factors):
    """Write the weights of a query's scores.

    Args:
        top: the largest score so far.
        rescale: factor of the sums until now, in every lane: their largest score was smaller.
        factors: gets the weights, which are rounded if it is bf16; may be `scores`.
    """
    total = splat(_ZERO)
    for column in range(0, count, LANES):
        below = load(scores, row, column) - splat(top)
        weights = short_exp(below) if factors.itemsize == 2 else exp(below)
        total = total + store_factors(factors, row, column, weights)
    if has_tiles(factors):
        last = (count + LANES - 1) // LANES * LANES
        if last % TILE_TOKENS:
            store_factors(factors, row, last, splat(_ZERO))
    if not is_first:
        total = multiply_add(load(totals, row, 0), rescale, total)
        for feature in range(0, context.shape[1], LANES):
            store(context, row, feature, load(context, row, feature) * rescale)
    store(totals, row, 0, total)


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
        top[0, row] = LOWEST
        store(totals, row, 0, splat(_ONE))


@inlined
def clear_unread(context, totals, top, count):
    """Clear the context of queries that may read no key, given their largest scores."""
    for row in range(count):
        # scores of NaN leave the largest one low too, but their weights are 0
        if top[0, row] < _READS_NOTHING and sum_of(load(totals, row, 0)) > 0:
            clear_rows(context, row, row + 1)


@inlined
def copy_distances(tables, column, head_dim, lanes, distances):
    """Write one head of both tables as panels of 16 distances.

    Args:
        tables: see `make_distances`.
        column: first feature of the head.
        lanes: 16 rows, overwritten.
        distances: result of `make_distances`.
    """
    rows, keys, queries = tables
    _copy_table(keys, rows, column, head_dim, 1, lanes, distances[0])
    _copy_table(queries, rows, column, head_dim, -1, lanes, distances[1])


@inlined
def _copy_table(table, rows, column, head_dim, direction, lanes, panels):
    """Write one head of a table as panels; distances ascend times `direction`."""
    count = num_panels(panels, lanes.shape[1])
    reach = rows.shape[0] // 2
    for panel in range(count):
        for lane in range(LANES):
            distance = direction * ((panel - count // 2) * LANES + lane)
            row = rows[min(max(distance, -reach), reach) + reach]
            copy_head(table, row, column, head_dim, lanes, lane)
        write_panel(lanes, panels, panel)


@inlined
def write_distance_scores(scores, queries, count, tile, key_rows, keys, block, distances):
    """Write what distances add to the scores of some queries and keys, not scaled.

    Args:
        scores: `[16, keys]`.
        queries: `count` rows from the sequence's query `tile` on, then zeros.
        key_rows: keys of the sequence; `keys` of them are read, from `block` on.
        distances: result of `make_distances`.
    """
    key_panels, query_panels, by_query, by_query_shifted, by_key, by_key_shifted, square = distances
    width = queries.shape[1]
    apart, rows = LANES * width, (count + ROWS - 1) // ROWS * ROWS
    if key_panels.shape[0]:
        # from the distance of the first key to the last query
        first = (block - tile) // LANES - 1 + num_panels(key_panels, width) // 2
        row = first_row(key_panels, first, width)
        multiply(by_query, rows, keys + LANES, queries, width, key_panels, row, apart, _ONE, True)
    for column in range(0, keys, LANES):
        if query_panels.shape[0]:
            group = key_rows[block + column : block + column + LANES]
            first = (tile - block - column) // LANES - 1 + num_panels(query_panels, width) // 2
            row = first_row(query_panels, first, width)
            multiply(by_key, LANES, 2 * LANES, group, width, query_panels, row, apart, _ONE, True)
            transpose(by_key_shifted, LANES, square, 0)
        for row in range(rows):
            total = splat(_ZERO)
            if query_panels.shape[0]:
                total = load(square, row, 0)
            if key_panels.shape[0]:
                total = total + load(by_query_shifted, row, column + LANES)
            store(scores, row, column, total)


@inlined
def _table_bytes(table, longest, width, number_bytes):
    """Return the size of the panels of a table."""
    panels = 2 * ((longest + LANES - 1) // LANES)
    return number_bytes * LANES * panels * width if len(table) else 0


@inlined
def distance_bytes(tables, longest, width, queries, keys, like):
    """Return the size of the memory of `make_distances`."""
    _, key_table, query_table = tables
    number_bytes = factor_matrix(like, 0, 0, 0).itemsize
    panels = _table_bytes(key_table, longest, width, number_bytes)
    panels += _table_bytes(query_table, longest, width, number_bytes)
    products = aligned(4 * queries * (keys + LANES)) + 4 * LANES * 2 * LANES
    return panels + products + 4 * LANES * LANES


@inlined_view
def make_distances(memory, tables, longest, width, queries, keys, like):
    """Return panels of distances, and room for the products with them.

    Args:
        memory: address of memory of the size `distance_bytes`.
        tables: the row of each distance, `[2 * reach + 1]`, and keys and queries of distances,
            `[rows, num_heads * head_dim]` or no rows.
        longest: tokens of the longest sequence.
        width: numbers of a row of factors.
        like: has numbers of the factors, see `factor_matrix`.

    Returns:
        Panels of the keys of distances, ascending, and of their queries, descending, with 0 in the middle; the
        products of queries and the products of 16 keys, each again as a matrix one column narrower; and a square.
    """
    _, key_table, query_table = tables
    panels = 2 * ((longest + LANES - 1) // LANES)
    key_panels = panel_matrix(memory, panels if len(key_table) else 0, width, like)
    memory += _table_bytes(key_table, longest, width, key_panels.itemsize)
    query_panels = panel_matrix(memory, panels if len(query_table) else 0, width, like)
    by_query = memory + _table_bytes(query_table, longest, width, key_panels.itemsize)
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
