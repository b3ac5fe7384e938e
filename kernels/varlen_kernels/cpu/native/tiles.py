"""Products in the tile registers of AMX.

A register holds 16 rows of 64 bytes: 16 fp32 or int32 sums, 32 bf16 numbers or 64 codes. One instruction multiplies a
tile of rows with a tile of weights, whose rows have the pairs or fours of 16 columns, and adds the products to a tile
of sums. Panels of bf16 pairs and of codes lie in that order already, so every layout of weights stays as it is.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.native.lanes import moved
from varlen_kernels.cpu.native.target_cpu import target_cpu

HAS_TILES = target_cpu().has("amx-tile")
# Most rows of a tile, and bytes of its rows.
ROWS, ROW_BYTES = 16, 64
# Tiles of sums side by side, which share a tile of rows.
VECTORS = 4
# The registers: sums first, then rows, then the weights by turns.
_OF_ROWS, _OF_WEIGHTS = VECTORS, (5, 6, 7)

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
            write(48 + tile, rows if tile <= _OF_ROWS else _BYTE(ROWS))
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


# A product is written in three parts: sums come into registers, the products of tiles of rows are added one after
# another, and sums go back. Between them other instructions may do something else. Arguments of the parts:
#   width: bytes of a number of a row: 2 for bf16, 1 for codes without a sign, whose weights have one. Others have no
#     such instruction.
#   vectors: 16 columns each, up to `VECTORS`.
#   rows, weights, sums: addresses of bytes; row_bytes, weight_bytes, sum_bytes: distance from a row to the next one.
#   vector_bytes: distance from 16 columns of the weights to the next ones.


def begin_product(builder: Any, vectors: int, sums: Any, sum_bytes: Any, is_new: Any) -> None:
    """Write loads of tiles of sums, or zeros if they are new."""
    with builder.if_else(is_new) as (then, otherwise):
        with then:
            for i in range(vectors):
                _call(builder, "tilezero", _BYTE(i))
        with otherwise:
            for i in range(vectors):
                _call(builder, "tileloadd64", _BYTE(i), _vector(builder, sums, i), sum_bytes)


def add_product(
    builder: Any,
    width: int,
    vectors: int,
    *,
    rows: Any,
    row_bytes: Any,
    weights: Any,
    weight_bytes: Any,
    vector_bytes: Any,
) -> None:
    """Write the product of one tile of rows, which is added to the sums."""
    if width not in _PRODUCTS:
        return
    _call(builder, "tileloadd64", _BYTE(_OF_ROWS), rows, row_bytes)
    for i in range(vectors):
        register = _BYTE(_OF_WEIGHTS[i % len(_OF_WEIGHTS)])
        weight = moved(builder, weights, builder.mul(vector_bytes, _SIZE(i)), _BYTE)
        _call(builder, "tileloadd64", register, weight, weight_bytes)
        _call(builder, _PRODUCTS[width], _BYTE(i), _BYTE(_OF_ROWS), register)


def end_product(builder: Any, vectors: int, sums: Any, sum_bytes: Any) -> None:
    """Write stores of tiles of sums."""
    for i in range(vectors):
        _call(builder, "tilestored64", _BYTE(i), _vector(builder, sums, i), sum_bytes)


def _vector(builder: Any, sums: Any, i: int) -> Any:
    return moved(builder, sums, _SIZE(ROW_BYTES * i), _BYTE)
