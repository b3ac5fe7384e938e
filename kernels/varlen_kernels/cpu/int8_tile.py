"""Products of int8 codes in registers, for functions that numba compiles.

A tile is 6 rows by 64 features: its 24 vectors of sums, and what they are computed from, fill the 32 registers of
AVX-512. Each instruction of VNNI multiplies 64 pairs of codes and adds fours of products to sums of 32 bits, exactly.

After a change here, touch the files that use it; see `lanes`.
"""

from typing import Any

import numba.extending
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from torch import Tensor

from varlen_kernels.cpu.lanes import LANES, LANES_TYPE

# Rows and features of a tile.
TILE_ROWS = 6
TILE_FEATURES = 64
# Columns that one instruction multiplies and sums.
_DEPTH = 4
_VECTORS = TILE_FEATURES // LANES

_BYTE, _INT, _SIZE = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES, _INTS = ir.VectorType(_BYTE, LANES), ir.VectorType(_INT, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_DOT_PRODUCT = "llvm.x86.avx512.vpdpbusd.512"


def has_dot_products() -> bool:
    """Return whether the CPU that numba compiles for has VNNI with AVX-512."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+avx512vnni" in features.split(",")


def pack_panels(codes: Tensor) -> Tensor:
    """Return the codes of a weight in the order in which `multiply_tile` reads them.

    Args:
        codes: `[hidden, features]` int8.

    Returns:
        `[features / 64, hidden * 64]` int8, both rounded up to whole tiles with zeros.
    """
    hidden, features = codes.shape
    panels, steps = -(-features // TILE_FEATURES), -(-hidden // _DEPTH)
    padded = torch.zeros(steps * _DEPTH, panels * TILE_FEATURES, dtype=torch.int8)
    padded[:hidden, :features] = codes
    parts = padded.view(steps, _DEPTH, panels, TILE_FEATURES).permute(2, 0, 3, 1)
    return parts.reshape(panels, -1)


def _address(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
    """Return the address of an element, as one of bytes; columns are adjacent."""
    struct = context.make_array(array_type)(context, builder, array)
    row_bytes = cgutils.unpack_tuple(builder, struct.strides, 2)[0]
    width = ir.Constant(_SIZE, array_type.dtype.bitwidth // 8)
    offset = builder.add(builder.mul(row, row_bytes), builder.mul(column, width))
    return builder.gep(builder.bitcast(struct.data, _BYTE.as_pointer()), [offset])


def _offset(builder: Any, address: Any, offset: Any, vector: Any) -> Any:
    """Return the address of a vector some bytes further."""
    return builder.bitcast(builder.gep(address, [offset]), vector.as_pointer())


@numba.extending.intrinsic
def multiply_tile(_context, codes, _row, panels, _panel, sums):
    """Write the products of 6 rows of codes with a panel, `[6, 64]` fp32.

    Args:
        codes: `[rows, columns]` uint8, from `row` on; at least as many columns as the panel has.
        panels: made by `pack_panels`.
        sums: overwritten.
    """

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        from_codes, row, from_panels, panel, to_sums = values
        codes_type, panels_type, sums_type = (declared.args[i] for i in (0, 2, 4))
        zero = ir.Constant(_SIZE, 0)
        rows = [
            _address(
                context,
                builder,
                codes_type,
                from_codes,
                builder.add(row, ir.Constant(_SIZE, i)),
                zero,
            )
            for i in range(TILE_ROWS)
        ]
        weights = _address(context, builder, panels_type, from_panels, panel, zero)
        shape = context.make_array(panels_type)(context, builder, from_panels).shape
        step_bytes = ir.Constant(_SIZE, TILE_FEATURES * _DEPTH)
        steps = builder.udiv(cgutils.unpack_tuple(builder, shape, 2)[1], step_bytes)
        totals = [
            [cgutils.alloca_once(builder, _INTS) for _ in range(_VECTORS)] for _ in range(TILE_ROWS)
        ]
        for total in (each for of_row in totals for each in of_row):
            builder.store(ir.Constant(_INTS, None), total)
        function_type = ir.FunctionType(_INTS, [_INTS] * 3)
        dot = cgutils.get_or_insert_function(builder.module, function_type, _DOT_PRODUCT)
        with cgutils.for_range(builder, steps) as loop:
            first = builder.mul(loop.index, step_bytes)
            factors = [
                builder.load(
                    _offset(
                        builder,
                        weights,
                        builder.add(first, ir.Constant(_SIZE, 4 * LANES * i)),
                        _INTS,
                    ),
                    align=4,
                )
                for i in range(_VECTORS)
            ]
            column = builder.mul(loop.index, ir.Constant(_SIZE, _DEPTH))
            for address, of_row in zip(rows, totals, strict=True):
                four = builder.load(_offset(builder, address, column, _INT), align=1)
                repeated = _repeat(builder, four)
                for factor, total in zip(factors, of_row, strict=True):
                    summed = builder.call(dot, (builder.load(total), repeated, factor))
                    builder.store(summed, total)
        for i, of_row in enumerate(totals):
            address = _address(context, builder, sums_type, to_sums, ir.Constant(_SIZE, i), zero)
            for j, total in enumerate(of_row):
                place = _offset(builder, address, ir.Constant(_SIZE, 4 * LANES * j), _FLOATS)
                builder.store(builder.sitofp(builder.load(total), _FLOATS), place, align=4)
        return context.get_dummy_value()

    arguments = (codes, types.int64, panels, types.int64, sums)
    return types.none(*arguments), generate


def _repeat(builder: Any, number: Any) -> Any:
    """Return a vector of one number of 32 bits."""
    empty = ir.Constant(_INTS, ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(_INTS, [0] * LANES))


@numba.extending.intrinsic
def store_codes(_context, codes, _row, _column, _value, _lowest):
    """Write 16 numbers from 0 to 255, rounded down, plus the lowest code, as bytes."""

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        array, row, column, value, lowest = values
        address = _address(context, builder, declared.args[0], array, row, column)
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
        address = _address(context, builder, declared.args[0], *values)
        function_type = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_INT] * 3])
        name = "llvm.prefetch.p0"
        call = cgutils.get_or_insert_function(builder.module, function_type, name)
        # to write, into all levels, of data
        builder.call(call, (address, *(ir.Constant(_INT, number) for number in (1, 3, 1))))
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64), generate
