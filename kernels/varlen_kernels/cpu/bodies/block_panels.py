"""Linear layers whose weights are codes of 4 bits in blocks, compiled by numba.

The inputs of a block have a scale and an offset for each feature, as the checkpoint has them: nothing is rounded but
sums. A tile is up to 6 rows by the features of a panel. Its sums over a block stay in registers while codes become
fp32 numbers, or pairs of bf16 ones where the CPU multiplies these; then they are scaled, and the offset is multiplied
by the sum of the inputs, once for each block. A word of 32 bits has eight codes of a feature, whose inputs are
neighbours, and the codes of even inputs are in its lower half: so a shift and a look-up make a vector of pairs.

Source: a group of weights with a scale, Frantar et al. 2022, arXiv:2210.17323.
"""

from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.bodies.epilogues import load_within, store_within
from varlen_kernels.cpu.bodies.panel_layout import (
    CODES,
    HAS_PAIRS,
    PANEL_FEATURES,
    PANEL_VECTORS,
    TILE_ROWS,
    shift_of,
)
from varlen_kernels.cpu.native.lanes import (
    element_address,
    load,
    moved,
    multiply_add,
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
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.functions import BLOCK

# Bytes from a word to what is fetched into the cache for later.
_FETCHED_AHEAD = 2048

_BYTE, _HALF, _INT, _SIZE = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_FLOATS, _INTS = (ir.VectorType(each, LANES) for each in (_FLOAT, _INT))
_HALVES = ir.VectorType(_HALF, 2 * LANES)
_ADD_PRODUCTS = f"llvm.fmuladd.v{LANES}f32"
_ADD_PAIRS, _LOOK_UP = "llvm.x86.avx512bf16.dpbf16ps.512", "llvm.x86.avx512.permvar.hi.512"
# The codes as bf16 numbers, twice: the instruction reads 5 bits of an index.
_NUMBERS = ir.Constant(
    _HALVES, 2 * [int(each) >> 16 for each in np.arange(16, dtype=np.float32).view(np.uint32)]
)
# Value of code 0 in scales, of a weight without zero points.
_ZERO, _MIDDLE = np.float32(0), np.float32(-8)


class _Tile:
    """Writes the instructions of a product of some rows with a block of a panel."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any, rows: int) -> None:
        self._builder = builder
        x, row, column, panels, panel, place, words, sums = values
        # bytes of a number of a row, and inputs that are multiplied at a time
        self._width = kinds[0].dtype.bitwidth // 8
        self._depth = 2 if HAS_PAIRS and self._width == 2 else 1

        def address(kind: Any, array: Any, first: Any, i: int, of_column: Any) -> Any:
            at = builder.add(first, _SIZE(i))
            return element_address(context, builder, kind, array, at, of_column)

        self._rows = [address(kinds[0], x, row, i, column) for i in range(rows)]
        self._words = address(kinds[3], panels, panel, 0, place)
        self._totals = [
            [cgutils.alloca_once(builder, _FLOATS) for _ in range(PANEL_VECTORS)]
            for _ in range(rows)
        ]
        for total in (each for of_row in self._totals for each in of_row):
            builder.store(ir.Constant(_FLOATS, None), total)
        with cgutils.for_range(builder, words) as word:
            self._add_products(word.index)
        for i, of_row in enumerate(self._totals):
            to = address(kinds[7], sums, _SIZE(0), i, _SIZE(0))
            for j, total in enumerate(of_row):
                builder.store(
                    builder.load(total), self._at(to, _SIZE(4 * LANES * j), _FLOATS), align=4
                )

    def _add_products(self, word: Any) -> None:
        """Add the products of a word's inputs."""
        builder, word_bytes = self._builder, 4 * PANEL_FEATURES
        words = self._at(self._words, builder.mul(word, _SIZE(word_bytes)))
        x_place = builder.mul(word, _SIZE(CODES * self._width))
        codes = []
        for place in range(0, word_bytes, 4 * LANES):
            self._fetch(self._at(words, _SIZE(place + _FETCHED_AHEAD)))
            codes.append(builder.load(self._at(words, _SIZE(place), _INTS), align=4))
        for column in range(0, CODES, self._depth):
            factors = [self._factors(each, column) for each in codes]
            place = builder.add(x_place, _SIZE(column * self._width))
            for row, of_row in zip(self._rows, self._totals, strict=True):
                number = self._repeated(self._number(row, place))
                for factor, total in zip(factors, of_row, strict=True):
                    builder.store(self._added(builder.load(total), number, factor), total)

    def _number(self, row: Any, place: Any) -> Any:
        """Return a number of a row in fp32, or a pair of bf16 as bits."""
        kind = _HALF if self._width == 2 and self._depth == 1 else _INT
        number = self._builder.load(self._at(row, place, kind), align=self._width)
        if kind is _HALF:
            number = self._builder.shl(self._builder.zext(number, _INT), _INT(16))
        return number if self._depth == 2 else self._builder.bitcast(number, _FLOAT)

    def _factors(self, codes: Any, column: int) -> Any:
        """Return the codes of an input as numbers, or of two as pairs of bf16."""
        builder = self._builder
        if self._depth == 1:
            shift = ir.Constant(_INTS, [shift_of(column)] * LANES)
            code = builder.and_(builder.lshr(codes, shift), ir.Constant(_INTS, [15] * LANES))
            return builder.sitofp(code, _FLOATS)
        shift = ir.Constant(_HALVES, [shift_of(column)] * 2 * LANES)
        places = builder.lshr(builder.bitcast(codes, _HALVES), shift)
        return builder.bitcast(self._call(_LOOK_UP, _NUMBERS, places), _INTS)

    def _added(self, total: Any, numbers: Any, factors: Any) -> Any:
        """Return sums plus products."""
        if self._depth == 1:
            return self._call(_ADD_PRODUCTS, numbers, factors, total)
        # LLVM reads the vectors of 32 bits, which old versions have, as pairs of bf16
        return self._call(_ADD_PAIRS, total, numbers, factors)

    def _at(self, address: Any, offset: Any, kind: Any = _BYTE) -> Any:
        return moved(self._builder, address, offset, kind)

    def _repeated(self, number: Any) -> Any:
        """Return a vector of one number."""
        empty = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        first = self._builder.insert_element(empty, number, _INT(0))
        return self._builder.shuffle_vector(first, empty, ir.Constant(_INTS, [0] * LANES))

    def _call(self, name: str, *values: Any) -> Any:
        kind = ir.FunctionType(values[0].type, [each.type for each in values])
        function = cgutils.get_or_insert_function(self._builder.module, kind, name)
        return self._builder.call(function, values)

    def _fetch(self, address: Any) -> None:
        """Have a cache line read: it is needed soon."""
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_INT] * 3])
        fetch = cgutils.get_or_insert_function(self._builder.module, kind, "llvm.prefetch.p0")
        # to read, into all levels, of data
        self._builder.call(fetch, (address, *map(_INT, (0, 3, 1))))


@numba.extending.intrinsic
def _multiply_block(_context, _rows, x, _row, _column, panels, _panel, _place, _words, sums):
    """Write the products of some rows with a block of a panel.

    Args:
        _rows: number of rows, 1 to TILE_ROWS, from `_row` on; their inputs are from `_column` on.
        x: `[tokens, hidden]` fp32, or bf16 as uint16.
        panels: see `panel_layout.BlockWeight`; the block has `_words` words of each feature from `_place` on.
        sums: `[TILE_ROWS, PANEL_FEATURES]` fp32.
    """

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        for rows in range(1, TILE_ROWS + 1):
            with builder.if_then(builder.icmp_unsigned("==", values[0], _SIZE(rows))):
                _Tile(context, builder, declared.args[1:], values[1:], rows)
        return context.get_dummy_value()

    whole = types.int64
    arguments = (whole, x, whole, whole, panels, whole, whole, whole, sums)
    return types.none(*arguments), generate


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
def _add_block(products, rows, scales, panel, x_sums, x_row, block, sums):
    """Add the values of a block's products to the sums of some rows."""
    width = scales.shape[1] // x_sums.shape[1]
    for lane in range(0, PANEL_FEATURES, LANES):
        scale = load(scales, panel, block * width + lane)
        offset = scale * splat(_MIDDLE)
        if width > PANEL_FEATURES:
            offset = load(scales, panel, block * width + PANEL_FEATURES + lane)
        for i in range(rows):
            value = multiply_add(splat(x_sums[x_row + i, block]), offset, load(sums, i, lane))
            store(sums, i, lane, multiply_add(load(products, i, lane), scale, value))


@inlined_body
def multiply_blocks(
    first_unit,
    last_unit,
    x,  # [tokens, hidden]
    panels,  # see panel_layout.pack_blocks
    scales,
    bias,  # [1, features], or [1, 0] for none
    size,  # inputs of a block
    out,  # [tokens, features]
):
    """Write the results of some units; return whether memory ran out.

    A unit is a panel of a block of tokens.
    """
    blocks, words = x.shape[1] // size, size // CODES
    sum_bytes = aligned(4 * TILE_ROWS * PANEL_FEATURES)
    memory = new_memory(2 * sum_bytes + 4 * BLOCK * blocks)
    if memory == 0:
        return 1
    sums = fp32_matrix(memory, TILE_ROWS, PANEL_FEATURES)
    products = fp32_matrix(memory + sum_bytes, TILE_ROWS, PANEL_FEATURES)
    x_sums = fp32_matrix(memory + 2 * sum_bytes, BLOCK, blocks)
    unit = first_unit
    while unit < last_unit:
        first, panel = unit // len(panels) * BLOCK, unit % len(panels)
        panel_end = min(len(panels), panel + last_unit - unit)
        unit += panel_end - panel
        count = min(BLOCK, len(x) - first)
        _sum_blocks(x, first, count, size, x_sums)
        tiles = (count + TILE_ROWS - 1) // TILE_ROWS
        while panel < panel_end:
            column = panel * PANEL_FEATURES
            for tile in range(tiles):
                # of about the same height
                begin, end = count * tile // tiles, count * (tile + 1) // tiles
                rows, row = end - begin, first + begin
                for lane in range(0, PANEL_FEATURES, LANES):
                    value = splat(_ZERO)
                    if column + lane < bias.shape[1]:
                        value = load_within(bias, 0, column + lane)
                    for i in range(rows):
                        store(sums, i, lane, value)
                for block in range(blocks):
                    place = block * words * PANEL_FEATURES
                    _multiply_block(
                        rows, x, row, block * size, panels, panel, place, words, products
                    )
                    _add_block(products, rows, scales, panel, x_sums, begin, block, sums)
                for lane in range(0, min(PANEL_FEATURES, out.shape[1] - column), LANES):
                    for i in range(rows):
                        store_within(out, row + i, column + lane, load(sums, i, lane))
            panel += 1
    free_memory(memory)
    return 0
