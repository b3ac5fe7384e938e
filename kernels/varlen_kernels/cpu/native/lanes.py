"""Vectors of 16 fp32 numbers, as values of functions that numba compiles.

Code that names its vectors does not depend on what the compiler can prove about a loop: that arrays do not overlap,
that sums may be reordered, that `exp` has a vector form. LLVM splits a vector into the registers of the CPU: one with
AVX-512, two with AVX2. Arrays hold fp32, or bf16 as uint16, which is converted when it is loaded and stored.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, register_model

from varlen_kernels.cpu.native.native import inlined, intrinsic
from varlen_kernels.cpu.native.target_cpu import LANES, target_cpu

_BYTE, _SIZE = ir.IntType(8), ir.IntType(64)


def element_address(
    context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any
) -> Any:
    """Return the address of an element as one of bytes.

    Args:
        context, builder: numba's, which write the instructions.
        array_type, array: a matrix whose columns are adjacent.
        row, column: numbers of 64 bits.
    """
    data = context.make_array(array_type)(context, builder, array).data
    width = _SIZE(array_type.dtype.bitwidth // 8)
    of_row = builder.mul(row, row_bytes(context, builder, array_type, array))
    return moved(builder, data, builder.add(of_row, builder.mul(column, width)), _BYTE)


def row_bytes(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Return the distance from a row of a matrix to the next one, in bytes."""
    strides = context.make_array(array_type)(context, builder, array).strides
    return cgutils.unpack_tuple(builder, strides, 2)[0]


def moved(builder: Any, address: Any, offset: Any, element: Any) -> Any:
    """Return the address some bytes further, as one of elements of a type."""
    further = builder.gep(builder.bitcast(address, _BYTE.as_pointer()), [offset])
    return builder.bitcast(further, element.as_pointer())


# Writes instructions with a builder; returns the value that they compute.
Emit: TypeAlias = Callable[..., Any]
# What numba calls to write the instructions of an intrinsic.
Generate: TypeAlias = Callable[[Any, Any, Any, Any], Any]

_FLOAT, _INT, _HALF, _SIZE = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT, LANES)
_HALVES = ir.VectorType(_HALF, LANES)
# Whether an instruction rounds to bf16.
_ROUNDS = target_cpu().has("avx512bf16")
_TO_BF16 = "llvm.x86.avx512bf16.cvtneps2bf16.512"


class LanesType(types.Type):
    """The type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES_TYPE = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, lanes_type: LanesType) -> None:
        super().__init__(manager, lanes_type, _FLOATS)


def _register_op(emit: Emit, result: Any, *arguments: Any) -> Any:
    """Return a function for compiled code whose instructions `emit(builder, *values)` writes."""

    def declare(_context: Any, *_types: Any) -> tuple[Any, Generate]:
        def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return emit(builder, *values)

        return result(*arguments), generate

    return intrinsic(declare, len(arguments))


def _memory_op(emit: Emit, result: Any, *others: Any) -> Any:
    """Return a function of an array, row, column and others; `emit` gets a pointer instead."""

    def declare(_context: Any, array: Any, *_types: Any) -> tuple[Any, Generate]:
        def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
            pointer = _pointer(context, builder, declared.args[0], *values[:3])
            value = emit(builder, pointer, *values[3:])
            return context.get_dummy_value() if value is None else value

        return result(array, types.int64, types.int64, *others), generate

    return intrinsic(declare, 3 + len(others))


def _define_operator(function: Callable[[Any, Any], Any], instruction: str) -> None:
    @infer_global(function)
    class _Operator(ConcreteTemplate):  # type: ignore[misc]
        cases = (signature(LANES_TYPE, LANES_TYPE, LANES_TYPE),)

    @lower_builtin(function, LANES_TYPE, LANES_TYPE)
    def _generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return getattr(builder, instruction)(*values)


_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")
_define_operator(operator.truediv, "fdiv")


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
    address = element_address(context, builder, array_type, array, row, column)
    element = {types.float32: _FLOAT, types.int32: _INT}.get(array_type.dtype, _HALF)
    return builder.bitcast(address, element.as_pointer())


def _ints(number: int) -> Any:
    return _INTS([number] * LANES)


def _shuffle(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    """Return the lanes at these places of both vectors; the second begins at 16."""
    return builder.shuffle_vector(first, second, _INTS(places))


def _load(builder: Any, pointer: Any) -> Any:
    if pointer.type.pointee == _FLOAT:
        return builder.load(builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)
    if pointer.type.pointee == _INT:
        whole = builder.load(builder.bitcast(pointer, _INTS.as_pointer()), align=4)
        return builder.sitofp(whole, _FLOATS)
    halves = builder.load(builder.bitcast(pointer, _HALVES.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, _INTS), _ints(16)), _FLOATS)


def _number_at(builder: Any, pointer: Any) -> Any:
    number = builder.load(pointer)
    if number.type == _HALF:
        number = builder.bitcast(builder.shl(builder.zext(number, _INT), _INT(16)), _FLOAT)
    return number


def _store(builder: Any, pointer: Any, value: Any) -> None:
    if pointer.type.pointee == _FLOAT:
        builder.store(value, builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)
        return
    halves = builder.trunc(builder.lshr(_rounded(builder, value), _ints(16)), _HALVES)
    builder.store(halves, builder.bitcast(pointer, _HALVES.as_pointer()), align=2)


def _load_first(builder: Any, pointer: Any, count: Any) -> Any:
    room = _zeros(builder, pointer.type.pointee)
    _copy(builder, pointer, room, count)
    return _load(builder, room)


def _store_first(builder: Any, pointer: Any, value: Any, count: Any) -> None:
    room = _zeros(builder, pointer.type.pointee)
    _store(builder, room, value)
    _copy(builder, room, pointer, count)


def _rounded(builder: Any, value: Any) -> Any:
    """Return the nearest bf16 numbers in the upper half of 32 bits.

    Where an instruction rounds, numbers below the normal ones become 0.
    """
    if not _ROUNDS:
        # to nearest, ties to even
        bits = builder.bitcast(value, _INTS)
        is_odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
        rounded = builder.add(builder.add(bits, _ints(0x7FFF)), is_odd)
        is_nan = builder.fcmp_unordered("uno", value, value)
        both = builder.select(is_nan, _ints(0x7FC00000), rounded)
        return builder.and_(both, _ints(0xFFFF0000))
    kind = ir.FunctionType(_HALVES, [_FLOATS])
    convert = cgutils.get_or_insert_function(builder.module, kind, _TO_BF16)
    return builder.shl(builder.zext(builder.call(convert, [value]), _INTS), _ints(16))


def _store_factors(builder: Any, pointer: Any, value: Any) -> Any:
    if pointer.type.pointee == _HALF:
        bits = _rounded(builder, value)
        halves = builder.trunc(builder.lshr(bits, _ints(16)), _HALVES)
        builder.store(halves, builder.bitcast(pointer, _HALVES.as_pointer()), align=2)
        return builder.bitcast(bits, _FLOATS)
    _store(builder, pointer, value)
    return value


def _store_paired(builder: Any, pointer: Any, value: Any, is_second: Any) -> None:
    if pointer.type.pointee == _FLOAT:
        _store(builder, pointer, value)
        return
    bits, pairs = _rounded(builder, value), builder.bitcast(pointer, _INTS.as_pointer())
    both = builder.or_(builder.load(pairs, align=4), bits)
    low = builder.lshr(bits, _ints(16))
    builder.store(builder.select(is_second, both, low), pairs, align=4)


def fetch_line(builder: Any, address: Any, is_written: int = 0, nearness: int = 3) -> None:
    """Have the cache line of an address read: it is needed soon.

    Args:
        nearness: 3 for all levels of the cache, 2 for all but the first.
    """
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_INT] * 3])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    numbers = map(_INT, (is_written, nearness, 1))  # 1: data
    builder.call(fetch, (builder.bitcast(address, _BYTE.as_pointer()), *numbers))


def _zeros(builder: Any, element: Any) -> Any:
    vector = ir.VectorType(element, LANES)
    room = cgutils.alloca_once(builder, vector)
    builder.store(vector(None), room)
    return builder.bitcast(room, element.as_pointer())


def _copy(builder: Any, source: Any, destination: Any, count: Any) -> None:
    with cgutils.for_range(builder, count) as loop:
        element = builder.load(builder.gep(source, [loop.index]))
        builder.store(element, builder.gep(destination, [loop.index]))


def repeated(builder: Any, number: Any, width: int = LANES) -> Any:
    """Return a vector of a number."""
    empty = ir.VectorType(number.type, width)(ir.Undefined)
    first = builder.insert_element(empty, number, _INT(0))
    return builder.shuffle_vector(first, empty, ir.VectorType(_INT, width)([0] * width))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function_type = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    name = f"llvm.fmuladd.v{LANES}f32"
    return builder.call(
        cgutils.get_or_insert_function(builder.module, function_type, name), (a, b, c)
    )


def _select_greater(builder: Any, a: Any, b: Any, greater: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), greater, other)


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return _select_greater(builder, a, b, a, b)


def _minimum(builder: Any, a: Any, b: Any) -> Any:
    return _select_greater(builder, b, a, a, b)


def _combined(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return the combination of all lanes: of halves, then of quarters, and so on."""
    for width in (8, 4, 2, 1):
        places = [lane + width if lane < width else 0 for lane in range(LANES)]
        value = combine(value, _shuffle(builder, value, value, places))
    return builder.extract_element(value, _INT(0))


def _sum_of(builder: Any, value: Any) -> Any:
    return _combined(builder, value, builder.fadd)


def _largest_of(builder: Any, value: Any) -> Any:
    return _combined(builder, value, partial(_maximum, builder))


def _smallest_of(builder: Any, value: Any) -> Any:
    return _combined(builder, value, partial(_minimum, builder))


def _fold(distance: int, builder: Any, first: Any, second: Any) -> Any:
    """Return sums of two lanes of one vector: a bit says which."""
    low = [j + LANES - distance if j & distance else j for j in range(LANES)]
    high = [j + LANES if j & distance else j + distance for j in range(LANES)]
    pair = first, second
    return builder.fadd(_shuffle(builder, *pair, low), _shuffle(builder, *pair, high))


def _power_of_two(builder: Any, shifted: Any) -> Any:
    """Return 2 ** n of n + 1.5 · 2 ** 23, whose last bits are n."""
    exponent = builder.shl(builder.bitcast(shifted, _INTS), _ints(23))
    return builder.bitcast(builder.add(exponent, _ints(0x3F800000)), _FLOATS)


# load(array, row, column) returns 16 numbers of a row, which may be int32; load_first(..., count) returns the first
# ones, then zeros.
load = _memory_op(_load, LANES_TYPE)
load_first = _memory_op(_load_first, LANES_TYPE, types.int64)
# store(array, row, column, value) writes 16 numbers; store_first(..., value, count) writes the first ones.
store = _memory_op(_store, types.none, LANES_TYPE)
store_first = _memory_op(_store_first, types.none, LANES_TYPE, types.int64)
# Into fp32, or into bf16 if the CPU multiplies pairs of it: store_factors(array, row, column, value) writes 16 numbers
# and returns them as they are read; store_paired(..., value, is_second) writes 16 numbers of fp32, or the first numbers
# of 16 pairs and zeros, or their second numbers.
store_factors = _memory_op(_store_factors, LANES_TYPE, LANES_TYPE)
store_paired = _memory_op(_store_paired, types.none, LANES_TYPE, types.boolean)
# number_at(array, row, column) returns a number in fp32.
number_at = _memory_op(_number_at, types.float32)
# fetch(array, row, column) has the cache line of an element read; fetch_to_write, to be written; fetch_early, but not
# into the first-level cache.
fetch, fetch_to_write, fetch_early = (
    _memory_op(partial(fetch_line, **each), types.none)
    for each in ({}, {"is_written": 1}, {"nearness": 2})
)
# splat(number) repeats it in every lane.
splat = _register_op(repeated, LANES_TYPE, types.float32)
# multiply_add(a, b, c) returns a · b + c, rounded once.
multiply_add = _register_op(_multiply_add, LANES_TYPE, *[LANES_TYPE] * 3)
# maximum(a, b) and minimum(a, b) return one of each two numbers, the number in `b` if one is NaN.
maximum = _register_op(_maximum, LANES_TYPE, LANES_TYPE, LANES_TYPE)
minimum = _register_op(_minimum, LANES_TYPE, LANES_TYPE, LANES_TYPE)
# select_greater(a, b, greater, other) returns the lanes of `greater` where a > b, else the lanes of `other`.
select_greater = _register_op(_select_greater, LANES_TYPE, *[LANES_TYPE] * 4)
# sum_of(value), largest_of(value) and smallest_of(value) return a number.
sum_of = _register_op(_sum_of, types.float32, LANES_TYPE)
largest_of = _register_op(_largest_of, types.float32, LANES_TYPE)
smallest_of = _register_op(_smallest_of, types.float32, LANES_TYPE)
# fold_8(a, b), ... return sums of lanes 8, 4, 2 and 1 apart. All four, in this order, sum 16 vectors into one, whose
# lane j is the sum of vector j: fold_8 of vectors 8 apart, fold_4 of results for vectors 4 apart, and so on.
fold_8, fold_4, fold_2, fold_1 = (
    _register_op(partial(_fold, distance), *[LANES_TYPE] * 3) for distance in (8, 4, 2, 1)
)
power_of_two = _register_op(_power_of_two, LANES_TYPE, LANES_TYPE)


@numba.extending.intrinsic
def transpose(_context, source, _column, destination, _row):
    """Write a square of 16 rows of fp32, or of pairs of bf16, transposed."""

    def generate(context: Any, builder: Any, declared: Any, values: Any) -> Any:
        from_array, from_column, to_array, to_row = values

        def vector_at(number: int, array: Any, row: Any, column: Any) -> Any:
            address = element_address(context, builder, declared.args[number], array, row, column)
            return builder.bitcast(address, _INTS.as_pointer())

        lanes = [
            builder.load(vector_at(0, from_array, _SIZE(i), from_column), align=2)
            for i in range(LANES)
        ]
        for distance in (8, 4, 2, 1):
            # in each square of twice this width, two of the four squares change places
            low = [j + LANES - distance if j & distance else j for j in range(LANES)]
            high = [j + LANES if j & distance else j + distance for j in range(LANES)]
            for i in range(LANES):
                if not i & distance:
                    pair = lanes[i], lanes[i + distance]
                    lanes[i] = _shuffle(builder, *pair, low)
                    lanes[i + distance] = _shuffle(builder, *pair, high)
        for i, value in enumerate(lanes):
            place = vector_at(2, to_array, builder.add(to_row, _SIZE(i)), _SIZE(0))
            builder.store(value, place, align=2)
        return context.get_dummy_value()

    return types.none(source, types.int64, destination, types.int64), generate


_SHIFT = np.float32(3 << 22)
_LOG2_E = np.float32(1 / np.log(2))
# log(2) in two parts: n times the first is exact
_LOG_2, _LOG_2_REST = np.float32(0.693359375), np.float32(np.log(2) - 0.693359375)
_LOWEST = np.float32(-87.3)
_C2, _C3, _C4, _C5, _C6, _C7 = (
    np.float32(x)
    for x in (
        0.5000000120,
        0.1666666546,
        4.166579589e-2,
        8.333451907e-3,
        1.398199951e-3,
        1.98756915e-4,
    )
)
_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined
def exp(x):
    """Return e ** x of x up to 88, with a relative error of 1e-7.

    It is 0 below -87.3 and for NaN.
    Source: the polynomial of Moshier's Cephes, expf.
    """
    bounded = maximum(x, splat(_LOWEST))
    shifted = multiply_add(bounded, splat(_LOG2_E), splat(_SHIFT))
    n = shifted - splat(_SHIFT)
    rest = multiply_add(n, splat(-_LOG_2), bounded)
    rest = multiply_add(n, splat(-_LOG_2_REST), rest)
    y = multiply_add(splat(_C7), rest, splat(_C6))
    y = multiply_add(y, rest, splat(_C5))
    y = multiply_add(y, rest, splat(_C4))
    y = multiply_add(y, rest, splat(_C3))
    y = multiply_add(y, rest, splat(_C2))
    y = multiply_add(rest * rest, y, rest) + splat(_ONE)
    return select_greater(x, splat(_LOWEST), y * power_of_two(shifted), splat(_ZERO))


# Coefficients of f, f ** 2 and f ** 3 in 2 ** f - 1 between -0.5 and 0.5.
_S1, _S2, _S3 = (
    np.float32(x) for x in (0.6932828877888236, 0.24221097957126453, 0.055009101892216083)
)
# its power of two is 2 ** -127, which `power_of_two` returns as 0
_NO_POWER = np.float32(-88)


@inlined
def short_exp(x):
    """Return e ** x of x up to 0, with a relative error of 1e-4.

    It is for results that are rounded to bf16.

    It is 0 below -87.7 and for NaN.
    """
    bounded = maximum(x, splat(_NO_POWER))
    shifted = multiply_add(bounded, splat(_LOG2_E), splat(_SHIFT))
    rest = multiply_add(bounded, splat(_LOG2_E), splat(_SHIFT) - shifted)
    y = multiply_add(splat(_S3), rest, splat(_S2))
    y = multiply_add(y, rest, splat(_S1))
    y = multiply_add(y, rest, splat(_ONE))
    return y * power_of_two(shifted)
