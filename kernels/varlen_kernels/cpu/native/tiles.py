"""Products in the tile registers of AMX.

A register holds 16 rows of 64 bytes: 16 fp32 or int32 sums, 32 bf16 numbers or 64 codes. One instruction multiplies a
tile of rows with a tile of weights, whose rows have the pairs or fours of 16 columns, and adds the products to a tile
of sums. Panels of bf16 pairs and of codes lie in that order already, so every layout of weights stays as it is.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from collections.abc import Sequence
from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.native.lanes import moved
from varlen_kernels.cpu.native.target_cpu import target_cpu

HAS_TILES = target_cpu().has("amx-tile")
# Most rows of a tile, and bytes of its rows.
ROWS, ROW_BYTES = 16, 64
# Tiles of sums: side by side, where they share a tile of rows, or two by two.
VECTORS = 4
# The registers: sums first, then rows, then the weights by turns.
_OF_ROWS, _OF_WEIGHTS = (4, 5), (6, 7)

_BYTE, _SIZE = ir.IntType(8), ir.IntType(64)
_POINTER = _BYTE.as_pointer()
# By the bytes of a number.
_PRODUCTS = {2: "tdpbf16ps", 1: "tdpbusd"}


def _call(builder: Any, name: str, *values: Any) -> None:
    """Write an instruction of tiles, if the CPU has it; registers are constants."""
    if not HAS_TILES:
        # a branch that is never taken
        return
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, values)


@numba.extending.intrinsic
def configure_tiles(_context, _rows):
    """Give the tiles of rows and sums this many rows, 1 to `ROWS`.

    The registers of this thread are in use from here to `release_tiles`.
    """

    def generate(context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        rows = builder.trunc(values[0], _BYTE)
        settings = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, 64))
        builder.store(ir.Constant(ir.ArrayType(_BYTE, 64), None), settings)
        address = builder.bitcast(settings, _POINTER)

        def write(place: int, value: Any) -> None:
            builder.store(value, builder.gep(address, [_SIZE(place)]))

        write(0, _BYTE(1))
        for tile in range(8):
            # two bytes for the bytes of a row of each tile, then one for its rows
            write(16 + 2 * tile, _BYTE(ROW_BYTES))
            write(48 + tile, _BYTE(ROWS) if tile in _OF_WEIGHTS else rows)
        _call(builder, "ldtilecfg", address)
        return context.get_dummy_value()

    return types.none(types.int64), generate


@numba.extending.intrinsic
def release_tiles(_context):
    """Leave the registers of tiles, which the system then need not keep."""

    def generate(context: Any, builder: Any, _declared: Any, _values: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), generate


# A product is written in three parts: sums come into registers, products of tiles are added, and sums go back. Between
# them other instructions may do something else. Arguments of the parts:
#   width: bytes of a number of a row: 2 for bf16, 1 for codes without a sign, whose weights have one.
#   rows, weights: address of each tile of rows, and of weights with 16 columns: two and two, or one and up to
#     `VECTORS`, which loads a quarter more.
#   sums: address of each tile of sums, by tile of rows.
#   row_bytes, weight_bytes, sum_bytes: distance from a row to the next one.


def side_by_side(builder: Any, first: Any, count: int, distance: Any = None) -> list[Any]:
    """Return the addresses of neighbouring tiles, by default 16 columns of 32 bits apart."""
    distance = _SIZE(ROW_BYTES) if distance is None else distance
    return [moved(builder, first, builder.mul(distance, _SIZE(i)), _BYTE) for i in range(count)]


def clear_sums(builder: Any, count: int) -> None:
    """Write zeros into tiles of sums."""
    for i in range(count):
        _call(builder, "tilezero", _BYTE(i))


def begin_product(builder: Any, sums: Sequence[Any], sum_bytes: Any, is_new: Any) -> None:
    """Write loads of tiles of sums, or zeros if they are new."""
    with builder.if_else(is_new) as (then, otherwise):
        with then:
            clear_sums(builder, len(sums))
        with otherwise:
            for i, each in enumerate(sums):
                _call(builder, "tileloadd64", _BYTE(i), each, sum_bytes)


def add_product(
    builder: Any,
    width: int,
    *,
    rows: Sequence[Any],
    row_bytes: Any,
    weights: Sequence[Any],
    weight_bytes: Any,
) -> None:
    """Write the products of tiles, which are added to the sums."""
    if width not in _PRODUCTS:
        return
    for i, row in enumerate(rows):
        _call(builder, "tileloadd64", _BYTE(_OF_ROWS[i]), row, row_bytes)
        for j, weight in enumerate(weights):
            register = _BYTE(_OF_WEIGHTS[j % 2])
            if i == 0:
                _call(builder, "tileloadd64", register, weight, weight_bytes)
            place = _BYTE(i * len(weights) + j)
            _call(builder, _PRODUCTS[width], place, _BYTE(_OF_ROWS[i]), register)


def end_product(builder: Any, sums: Sequence[Any], sum_bytes: Any) -> None:
    """Write stores of tiles of sums."""
    for i, each in enumerate(sums):
        _call(builder, "tilestored64", _BYTE(i), each, sum_bytes)
