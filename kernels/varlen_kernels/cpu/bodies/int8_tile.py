"""Products of int8 codes in registers, for functions that numba compiles.

A tile is a few rows by a panel of features, whose sums fill the registers. With VNNI it is 6 rows by 64 features: 24
vectors of sums, and what they are computed from, fill the 32 registers of AVX-512. Each instruction multiplies 64 pairs
of codes and adds fours of products to sums of 32 bits, exactly.

With AVX2 it is 4 rows by 16 features in 16 registers. An instruction multiplies 32 pairs and adds twos of products in
16 bits, which is exact for row codes of 7 bits: 2 · 127 · 127 is less than 2 ** 15. Another one adds these sums in 32
bits.

Codes of 4 bits are two in a byte, and become bytes in registers: memory gives half as many of them.
"""

from collections.abc import Sequence
from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.bodies.int8_layout import DEPTH, TILE_FEATURES, TILE_ROWS, WIDTH
from varlen_kernels.cpu.native.lanes import LANES_TYPE, element_address, moved
from varlen_kernels.cpu.native.target_cpu import LANES

_BYTE, _INT, _SIZE = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES, _INTS = ir.VectorType(_BYTE, LANES), ir.VectorType(_INT, LANES)
_DOT_PRODUCT = "llvm.x86.avx512.vpdpbusd.512"
# Of 32 codes with 32 others, in twos; and of 16 sums of 16 bits, in twos.
_PAIR_PRODUCT, _PAIR_SUM = "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"
_HALF_BYTES, _HALF_INTS = ir.VectorType(_BYTE, 32), ir.VectorType(_INT, 8)
_SHORTS = ir.VectorType(ir.IntType(16), 16)


_VECTORS = TILE_FEATURES // WIDTH
_SUMS = ir.VectorType(_INT, WIDTH)


def _multiply(count: int) -> Any:
    """Return a function for compiled code that multiplies this number of rows with a panel."""

    @numba.extending.intrinsic
    def multiply(_context, codes, _row, panels, _panel, sums):
        def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
            from_codes, row, from_panels, panel, to_sums = values
            codes_type, panels_type, sums_type = (declared.args[i] for i in (0, 2, 4))
            zero = ir.Constant(_SIZE, 0)

            def row_address(kind: Any, array: Any, first: Any, i: int) -> Any:
                place = builder.add(first, ir.Constant(_SIZE, i))
                return element_address(context, builder, kind, array, place, zero)

            rows = [row_address(codes_type, from_codes, row, i) for i in range(count)]
            weights = element_address(context, builder, panels_type, from_panels, panel, zero)
            shape = context.make_array(panels_type)(context, builder, from_panels).shape
            step_bytes = ir.Constant(_SIZE, TILE_FEATURES * DEPTH)
            steps = builder.udiv(cgutils.unpack_tuple(builder, shape, 2)[1], step_bytes)
            totals = [
                [cgutils.alloca_once(builder, _SUMS) for _ in range(_VECTORS)] for _ in range(count)
            ]
            for total in (each for of_row in totals for each in of_row):
                builder.store(ir.Constant(_SUMS, None), total)
            # of 4 bits, two in a byte
            halves = (0, 1) if panels_type.dtype == types.uint8 else ()
            with cgutils.for_range(builder, steps) as loop:
                first = builder.mul(loop.index, step_bytes)
                factors = _load_factors(builder, weights, first)
                step_columns = ir.Constant(_SIZE, DEPTH * max(1, len(halves)))
                column = builder.mul(loop.index, step_columns)
                if not halves:
                    _add_products(builder, rows, column, factors, totals)
                for half in halves:
                    codes = [_half_of_bytes(builder, factor, half) for factor in factors]
                    place = builder.add(column, ir.Constant(_SIZE, DEPTH * half))
                    _add_products(builder, rows, place, codes, totals)
            for i, of_row in enumerate(totals):
                address = row_address(sums_type, to_sums, zero, i)
                for j, total in enumerate(of_row):
                    floats = ir.VectorType(ir.FloatType(), WIDTH)
                    place = moved(builder, address, ir.Constant(_SIZE, 4 * WIDTH * j), floats)
                    builder.store(builder.sitofp(builder.load(total), floats), place, align=4)
            return context.get_dummy_value()

        arguments = (codes, types.int64, panels, types.int64, sums)
        return types.none(*arguments), generate

    return multiply


# multiply_tile(codes, row, panels, panel, sums) writes the products of TILE_ROWS rows of codes, from `row` on, with a
# panel of `pack_panels` or `pack_halves`: `[TILE_ROWS, TILE_FEATURES]` fp32. Codes are `[rows, columns]` uint8, with at
# least as many columns as the panel. multiply_row and multiply_pair are for one and two rows.
multiply_row, multiply_pair, multiply_tile = (_multiply(count) for count in (1, 2, TILE_ROWS))


def _load_factors(builder: Any, weights: Any, first: Any) -> list[Any]:
    """Return vectors of a panel from an offset on, for a tile's features."""
    factors = []
    for i in range(_VECTORS):
        offset = builder.add(first, ir.Constant(_SIZE, 4 * WIDTH * i))
        factors.append(builder.load(moved(builder, weights, offset, _SUMS), align=4))
    return factors


def _half_of_bytes(builder: Any, vector: Any, half: int) -> Any:
    """Return the codes in one half of each byte: 0 is the lower one."""
    kind = ir.VectorType(_BYTE, 4 * WIDTH)

    def splat_byte(number: int) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    both = builder.bitcast(vector, kind)
    one = builder.lshr(both, splat_byte(4)) if half else builder.and_(both, splat_byte(15))
    return builder.bitcast(builder.sub(one, splat_byte(8)), _SUMS)


def _add_products(
    builder: Any,
    rows: Sequence[Any],
    column: Any,
    factors: Sequence[Any],
    totals: Sequence[Sequence[Any]],
) -> None:
    """Add the products of four columns to the sums.

    Args:
        builder: writes instructions.
        rows: addresses of the rows of codes.
        column: the first of the columns.
        factors: vectors of the columns' weights, for all features of a tile.
        totals: address of each vector of sums, by row.
    """
    for address, of_row in zip(rows, totals, strict=True):
        four = builder.load(moved(builder, address, column, _INT), align=1)
        repeated = _repeat(builder, four, WIDTH)
        for factor, total in zip(factors, of_row, strict=True):
            added = _add_fours(builder, builder.load(total), repeated, factor)
            builder.store(added, total)


def _add_fours(builder: Any, total: Any, codes: Any, weights: Any) -> Any:
    """Return sums plus fours of products."""

    def call(name: str, result: Any, *values: Any) -> Any:
        function_type = ir.FunctionType(result, [value.type for value in values])
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        return builder.call(function, values)

    if WIDTH == LANES:
        return call(_DOT_PRODUCT, _SUMS, total, codes, weights)
    pairs = call(
        _PAIR_PRODUCT,
        _SHORTS,
        builder.bitcast(codes, _HALF_BYTES),
        builder.bitcast(weights, _HALF_BYTES),
    )
    ones = ir.Constant(_SHORTS, [1] * 16)
    return builder.add(total, call(_PAIR_SUM, _HALF_INTS, pairs, ones))


def _repeat(builder: Any, number: Any, width: int = LANES) -> Any:
    """Return a vector of one number of 32 bits."""
    vector = ir.VectorType(_INT, width)
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(vector, [0] * width))


@numba.extending.intrinsic
def store_codes(_context, codes, _row, _column, _value, _lowest):
    """Write 16 numbers from 0 to 255, rounded down, plus the lowest code, as bytes."""

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        array, row, column, value, lowest = values
        address = element_address(context, builder, declared.args[0], array, row, column)
        numbers = builder.trunc(builder.fptosi(value, _INTS), _BYTES)
        shift = builder.trunc(_repeat(builder, builder.trunc(lowest, _INT)), _BYTES)
        place = builder.bitcast(address, _BYTES.as_pointer())
        builder.store(builder.add(numbers, shift), place, align=1)
        return context.get_dummy_value()

    arguments = (codes, types.int64, types.int64, LANES_TYPE, types.int64)
    return types.none(*arguments), generate


@numba.extending.intrinsic
def prefetch(_context, array, _row, _column):
    """Have the cache line of an element read, to be written soon."""

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        address = element_address(context, builder, declared.args[0], *values)
        function_type = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_INT] * 3])
        name = "llvm.prefetch.p0"
        call = cgutils.get_or_insert_function(builder.module, function_type, name)
        # to write, into all levels, of data
        builder.call(call, (address, *(ir.Constant(_INT, number) for number in (1, 3, 1))))
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64), generate
