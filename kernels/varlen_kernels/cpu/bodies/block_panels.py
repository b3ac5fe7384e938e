"""Linear layers whose weights are codes of 4 bits in blocks, compiled by numba.

The inputs of a block have a scale and an offset for each feature, as the checkpoint has them: nothing is rounded but
sums. A tile is up to 6 rows by the features of a panel. Its sums over a block stay in registers while codes become
fp32 numbers, or pairs of bf16 ones where the CPU multiplies these; then they are scaled, and the offset is multiplied
by the sum of the inputs, once for each block. A word of 32 bits has eight codes of a feature, whose inputs are
neighbours, and the codes of even inputs are in its lower half: so a shift and a look-up make a vector of pairs.

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
    CODES,
    HAS_PAIRS,
    PANEL_FEATURES,
    PANEL_VECTORS,
    TILE_ROWS,
    shift_of,
)
from varlen_kernels.cpu.native.lanes import element_address, load, moved, splat, store, sum_of
from varlen_kernels.cpu.native.native import (
    aligned,
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.op_table import BLOCK

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
# What code 0 stands for, in scales, of a weight without zero points.
_MIDDLE = ir.Constant(_FLOATS, [-8.0] * LANES)
_ZERO = np.float32(0)


class _Tile:
    """Writes the instructions that add the products of some rows with a panel to sums."""

    def __init__(self, context: Any, builder: Any, declared: Any, values: Any, rows: int) -> None:
        self._builder = builder
        x, row, panels, panel, scales, size, x_sums, x_row, sums = values
        x_type, panels_type, scales_type, x_sums_type = (declared.args[i] for i in (0, 2, 4, 6))
        # bytes of a number of a row, and inputs that are multiplied at a time
        self._width = x_type.dtype.bitwidth // 8
        self._depth = 2 if HAS_PAIRS and self._width == 2 else 1

        def rows_of(kind: Any, array: Any, first: Any, count: int = rows) -> list[Any]:
            places = [builder.add(first, _SIZE(i)) for i in range(count)]
            return [element_address(context, builder, kind, array, i, _SIZE(0)) for i in places]

        def columns_of(kind: Any, array: Any) -> Any:
            shape = context.make_array(kind)(context, builder, array).shape
            return cgutils.unpack_tuple(builder, shape, 2)[1]

        self._rows, x_sum_rows = rows_of(x_type, x, row), rows_of(x_sums_type, x_sums, x_row)
        sum_rows = rows_of(declared.args[8], sums, _SIZE(0))
        (self._words,) = rows_of(panels_type, panels, panel, 1)
        (of_scales,) = rows_of(scales_type, scales, panel, 1)
        blocks, words = columns_of(x_sums_type, x_sums), builder.udiv(size, _SIZE(CODES))
        # of a block
        scale_bytes = builder.udiv(builder.mul(columns_of(scales_type, scales), _SIZE(4)), blocks)
        self._totals = [
            [cgutils.alloca_once(builder, _FLOATS) for _ in range(PANEL_VECTORS)]
            for _ in range(rows)
        ]
        with cgutils.for_range(builder, blocks) as block:
            for total in (each for of_row in self._totals for each in of_row):
                builder.store(ir.Constant(_FLOATS, None), total)
            first = builder.mul(block.index, words)
            with cgutils.for_range(builder, words) as word:
                self._add_products(builder.add(first, word.index))
            x_place = builder.mul(block.index, _SIZE(4))
            self._scale(
                self._at(of_scales, builder.mul(block.index, scale_bytes)),
                builder.icmp_unsigned(">", scale_bytes, _SIZE(4 * PANEL_FEATURES)),
                [
                    self._repeated(builder.load(self._at(each, x_place, _FLOAT)))
                    for each in x_sum_rows
                ],
                sum_rows,
            )

    def _add_products(self, word: Any) -> None:
        """Add the products of a word's inputs to the totals of their block."""
        builder, word_bytes = self._builder, 4 * PANEL_FEATURES
        words = self._at(self._words, builder.mul(word, _SIZE(word_bytes)))
        x_place = builder.mul(word, _SIZE(CODES * self._width))
        codes = []
        for place in range(0, word_bytes, 4 * LANES):
            self._fetch(self._at(words, _SIZE(place + _FETCHED_AHEAD)))
            codes.append(self._load(words, place, _INTS))
        for column in range(0, CODES, self._depth):
            factors = [self._factors(each, column) for each in codes]
            place = builder.add(x_place, _SIZE(column * self._width))
            for row, of_row in zip(self._rows, self._totals, strict=True):
                number = builder.load(
                    self._at(row, place, _FLOAT if self._depth == 1 else _INT), align=self._width
                )
                for factor, total in zip(factors, of_row, strict=True):
                    added = self._added(builder.load(total), self._repeated(number), factor)
                    builder.store(added, total)

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

    def _scale(
        self, scales: Any, has_offsets: Any, x_sums: Sequence[Any], sum_rows: Sequence[Any]
    ) -> None:
        """Add the values of a block's totals to the sums.

        Args:
            scales: address of the block's scales, which its offsets follow, if it has any.
            x_sums: sum of its inputs, by row.
        """
        builder = self._builder
        offset = cgutils.alloca_once(builder, _FLOATS)
        for i in range(PANEL_VECTORS):
            place = 4 * LANES * i
            scale = self._load(scales, place, _FLOATS)
            builder.store(builder.fmul(scale, _MIDDLE), offset)
            with builder.if_then(has_offsets):
                builder.store(self._load(scales, place + 4 * PANEL_FEATURES, _FLOATS), offset)
            offsets = builder.load(offset)
            for row, x_sum, of_row in zip(sum_rows, x_sums, self._totals, strict=True):
                value = self._call(_ADD_PRODUCTS, x_sum, offsets, self._load(row, place, _FLOATS))
                value = self._call(_ADD_PRODUCTS, builder.load(of_row[i]), scale, value)
                builder.store(value, self._at(row, _SIZE(place), _FLOATS), align=4)

    def _at(self, address: Any, offset: Any, kind: Any = _BYTE) -> Any:
        return moved(self._builder, address, offset, kind)

    def _load(self, address: Any, offset: int, kind: Any) -> Any:
        return self._builder.load(self._at(address, _SIZE(offset), kind), align=4)

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


def _product_of(rows: int) -> Any:
    """Return a function that adds the products of some rows to sums; see `_multiply_rows`."""

    @numba.extending.intrinsic
    def multiply(_context, x, _row, panels, _panel, scales, _size, x_sums, _x_row, sums):
        def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
            _Tile(context, builder, declared, values, rows)
            return context.get_dummy_value()

        whole = types.int64
        arguments = (x, whole, panels, whole, scales, whole, x_sums, whole, sums)
        return types.none(*arguments), generate

    return multiply


_one, _two, _three, _four, _five, _six = map(_product_of, range(1, TILE_ROWS + 1))


@inlined
def _multiply_rows(rows, x, row, panels, panel, scales, size, x_sums, x_row, sums):
    """Add the products of some rows with a panel to sums.

    Args:
        rows: number of rows, 1 to TILE_ROWS, from `row` on.
        x: `[tokens, hidden]` fp32, or bf16 as uint16 if the CPU multiplies pairs.
        panels, scales, size: see `panel_layout.BlockWeight`.
        x_sums: `[tokens, blocks]` fp32, sums of inputs; the rows have theirs from `x_row` on.
        sums: `[TILE_ROWS, PANEL_FEATURES]` fp32.
    """
    if rows == 6:
        _six(x, row, panels, panel, scales, size, x_sums, x_row, sums)
    elif rows == 5:
        _five(x, row, panels, panel, scales, size, x_sums, x_row, sums)
    elif rows == 4:
        _four(x, row, panels, panel, scales, size, x_sums, x_row, sums)
    elif rows == 3:
        _three(x, row, panels, panel, scales, size, x_sums, x_row, sums)
    elif rows == 2:
        _two(x, row, panels, panel, scales, size, x_sums, x_row, sums)
    else:
        _one(x, row, panels, panel, scales, size, x_sums, x_row, sums)


@inlined
def _read_rows(x, first, count, size, x_sums, wide):
    """Write the sums of blocks of rows; the rows in fp32 if `wide` has columns."""
    for i in range(count):
        for block in range(x_sums.shape[1]):
            total = splat(_ZERO)
            for column in range(block * size, (block + 1) * size, LANES):
                value = load(x, first + i, column)
                total = total + value
                if wide.shape[1]:
                    store(wide, i, column, value)
            x_sums[i, block] = sum_of(total)


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
    wide_features = 0 if x.itemsize == 4 or HAS_PAIRS else x.shape[1]
    blocks = x.shape[1] // size
    sum_bytes, x_bytes = aligned(4 * TILE_ROWS * PANEL_FEATURES), aligned(4 * BLOCK * blocks)
    memory = new_memory(sum_bytes + x_bytes + 4 * BLOCK * wide_features)
    if memory == 0:
        return 1
    sums = fp32_matrix(memory, TILE_ROWS, PANEL_FEATURES)
    x_sums = fp32_matrix(memory + sum_bytes, BLOCK, blocks)
    wide = fp32_matrix(memory + sum_bytes + x_bytes, BLOCK, wide_features)
    unit = first_unit
    while unit < last_unit:
        first, panel = unit // len(panels) * BLOCK, unit % len(panels)
        panel_end = min(len(panels), panel + last_unit - unit)
        unit += panel_end - panel
        count = min(BLOCK, len(x) - first)
        _read_rows(x, first, count, size, x_sums, wide)
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
                if wide_features:
                    _multiply_rows(
                        rows, wide, begin, panels, panel, scales, size, x_sums, begin, sums
                    )
                else:
                    _multiply_rows(rows, x, row, panels, panel, scales, size, x_sums, begin, sums)
                for lane in range(0, min(PANEL_FEATURES, out.shape[1] - column), LANES):
                    for i in range(rows):
                        store_within(out, row + i, column + lane, load(sums, i, lane))
            panel += 1
    free_memory(memory)
    return 0
