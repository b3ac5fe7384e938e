"""Linear layers whose weights are codes in blocks, compiled by numba.

The inputs of a block have a scale and an offset for each feature, as the checkpoint has them: nothing is rounded but
sums, and entries of a table. A tile is up to 6 rows by the features of a panel. Its sums over a block stay in registers
while codes become fp32 numbers, or pairs of bf16 ones where the CPU multiplies these; then they are scaled, and the
offset is multiplied by the sum of the inputs, once for each block. Where there are more than two tiles, the first one
writes down the numbers that codes became, and the others read them from the cache; with AMX all do.

A word of 32 bits has the codes of a feature whose inputs are neighbours, and the codes of even inputs are in its lower
half: so with 4 bits a shift and a look-up make a vector of pairs. Inputs with an order of their own are copied in that
order first.

Source: a group of weights with a scale, Frantar et al. 2022, arXiv:2210.17323.
"""

from collections.abc import Sequence
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.bodies.epilogues import load_within, store_within
from varlen_kernels.cpu.bodies.panel_layout import (
    HAS_PAIRS,
    HAS_TABLES,
    PANEL_FEATURES,
    PANEL_VECTORS,
    TILE_ROWS,
    shift_of,
)
from varlen_kernels.cpu.bodies.panels import SUM_ROWS, multiply_tile, tiles_of
from varlen_kernels.cpu.native.lanes import (
    element_address,
    fetch_line,
    load,
    moved,
    multiply_add,
    repeated,
    splat,
    store,
    sum_of,
)
from varlen_kernels.cpu.native.native import (
    aligned,
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    matrix_like,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.cpu.native.tiles import (
    HAS_TILES,
    ROW_BYTES,
    configure_tiles,
    release_tiles,
)
from varlen_kernels.functions import BLOCK

# Bits of a pair's values, and of the words of codes that were widened to them.
_WIDE = 16
# Bytes from a word to what is fetched into the cache for later.
_FETCHED_AHEAD = 2048

_BYTE, _HALF, _INT, _SIZE = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_FLOATS, _INTS = (ir.VectorType(each, LANES) for each in (_FLOAT, _INT))
_HALVES = ir.VectorType(_HALF, 2 * LANES)
_ADD_PRODUCTS = f"llvm.fmuladd.v{LANES}f32"
_ADD_PAIRS, _LOOK_UP = "llvm.x86.avx512bf16.dpbf16ps.512", "llvm.x86.avx512.permvar.{}.512"
_ZERO = np.float32(0)


def _ints(number: int) -> Any:
    return _INTS([number] * LANES)


class _Tile:
    """Writes instructions that add the product of some rows with a block."""

    def __init__(
        self, context: Any, builder: Any, kinds: Any, values: Any, rows: int, bits: int
    ) -> None:
        self._builder, self._bits = builder, bits
        x, row, panels, panel, block, size, table, self._keeps, widened = values[:9]
        scales, width, x_sums, sums, first = values[9:]
        # bytes of a number of a row, and inputs that are multiplied at a time
        self._width = kinds[0].dtype.bitwidth // 8
        self._depth = 2 if HAS_PAIRS and self._width == 2 else 1
        words = builder.udiv(size, _SIZE(32 // bits))

        def address(kind: Any, array: Any, first: Any, i: int, of_column: Any) -> Any:
            at = builder.add(first, _SIZE(i))
            return element_address(context, builder, kind, array, at, of_column)

        column = builder.mul(block, size)
        self._rows = [address(kinds[0], x, row, i, column) for i in range(rows)]
        none = _SIZE(0)
        self._widened = self._words = address(kinds[8], widened, none, 0, none)
        if bits < _WIDE:
            place = builder.mul(block, builder.mul(words, _SIZE(PANEL_FEATURES)))
            self._words = address(kinds[2], panels, panel, 0, place)
        self._numbers = self._loaded(address(kinds[6], table, none, 0, none), 0)
        if self._depth == 2:
            # the nearest bf16 numbers, twice: the instruction reads 5 bits of an index
            whole = builder.add(builder.bitcast(self._numbers, _INTS), _ints(1 << 15))
            halves = builder.trunc(builder.lshr(whole, _ints(16)), ir.VectorType(_HALF, LANES))
            places = ir.Constant(ir.VectorType(_INT, 2 * LANES), 2 * [*range(LANES)])
            self._numbers = builder.shuffle_vector(halves, halves, places)
        self._totals = [
            [cgutils.alloca_once(builder, _FLOATS) for _ in range(PANEL_VECTORS)]
            for _ in range(rows)
        ]
        for total in (each for of_row in self._totals for each in of_row):
            builder.store(_FLOATS(None), total)
        with cgutils.for_range(builder, words) as word:
            self._add_products(word.index)
        self._of_scales = address(kinds[9], scales, panel, 0, builder.mul(block, width))
        self._of_sums = [address(kinds[12], sums, first, i, none) for i in range(rows)]
        self._x_sums = [address(kinds[11], x_sums, first, i, block) for i in range(rows)]
        with builder.if_else(builder.icmp_unsigned(">", width, _SIZE(PANEL_FEATURES))) as (
            then,
            otherwise,
        ):
            with then:
                self._add_sums(has_offsets=True)
            with otherwise:
                self._add_sums(has_offsets=False)

    def _add_sums(self, *, has_offsets: bool) -> None:
        """Add offsets times sums of inputs, and scales times sums of products."""
        builder = self._builder
        for j in range(PANEL_VECTORS):
            at = 4 * LANES * j
            scale = self._loaded(self._of_scales, at)
            for to, x_sum, of_row in zip(self._of_sums, self._x_sums, self._totals, strict=True):
                value = self._loaded(to, at)
                if has_offsets:
                    offset = self._loaded(self._of_scales, at + 4 * PANEL_FEATURES)
                    inputs = repeated(builder, self._loaded(x_sum, 0, _FLOAT))
                    value = self._call(_ADD_PRODUCTS, inputs, offset, value)
                value = self._call(_ADD_PRODUCTS, builder.load(of_row[j]), scale, value)
                builder.store(value, self._at(to, _SIZE(at), _FLOATS), align=4)

    def _loaded(self, address: Any, offset: int, kind: Any = _FLOATS) -> Any:
        return self._builder.load(self._at(address, _SIZE(offset), kind), align=4)

    def _add_products(self, word: Any) -> None:
        """Add the products of a word's inputs."""
        builder, word_bytes, inputs = self._builder, 4 * PANEL_FEATURES, 32 // self._bits
        words = self._at(self._words, builder.mul(word, _SIZE(word_bytes)))
        x_place = builder.mul(word, _SIZE(inputs * self._width))
        codes = []
        for place in range(0, word_bytes, 4 * LANES):
            if self._bits < _WIDE:
                fetch_line(builder, self._at(words, _SIZE(place + _FETCHED_AHEAD)))
            codes.append(builder.load(self._at(words, _SIZE(place), _INTS), align=4))
        for column in range(0, inputs, self._depth):
            factors = [self._factors(each, column) for each in codes]
            if self._bits < _WIDE:
                with builder.if_then(self._keeps):
                    self._keep(factors, word, column)
            place = builder.add(x_place, _SIZE(column * self._width))
            for row, of_row in zip(self._rows, self._totals, strict=True):
                number = repeated(builder, self._number(row, place))
                for factor, total in zip(factors, of_row, strict=True):
                    builder.store(self._added(builder.load(total), number, factor), total)

    def _keep(self, factors: Sequence[Any], word: Any, column: int) -> None:
        """Write the values of an input, or pairs of two."""
        builder, width = self._builder, 4 * PANEL_FEATURES
        first = builder.mul(word, _SIZE(width * 32 // self._bits // self._depth))
        for i, factor in enumerate(factors):
            at = builder.add(first, _SIZE(width * column // self._depth + 4 * LANES * i))
            builder.store(factor, self._at(self._widened, at, factor.type), align=4)

    def _number(self, row: Any, place: Any) -> Any:
        """Return a number of a row in fp32, or a pair of bf16 as bits."""
        kind = _HALF if self._width == 2 and self._depth == 1 else _INT
        number = self._builder.load(self._at(row, place, kind), align=self._width)
        if kind is _HALF:
            number = self._builder.shl(self._builder.zext(number, _INT), _INT(16))
        return number if self._depth == 2 else self._builder.bitcast(number, _FLOAT)

    def _factors(self, codes: Any, column: int) -> Any:
        """Return the values of an input, or pairs of two as bf16."""
        if self._bits >= _WIDE:
            return codes if self._depth == 2 else self._builder.bitcast(codes, _FLOATS)
        builder, at = self._builder, shift_of(column, self._bits)
        if self._bits == 8 or not HAS_TABLES:
            first = self._whole(codes, at)
            if self._depth == 1:
                return first
            # no bit of a whole number of 8 bits is lost
            low = builder.lshr(builder.bitcast(first, _INTS), _ints(16))
            return builder.or_(low, builder.bitcast(self._whole(codes, at + 16), _INTS))
        if self._depth == 1:
            return self._call(_LOOK_UP.format("sf"), self._numbers, builder.lshr(codes, _ints(at)))
        shift = _HALVES([at] * 2 * LANES)
        places = builder.lshr(builder.bitcast(codes, _HALVES), shift)
        return builder.bitcast(self._call(_LOOK_UP.format("hi"), self._numbers, places), _INTS)

    def _whole(self, codes: Any, at: int) -> Any:
        """Return the codes at a bit of each word as fp32 numbers with a sign."""
        above = 32 - self._bits
        code = self._builder.shl(codes, _ints(above - at))
        return self._builder.sitofp(self._builder.ashr(code, _ints(above)), _FLOATS)

    def _added(self, total: Any, numbers: Any, factors: Any) -> Any:
        """Return sums plus products."""
        if self._depth == 1:
            return self._call(_ADD_PRODUCTS, numbers, factors, total)
        # LLVM reads the vectors of 32 bits, which old versions have, as pairs of bf16
        return self._call(_ADD_PAIRS, total, numbers, factors)

    def _at(self, address: Any, offset: Any, kind: Any = _BYTE) -> Any:
        return moved(self._builder, address, offset, kind)

    def _call(self, name: str, *values: Any) -> Any:
        kind = ir.FunctionType(values[0].type, [each.type for each in values])
        function = cgutils.get_or_insert_function(self._builder.module, kind, name)
        return self._builder.call(function, values)


@numba.extending.intrinsic
def _add_block(
    _context,
    _rows,
    _bits,
    x,
    _row,
    panels,
    _panel,
    _block,
    _size,
    table,
    _keeps,
    widened,
    scales,
    _width,
    x_sums,
    sums,
    _first,
):
    """Add the products of some rows with a block of a panel.

    Args:
        _rows: number of rows, up to TILE_ROWS, from `_row` on. With none, codes are widened only.
        _bits: bits of a code, or 0 to read the values that `widened` has.
        x: `[tokens, hidden]` fp32, or bf16 as uint16.
        _size: inputs of a block.
        _keeps: whether to write the values of the codes into `widened`, `[1, size · PANEL_FEATURES]` fp32.
        _width: columns of a block in `scales`.
        x_sums: `[rows, blocks]` fp32, the sums of the inputs of blocks, if `scales` has offsets.
        sums: `[rows, PANEL_FEATURES]` fp32. Both from row `_first` on.
    """

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        wide = _WIDE if HAS_PAIRS and x.dtype.bitwidth == _WIDE else 32
        for rows in range(TILE_ROWS + 1):
            for named, bits in ((4, 4), (8, 8), (0, wide)):
                pairs = zip(values, (rows, named), strict=False)
                is_it = [builder.icmp_unsigned("==", each, _SIZE(size)) for each, size in pairs]
                with builder.if_then(builder.and_(*is_it)):
                    _Tile(context, builder, declared.args[2:], values[2:], rows, bits)
        return context.get_dummy_value()

    whole = types.int64
    arguments = (whole, whole, x, whole, panels, whole, whole, whole, table, types.boolean)
    return types.none(*arguments, widened, scales, whole, x_sums, sums, whole), generate


@inlined
def _copy_in_order(x, first, order, copy):
    """Write the inputs of some rows in an order of their own."""
    for i in range(len(copy)):
        for column in range(len(order)):
            copy[i, column] = x[first + i, order[column]]


@inlined
def _sum_blocks(x, first, count, size, x_sums):
    """Write the sum of the inputs of each block, `[count, blocks]`."""
    for i in range(count):
        for block in range(x_sums.shape[1]):
            total = splat(_ZERO)
            for column in range(block * size, (block + 1) * size, LANES):
                total = total + load(x, first + i, column)
            x_sums[i, block] = sum_of(total)


@inlined
def _begin_sums(bias, column, count, sums):
    """Write the bias of a panel's features into some rows of sums."""
    for lane in range(0, PANEL_FEATURES, LANES):
        value = splat(_ZERO)
        if column + lane < bias.shape[1]:
            value = load_within(bias, 0, column + lane)
        for i in range(count):
            store(sums, i, lane, value)


@inlined
def _add_in_vectors(
    bits,
    x,
    first,
    count,
    panels,
    panel,
    block,
    size,
    table,
    widened,
    scales,
    width,
    x_sums,
    sums,
):
    """Add the products of `count` rows with a block; see `_add_block`."""
    tiles = (count + TILE_ROWS - 1) // TILE_ROWS
    for tile in range(tiles):
        # of about the same height
        begin, end = count * tile // tiles, count * (tile + 1) // tiles
        # the first one of many widens codes for the others
        _add_block(
            end - begin,
            bits if tile == 0 or tiles < 3 else 0,
            x,
            first + begin,
            panels,
            panel,
            block,
            size,
            table,
            tile == 0 and tiles > 2,
            widened,
            scales,
            width,
            x_sums,
            sums,
            begin,
        )


@inlined
def _add_in_tiles(x, first, count, block, size, widened, parts, scales, panel, width, x_sums, sums):
    """Add the products of rows with a widened block, by tiles of AMX.

    They have the height of `tiles_of`.

    Args:
        x: bf16 as uint16; `count` rows from `first` on.
        parts: `[SUM_ROWS, PANEL_FEATURES]` fp32, overwritten.
        block, size, widened, scales, panel, width, x_sums, sums: see `_add_block`.
    """
    steps, column = size * x.itemsize // ROW_BYTES, block * width
    tiles, height = tiles_of(count)
    for tile in range(tiles):
        to = tile * height
        row = min(to, count - height)
        multiply_tile(x, first + row, block * size, widened, 0, steps, parts, to)
        for lane in range(0, PANEL_FEATURES, LANES):
            scale = load(scales, panel, column + lane)
            # rows of the tile before are not added twice
            for i in range(to - row, height):
                value = load(sums, row + i, lane)
                if width > PANEL_FEATURES:
                    offset = load(scales, panel, column + PANEL_FEATURES + lane)
                    value = multiply_add(splat(x_sums[row + i, block]), offset, value)
                value = multiply_add(load(parts, to + i, lane), scale, value)
                store(sums, row + i, lane, value)


@inlined_body
def multiply_blocks(
    first_unit,
    last_unit,
    x,  # [tokens, hidden]
    panels,  # see panel_layout.pack_blocks
    scales,
    bias,  # [1, features], or [1, 0] for none
    order,
    table,
    size,  # inputs of a block
    bits,
    out,  # [tokens, features]
):
    """Write the results of some units; return whether memory ran out.

    A unit is a panel of a block of tokens.
    """
    hidden, height = x.shape[1], min(BLOCK, len(x))
    is_tiled = HAS_TILES and x.itemsize == 2 and size * x.itemsize % ROW_BYTES == 0
    values = size * PANEL_FEATURES if is_tiled or height > 2 * TILE_ROWS else 0
    blocks, sum_bytes = hidden // size, 4 * (SUM_ROWS + height) * PANEL_FEATURES
    x_bytes = aligned(4 * height * blocks)
    memory = new_memory(sum_bytes + 4 * values + x_bytes + 4 * height * len(order))
    if memory == 0:
        return 1
    sums = fp32_matrix(memory, height, PANEL_FEATURES)
    parts = fp32_matrix(memory + 4 * height * PANEL_FEATURES, SUM_ROWS, PANEL_FEATURES)
    widened = fp32_matrix(memory + sum_bytes, 1, values)
    x_sums = fp32_matrix(memory + sum_bytes + 4 * values, height, blocks)
    unit = first_unit
    while unit < last_unit:
        first, panel = unit // len(panels) * BLOCK, unit % len(panels)
        panel_end = min(len(panels), panel + last_unit - unit)
        unit += panel_end - panel
        count = min(BLOCK, len(x) - first)
        inputs, x_row = x, first
        if len(order) > 0:
            address = memory + sum_bytes + 4 * values + x_bytes
            inputs, x_row = matrix_like(x, address, count, hidden), 0
            _copy_in_order(x, first, order, inputs)
        if is_tiled:
            configure_tiles(tiles_of(count)[1])
        width = scales.shape[1] // blocks
        if width > PANEL_FEATURES:
            _sum_blocks(inputs, x_row, count, size, x_sums)
        while panel < panel_end:
            column = panel * PANEL_FEATURES
            _begin_sums(bias, column, count, sums)
            for block in range(blocks):
                if is_tiled:
                    codes = bits, inputs, x_row, panels, panel, block, size, table, True, widened
                    _add_block(0, *codes, scales, width, x_sums, sums, 0)
                    rows = inputs, x_row, count, block, size, widened, parts
                    _add_in_tiles(*rows, scales, panel, width, x_sums, sums)
                else:
                    rows_of = bits, inputs, x_row, count, panels, panel, block, size, table
                    _add_in_vectors(*rows_of, widened, scales, width, x_sums, sums)
            for lane in range(0, min(PANEL_FEATURES, out.shape[1] - column), LANES):
                for i in range(count):
                    store_within(out, first + i, column + lane, load(sums, i, lane))
            panel += 1
    if is_tiled:
        release_tiles()
    free_memory(memory)
    return 0
