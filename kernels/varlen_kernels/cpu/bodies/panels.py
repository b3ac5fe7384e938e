"""Linear layers with what follows them, compiled by numba.

A panel is some neighbouring features of a weight, row after row, so that a product reads it from one end to the other:
few rows are multiplied as fast as memory delivers the weight. A tile is up to 6 rows by the features of a panel; its
sums stay in registers. Each sum adds its products in the order of the hidden features, whatever the tile. A weight may
also be a plain matrix; a tile then has some of its columns.

Many tokens are multiplied in blocks whose rows stay in the second-level cache while each panel passes; few tokens are
split over cores by panels. Bias and activation are added to a tile while it is in the first-level cache.

Rows are fp32, and bf16 is widened when it is loaded. Where the CPU multiplies pairs of bf16 numbers (AVX-512 BF16),
rows of a bf16 weight are bf16 instead: an instruction adds two products to each of 16 sums in fp32. With AMX a tile has
up to 16 rows, and two tiles share each half of a panel.
"""

from collections.abc import Sequence
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.bodies.epilogues import activate_vector, load_within, store_within
from varlen_kernels.cpu.bodies.panel_layout import (
    HAS_PAIRS,
    PANEL_FEATURES,
    PANEL_VECTORS,
    TILE_ROWS,
)
from varlen_kernels.cpu.native.lanes import (
    element_address,
    fetch_early,
    fetch_line,
    fetch_to_write,
    load,
    moved,
    repeated,
    row_bytes,
    splat,
    store,
)
from varlen_kernels.cpu.native.native import (
    aligned,
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.cpu.native.tiles import (
    HAS_TILES,
    ROW_BYTES,
    ROWS,
    VECTORS,
    add_product,
    clear_sums,
    configure_tiles,
    end_product,
    release_tiles,
    side_by_side,
)
from varlen_kernels.functions import BLOCK, NO_ACTIVATION

# Hidden features of a turn of the loop, and hidden features from a load to what is fetched into the cache for later.
_UNROLLED = 4
_FETCHED_AHEAD = 16
# In steps of tiles.
_STEPS_AHEAD = 2

_BYTE, _HALF, _INT, _SIZE = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_FLOATS, _INTS, _HALVES = (ir.VectorType(each, LANES) for each in (_FLOAT, _INT, _HALF))
_ZERO = np.float32(0)
_PAIR_PRODUCTS = "llvm.x86.avx512bf16.dpbf16ps.512"


class Tile:
    """Writes the instructions of a product of some rows with some vectors of a matrix.

    Attributes:
        totals: the address of each sum, by row.
    """

    def __init__(
        self,
        builder: Any,
        rows: Sequence[Any],
        weights: Any,
        hidden: Any,
        sums: Sequence[Sequence[Any]],
        *,
        widths: tuple[int, int],
        row_bytes: Any,
        vector_bytes: Any,
        unrolled: int = _UNROLLED,
        is_fetched: bool = True,
    ) -> None:
        """Multiply.

        Args:
            weights: address of the first vector of the matrix.
            sums: numbers to which products are added, by row.
            widths: bytes of a number of a row, and of the matrix. If both have 2 the matrix holds pairs, where the CPU
                multiplies them.
            row_bytes: distance from one hidden feature or pair of the matrix to the next one.
            vector_bytes: distance from one vector to the next one.
            unrolled: hidden features of a turn of the loop.
            is_fetched: whether weights are fetched into the cache ahead.
        """
        self._builder, self._rows, self._panel, self._hidden = builder, rows, weights, hidden
        self._row_width, self._width = widths
        self._depth = 2 if HAS_PAIRS and self._row_width == 2 else 1
        self._row_bytes, self._vector_bytes = row_bytes, vector_bytes
        self._vectors, self._unrolled, self._is_fetched = len(sums[0]), unrolled, is_fetched
        self.totals = [[cgutils.alloca_once(builder, _FLOATS) for _ in each] for each in sums]
        for of_row, given in zip(self.totals, sums, strict=True):
            for total, begin in zip(of_row, given, strict=True):
                builder.store(begin, total)
        self._multiply()

    def _multiply(self) -> None:
        builder, unrolled = self._builder, _SIZE(self._unrolled)
        depth = _SIZE(self._depth)
        places = builder.udiv(self._hidden, depth)
        turns = builder.udiv(places, unrolled)
        with cgutils.for_range(builder, turns) as loop:
            first = builder.mul(loop.index, unrolled)
            for i in range(self._unrolled):
                self._add_products(builder.add(first, _SIZE(i)))
        if self._unrolled > 1:
            done = builder.mul(turns, unrolled)
            with cgutils.for_range(builder, builder.sub(places, done)) as loop:
                self._add_products(builder.add(done, loop.index))
        if self._depth > 1:
            # the last feature of an odd number
            with builder.if_then(
                builder.icmp_unsigned("!=", self._hidden, builder.mul(places, depth))
            ):
                self._add_products(places, is_last=True)

    def _add_products(self, place: Any, *, is_last: bool = False) -> None:
        """Add the products with a row or a pair of rows of the panel.

        Args:
            place: number of the row, or of the pair.
            is_last: whether it is half a pair.
        """
        builder = self._builder
        weights = moved(builder, self._panel, builder.mul(place, self._row_bytes), _BYTE)
        ahead = builder.mul(self._row_bytes, _SIZE(_FETCHED_AHEAD))
        factors = []
        for i in range(self._vectors):
            offset = builder.mul(self._vector_bytes, _SIZE(i))
            if self._is_fetched:
                fetch_line(builder, moved(builder, weights, builder.add(ahead, offset), _BYTE))
            factors.append(self._weights(moved(builder, weights, offset, _BYTE)))
        for row, of_row in zip(self._rows, self.totals, strict=True):
            number = self._number(
                builder.mul(place, _SIZE(self._row_width * self._depth)), row, is_last
            )
            numbers = repeated(builder, number)
            for factor, total in zip(factors, of_row, strict=True):
                builder.store(self._added(builder.load(total), numbers, factor), total)

    def _number(self, offset: Any, row: Any, is_last: bool) -> Any:
        """Return a number of a row, or a pair of bf16 numbers as 32 bits."""
        builder = self._builder
        if self._depth == 1:
            return builder.load(moved(builder, row, offset, _FLOAT))
        if is_last:
            return builder.zext(builder.load(moved(builder, row, offset, _HALF), align=2), _INT)
        return builder.load(moved(builder, row, offset, _INT), align=2)

    def _added(self, total: Any, numbers: Any, factors: Any) -> Any:
        """Return sums plus products."""
        builder = self._builder
        if self._depth == 1:
            kind, name = ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fmuladd.v{LANES}f32"
            multiply_add = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(multiply_add, (numbers, factors, total))
        # LLVM reads the vectors of 32 bits, which old versions have, as pairs of bf16
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _INTS, _INTS])
        add_pairs = cgutils.get_or_insert_function(builder.module, kind, _PAIR_PRODUCTS)
        return builder.call(add_pairs, (total, numbers, factors))

    def _weights(self, address: Any) -> Any:
        """Return a vector of the panel in fp32, or of its pairs."""
        builder = self._builder
        if self._depth > 1:
            return builder.load(builder.bitcast(address, _INTS.as_pointer()), align=4)
        if self._width == 4:
            return builder.load(builder.bitcast(address, _FLOATS.as_pointer()), align=4)
        halves = builder.load(builder.bitcast(address, _HALVES.as_pointer()), align=2)
        wide = builder.shl(builder.zext(halves, _INTS), _INTS([16] * LANES))
        return builder.bitcast(wide, _FLOATS)


def _product_of(rows: int, vectors: int, *, of_columns: bool) -> Any:
    """Return a function that writes the products of `rows` rows; see `_products`."""

    @numba.extending.intrinsic
    def multiply(_context, x, _row, weight, _begin, _column, sums):
        def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
            from_x, row, from_weight, begin, column, to_sums = values
            x_type, weight_type, sums_type = (declared.args[i] for i in (0, 2, 5))
            zero = _SIZE(0)

            def row_of(array_type: Any, array: Any, number: Any) -> Any:
                return element_address(context, builder, array_type, array, number, zero)

            widths = x_type.dtype.bitwidth // 8, weight_type.dtype.bitwidth // 8
            vector_bytes = LANES * widths[1] * (2 if HAS_PAIRS and widths[0] == 2 else 1)
            weight_bytes = _SIZE(vectors * vector_bytes)
            if of_columns:
                weight_bytes = row_bytes(context, builder, weight_type, from_weight)
            shape = context.make_array(x_type)(context, builder, from_x).shape
            places = [_SIZE(i) for i in range(rows)]
            tile = Tile(
                builder,
                [row_of(x_type, from_x, builder.add(row, place)) for place in places],
                element_address(context, builder, weight_type, from_weight, begin, column),
                cgutils.unpack_tuple(builder, shape, 2)[1],
                [[_FLOATS(None)] * vectors] * rows,
                widths=widths,
                row_bytes=weight_bytes,
                vector_bytes=_SIZE(vector_bytes),
            )
            for place, of_row in zip(places, tile.totals, strict=True):
                address = row_of(sums_type, to_sums, place)
                for i, total in enumerate(of_row):
                    lanes = moved(builder, address, _SIZE(4 * LANES * i), _FLOATS)
                    builder.store(builder.load(total), lanes, align=4)
            return context.get_dummy_value()

        return types.none(x, types.int64, weight, types.int64, types.int64, sums), generate

    return multiply


def _products(vectors: int, *, of_columns: bool) -> Any:
    """Return a function that writes the products of up to TILE_ROWS rows.

    Args:
        vectors: vectors of a panel's row, or of the columns.
        of_columns: whether the weight is a plain matrix.
    """
    one, two, three, four, five, six = (
        _product_of(rows, vectors, of_columns=of_columns) for rows in range(1, TILE_ROWS + 1)
    )

    @inlined
    def multiply(rows, x, row, weight, begin, column, sums):
        if rows == 6:
            six(x, row, weight, begin, column, sums)
        elif rows == 5:
            five(x, row, weight, begin, column, sums)
        elif rows == 4:
            four(x, row, weight, begin, column, sums)
        elif rows == 3:
            three(x, row, weight, begin, column, sums)
        elif rows == 2:
            two(x, row, weight, begin, column, sums)
        else:
            one(x, row, weight, begin, column, sums)

    return multiply


_multiply_panel = _products(PANEL_VECTORS, of_columns=False)
# multiply_vector(rows, x, row, weight, begin, column, sums) writes the products of some rows, fp32 from `row` on, with
# LANES columns of the rows of a plain matrix from `begin` on; multiply_columns, with PANEL_FEATURES columns.
multiply_vector = _products(1, of_columns=True)
multiply_columns = _products(PANEL_VECTORS, of_columns=True)


@inlined
def multiply_rows(rows, x, row, panels, panel, sums):
    """Write the products of some rows with a panel.

    Args:
        rows: number of rows, 1 to TILE_ROWS, from `row` on.
        x: `[tokens, hidden]` fp32, or bf16 as uint16 if the CPU multiplies pairs.
        panels: made by `panel_layout.pack_panels`, bf16 as uint16.
        sums: `[TILE_ROWS, PANEL_FEATURES]` fp32, the first rows are overwritten.
    """
    _multiply_panel(rows, x, row, panels, panel, 0, sums)


@inlined
def fetch_tile(out, to_row, rows, first, columns):
    """Have the memory of a tile's results in the cache when they are there."""
    for i in range(rows):
        for column in range(first, min(first + columns, out.shape[1]), LANES):
            fetch_to_write(out, to_row + i, column)


@inlined
def _finish_tile(sums, rows, panel, bias, layer, kind, out, to_row):
    """Write the results of the first rows of a tile, whose sums may be overwritten."""
    first = panel * PANEL_FEATURES
    for lane in range(0, min(PANEL_FEATURES, out.shape[1] - first), LANES):
        column = first + lane
        added = splat(_ZERO)
        if bias.shape[1]:
            added = load_within(bias, layer, column)
        if kind == NO_ACTIVATION:
            for i in range(rows):
                store_within(out, to_row + i, column, load(sums, i, lane) + added)
        else:
            for i in range(rows):
                store(sums, i, lane, load(sums, i, lane) + added)
            activate_vector(sums, rows, lane, kind, out, to_row, column)


# Rows of sums that a block needs.
SUM_ROWS = BLOCK if HAS_TILES else TILE_ROWS
# Blocks that read a panel one after another, while it is in the second-level cache.
_STRIP = 4


@numba.extending.intrinsic
def begin_tiles(_context):
    """Have zeros as sums in registers, see `add_to_tiles`."""

    def generate(context: Any, builder: Any, _declared: Any, _values: Any) -> Any:
        clear_sums(builder, VECTORS)
        return context.get_dummy_value()

    return types.none(), generate


@numba.extending.intrinsic
def end_tiles(_context, sums, _to_row, _height, _half, _is_pair):
    """Write the sums in registers, see `add_to_tiles`.

    Args:
        sums: `[rows, PANEL_FEATURES]` fp32, or int32 of codes. They begin at `_to_row`, and sums of the second tile
            `_height` rows later.
    """

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        to_sums, to_row, height, half, is_pair = values
        distance = row_bytes(context, builder, declared.args[0], to_sums)
        first = element_address(context, builder, declared.args[0], to_sums, to_row, _SIZE(0))
        with builder.if_else(is_pair) as (then, otherwise):
            with then:
                begin = moved(builder, first, builder.mul(half, _SIZE(2 * ROW_BYTES)), _BYTE)
                second = moved(builder, begin, builder.mul(height, distance), _BYTE)
                pair = [*side_by_side(builder, begin, 2), *side_by_side(builder, second, 2)]
                end_product(builder, pair, distance)
            with otherwise:
                end_product(builder, side_by_side(builder, first, VECTORS), distance)
        return context.get_dummy_value()

    return types.none(sums, *[types.int64] * 3, types.boolean), generate


@numba.extending.intrinsic
def add_to_tiles(_context, x, _row, _second, _column, panels, _panel, _step, _half, _is_pair):
    """Add the products of one tile with a step, or of two with half.

    Args:
        x: bf16 as uint16, or codes. A tile has the rows from `_row` on, the second one from `_second` on.
        _column: first column of step 0.
        panels: pairs or fours of numbers side by side.
    """

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        from_x, row, second, column, from_panels, panel, step, half, is_pair = values
        width, weight_width = (declared.args[i].dtype.bitwidth // 8 for i in (0, 4))
        weight_bytes = VECTORS * ROW_BYTES
        columns = builder.add(column, builder.mul(step, _SIZE(ROW_BYTES // width)))
        numbers = builder.mul(step, _SIZE(ROWS * weight_bytes // weight_width))

        def place(number: int, array: Any, first: Any, column: Any) -> Any:
            return element_address(context, builder, declared.args[number], array, first, column)

        def multiply(rows: Sequence[Any], first: Any, count: int) -> None:
            add_product(
                builder,
                width,
                rows=[place(0, from_x, each, columns) for each in rows],
                row_bytes=row_bytes(context, builder, declared.args[0], from_x),
                weights=side_by_side(builder, first, count),
                weight_bytes=_SIZE(weight_bytes),
            )

        weights = place(4, from_panels, panel, numbers)
        with builder.if_else(is_pair) as (then, otherwise):
            with then:
                skipped = builder.mul(half, _SIZE(2 * ROW_BYTES))
                multiply((row, second), moved(builder, weights, skipped, _BYTE), 2)
            with otherwise:
                multiply((row,), weights, VECTORS)
        return context.get_dummy_value()

    whole = types.int64
    arguments = x, *[whole] * 3, panels, *[whole] * 3, types.boolean
    return types.none(*arguments), generate


@inlined
def multiply_tile(x, row, column, panels, panel, steps, sums, to_row):
    """Write the products of a tile with the first steps of a panel, see `add_to_tiles`."""
    begin_tiles()
    for i in range(steps):
        add_to_tiles(x, row, row, column, panels, panel, i, 0, False)
    end_tiles(sums, to_row, 0, 0, False)


@inlined
def tiles_of(count):
    """Return how many tiles some rows have, and the rows of each.

    All have the same height, as registers have: the last one begins where rows enough are left.
    """
    tiles = (count + ROWS - 1) // ROWS
    return tiles, (count + tiles - 1) // tiles


@inlined
def fetch_step(panels, panel, step, tiles, half):
    """Fetch a later step of the panels: one or two tiles wait for memory."""
    if tiles <= 2 and half == 0:
        numbers = ROWS * VECTORS * ROW_BYTES // panels.itemsize
        begin = (step + _STEPS_AHEAD) * numbers
        for place in range(begin, begin + numbers, ROW_BYTES // panels.itemsize):
            fetch_early(panels, panel, place)


@inlined
def place_of(unit, panels, blocks):
    """Return the block and the panel of a unit.

    The blocks of a strip read a panel before any of them reads the next one.
    """
    first = unit // (_STRIP * panels) * _STRIP
    some = min(_STRIP, blocks - first)
    place = unit - first * panels
    return first + place % some, place // some


@inlined
def _fills_tiles(x):
    """Return whether rows are whole tiles of bf16 numbers."""
    return HAS_TILES and x.itemsize == 2 and x.shape[1] * x.itemsize % ROW_BYTES == 0


@inlined
def _multiply_in_tiles(first, last, panel, x, panels, begin_panel, bias, layer, kind, sums, out):
    """Write a panel's features of up to a block of tokens; see `multiply_block`.

    The tiles have the height of `tiles_of`.
    """
    count, steps = last - first, x.shape[1] * x.itemsize // ROW_BYTES
    tiles, height = tiles_of(count)
    for tile in range(0, tiles, 2):
        to, halves = tile * height, min(2, tiles - tile)
        row, second = min(to, count - height), min(to + height, count - height)
        rows = min(halves * height, count - to)
        fetch_tile(out, first + to, rows, panel * PANEL_FEATURES, PANEL_FEATURES)
        for half in range(halves):
            begin_tiles()
            for step in range(steps):
                place = begin_panel + panel, step, half, halves == 2
                fetch_step(panels, begin_panel + panel, step, tiles, half)
                add_to_tiles(x, first + row, first + second, 0, panels, *place)
            end_tiles(sums, to, height, half, halves == 2)
        for half in range(halves):
            # rows of the tile before are not written twice
            begin = to + half * height
            skipped = begin - min(begin, count - height)
            new, rows = sums[begin + skipped :], height - skipped
            _finish_tile(new, rows, panel, bias, layer, kind, out, first + begin)


@inlined
def multiply_block(
    first, last, first_panel, last_panel, x, wide, panels, bias, layer, kind, sums, out
):
    """Write some features of up to a block of tokens.

    Args:
        first_panel, last_panel: bounds of its panels in the layer.
        panels, bias: panels and biases of layers of one size, one after another.
    """
    begin_panel = layer * ((out.shape[1] + PANEL_FEATURES - 1) // PANEL_FEATURES)
    if _fills_tiles(x):
        configure_tiles(tiles_of(last - first)[1])
        for panel in range(first_panel, last_panel):
            place = first, last, panel, x, panels, begin_panel
            _multiply_in_tiles(*place, bias, layer, kind, sums, out)
        release_tiles()
        return
    count = last - first
    tiles = (count + TILE_ROWS - 1) // TILE_ROWS
    is_ready = wide.shape[1] == 0
    if not is_ready:
        for i in range(count):
            for column in range(0, x.shape[1], LANES):
                store_within(wide, i, column, load_within(x, first + i, column))
    for panel in range(first_panel, last_panel):
        # tiles of about the same height: a low one takes as long as one of four rows
        for tile in range(tiles):
            begin, end = count * tile // tiles, count * (tile + 1) // tiles
            if is_ready:
                multiply_rows(end - begin, x, first + begin, panels, begin_panel + panel, sums)
            else:
                multiply_rows(end - begin, wide, begin, panels, begin_panel + panel, sums)
            _finish_tile(sums, end - begin, panel, bias, layer, kind, out, first + begin)


@inlined_body
def multiply(
    first_unit,
    last_unit,
    x,  # [tokens, hidden]
    panels,  # see panel_layout.pack_panels
    bias,  # [1, features], or [1, 0] for none
    kind,
    out,  # [tokens, features]
):
    """Write the results of some units, by block; return whether memory ran out."""
    wide_features = 0 if x.itemsize == 4 or HAS_PAIRS else x.shape[1]
    sum_bytes = aligned(4 * SUM_ROWS * PANEL_FEATURES)
    memory = new_memory(sum_bytes + 4 * BLOCK * wide_features)
    if memory == 0:
        return 1
    sums = fp32_matrix(memory, SUM_ROWS, PANEL_FEATURES)
    wide = fp32_matrix(memory + sum_bytes, BLOCK, wide_features)
    unit = first_unit
    if _fills_tiles(x):
        blocks, configured = (len(x) + BLOCK - 1) // BLOCK, 0
        while unit < last_unit:
            block, panel = place_of(unit, len(panels), blocks)
            first, last = block * BLOCK, min(block * BLOCK + BLOCK, len(x))
            height = tiles_of(last - first)[1]
            if height != configured:
                configure_tiles(height)
                configured = height
            place = first, last, panel, x, panels, 0
            _multiply_in_tiles(*place, bias, 0, kind, sums, out)
            unit += 1
        release_tiles()
    while unit < last_unit:
        block, panel = unit // len(panels), unit % len(panels)
        count = min(len(panels) - panel, last_unit - unit)
        first = block * BLOCK
        multiply_block(
            first,
            min(first + BLOCK, len(x)),
            panel,
            panel + count,
            x,
            wide,
            panels,
            bias,
            0,
            kind,
            sums,
            out,
        )
        unit += count
    free_memory(memory)
    return 0
