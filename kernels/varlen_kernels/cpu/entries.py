"""Functions that `calls` runs: each works on some units of an op.

They read their arguments from memory: three numbers for each tensor, which are its address, its rows and its columns,
all 0 where it is left out; then the constants of `call_rules`, a float as the bits of a double. The comments of a
function name its tensors, its constants and its unit.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numba.extending
import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import types

from varlen_kernels.cpu.attention import attend_items
from varlen_kernels.cpu.epilogues import NO_ACTIVATION, activated, load_within, store_within
from varlen_kernels.cpu.int8_panels import multiply_int8_units
from varlen_kernels.cpu.lanes import LANES, multiply_add, splat
from varlen_kernels.cpu.norms import norm_some_rows
from varlen_kernels.cpu.paged import append_rows, attend_blocks
from varlen_kernels.cpu.panels import multiply_units
from varlen_kernels.cpu.stored_code import stored_entry

_SIZE = ir.IntType(64)


def _reader(number_type: Any, pointee: Any) -> Any:
    """Return an intrinsic that returns a pointer to numbers of a type, given their address."""

    @numba.extending.intrinsic
    def pointer_of(_context, _address):
        def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], pointee.as_pointer())

        pointer = types.CPointer(number_type)  # type: ignore[attr-defined]
        return pointer(types.int64), generate

    return pointer_of


_fp32_at = _reader(types.float32, ir.FloatType())
_fp64_at = _reader(types.float64, ir.DoubleType())
_int8_at = _reader(types.int8, ir.IntType(8))
_uint8_at = _reader(types.uint8, ir.IntType(8))
_int32_at = _reader(types.int32, ir.IntType(32))
_int64_at = _reader(types.int64, _SIZE)


@numba.njit(forceinline=True)
def _number(arguments, place):
    """Return the whole number at a place of the arguments."""
    return carray(_int64_at(arguments), (place + 1,))[place]


@numba.njit(forceinline=True)
def _float(arguments, place):
    return np.float32(carray(_fp64_at(arguments), (place + 1,))[place])


@numba.njit(forceinline=True)
def _matrix(arguments, tensor):
    """Return a tensor, `[rows, columns]` fp32."""
    shape = (_number(arguments, 3 * tensor + 1), _number(arguments, 3 * tensor + 2))
    return carray(_fp32_at(_number(arguments, 3 * tensor)), shape)


@numba.njit(forceinline=True)
def _as_matrix(arguments, tensor, columns):
    """Return a tensor of whatever shape, `[rows, columns]` fp32."""
    numbers = _number(arguments, 3 * tensor + 1) * _number(arguments, 3 * tensor + 2)
    return carray(_fp32_at(_number(arguments, 3 * tensor)), (numbers // columns, columns))


@numba.njit(forceinline=True)
def _row(arguments, tensor):
    """Return a tensor of one axis, `[1, numbers]` fp32; `[0, 0]` for none."""
    numbers = _number(arguments, 3 * tensor + 1)
    return carray(_fp32_at(_number(arguments, 3 * tensor)), (min(1, numbers), numbers))


@numba.njit(forceinline=True)
def _bias_of_heads(arguments, tensor, num_heads):
    """Return the bias of scores, `[num_heads, distances]`; no distances if it is left out."""
    columns = _number(arguments, 3 * tensor + 2)
    return carray(_fp32_at(_number(arguments, 3 * tensor)), (num_heads, columns))


@numba.njit(forceinline=True)
def _ids(arguments, tensor):
    """Return a tensor of one axis, int32."""
    return carray(_int32_at(_number(arguments, 3 * tensor)), (_number(arguments, 3 * tensor + 1),))


@numba.njit(forceinline=True)
def _long_ids(arguments, tensor):
    """Return a tensor of one axis, int64."""
    return carray(_int64_at(_number(arguments, 3 * tensor)), (_number(arguments, 3 * tensor + 1),))


def _multiply(arguments: int, first: int, last: int) -> None:
    """Run a product."""
    # x, panels, bias, out; the activation; a unit is a panel of a block of rows
    multiply_units(
        first,
        last,
        _matrix(arguments, 0),
        _matrix(arguments, 1),
        _row(arguments, 2),
        _number(arguments, 12),
        _matrix(arguments, 3),
    )


@numba.njit(forceinline=True)
def _multiply_codes(arguments, first, last, codes_at):
    # x, panels, scale, fp32_rows, outliers, out; the largest code, the activation; a unit is a panel of a block of rows
    shape = (_number(arguments, 4), _number(arguments, 5))
    multiply_int8_units(
        first,
        last,
        _matrix(arguments, 0),
        carray(codes_at, shape),
        _row(arguments, 2),
        _matrix(arguments, 3),
        _long_ids(arguments, 4),
        _number(arguments, 18),
        _number(arguments, 19),
        _matrix(arguments, 5),
    )


def _multiply_int8(arguments: int, first: int, last: int) -> None:
    """Run a product in int8."""
    _multiply_codes(arguments, first, last, _int8_at(_number(arguments, 3)))


def _multiply_int4(arguments: int, first: int, last: int) -> None:
    """Run a product with weights of 4 bits."""
    _multiply_codes(arguments, first, last, _uint8_at(_number(arguments, 3)))


def _norm(arguments: int, first: int, last: int) -> None:
    """Run norms."""
    # x, residual, weight, bias, total, out; eps, whether it is an RMS norm; a unit is a row
    norm_some_rows(
        first,
        last,
        _matrix(arguments, 0),
        _matrix(arguments, 1),
        _row(arguments, 2),
        _row(arguments, 3),
        _float(arguments, 18),
        _number(arguments, 19) != 0,
        _matrix(arguments, 4),
        _matrix(arguments, 5),
    )


def _activate(arguments: int, first: int, last: int) -> None:
    """Run activations."""
    # x, out; the activation; a unit is a row. The second half of a row of x, if it has one, is a factor.
    x, out, kind = _matrix(arguments, 0), _matrix(arguments, 1), _number(arguments, 6)
    features = out.shape[1]
    for row in range(first, last):
        for column in range(0, features, LANES):
            value = load_within(x, row, column)
            if kind != NO_ACTIVATION:
                value = activated(value, kind)
            if x.shape[1] > features:
                value = value * load_within(x, row, features + column)
            store_within(out, row, column, value)


def _gather(arguments: int, first: int, last: int) -> None:
    """Run sums of rows of tables."""
    # ids, table, ids, table, ids, table, out; the scale of the first; a unit is a row of out
    ids, table = _ids(arguments, 0), _matrix(arguments, 1)
    ids_2, table_2 = _ids(arguments, 2), _matrix(arguments, 3)
    ids_3, table_3 = _ids(arguments, 4), _matrix(arguments, 5)
    out, scale = _matrix(arguments, 6), splat(_float(arguments, 21))
    for row in range(first, last):
        for column in range(0, out.shape[1], LANES):
            value = load_within(table, ids[row], column)
            if len(ids_2):
                value = multiply_add(value, scale, load_within(table_2, ids_2[row], column))
                if len(ids_3):
                    value = value + load_within(table_3, ids_3[row], column)
            else:
                value = value * scale
            store_within(out, row, column, value)


def _append(arguments: int, first: int, last: int) -> None:
    """Run appends to a KV cache."""
    # qkv, slots, keys, values; key heads, tokens of a block, head_dim; a unit is a key head
    num_kv_heads, block_size = _number(arguments, 12), _number(arguments, 13)
    head_dim = _number(arguments, 14)
    append_rows(
        first,
        last,
        _matrix(arguments, 0),
        _long_ids(arguments, 1),
        _as_matrix(arguments, 2, head_dim),
        _as_matrix(arguments, 3, head_dim),
        num_kv_heads,
        block_size,
    )


def _attend_blocks(arguments: int, first: int, last: int) -> None:
    """Run attention over KV blocks."""
    # qkv, keys, values, context_lens, block_ids, cu_blocks, bias, out; heads, key heads, tokens of a block, head_dim,
    # scale, window; a unit is a key head of a token
    num_heads, num_kv_heads = _number(arguments, 24), _number(arguments, 25)
    block_size, head_dim = _number(arguments, 26), _number(arguments, 27)
    attend_blocks(
        first,
        last,
        _matrix(arguments, 0),
        _as_matrix(arguments, 1, head_dim),
        _as_matrix(arguments, 2, head_dim),
        num_kv_heads,
        block_size,
        _ids(arguments, 4),
        _ids(arguments, 5),
        _ids(arguments, 3),
        _bias_of_heads(arguments, 6, num_heads),
        _float(arguments, 28),
        _number(arguments, 29),
        _matrix(arguments, 7),
    )


def _attend(arguments: int, first: int, last: int) -> None:
    """Run attention inside sequences."""
    # qkv, cu_seqlens, bias, out; heads, key heads, scale, causal, window; a unit is a key head of a sequence
    num_heads, num_kv_heads = _number(arguments, 12), _number(arguments, 13)
    attend_items(
        first,
        last,
        _matrix(arguments, 0),
        _ids(arguments, 1),
        1,
        _bias_of_heads(arguments, 2, num_heads),
        num_kv_heads,
        _float(arguments, 14),
        _number(arguments, 15) != 0,
        _number(arguments, 16),
        _matrix(arguments, 3),
    )


def _rotate(arguments: int, first: int, last: int) -> None:
    """Run rotations of heads."""
    # qkv, position_ids, cos_sin, out; rotated heads, head_dim; a unit is a token
    qkv, ids, cos_sin = _matrix(arguments, 0), _ids(arguments, 1), _matrix(arguments, 2)
    out, heads, head_dim = _matrix(arguments, 3), _number(arguments, 12), _number(arguments, 13)
    half = cos_sin.shape[1] // 2
    for row in range(first, last):
        place = ids[row]
        for head in range(heads):
            begin = head * head_dim
            for i in range(half):
                one, two = qkv[row, begin + i], qkv[row, begin + half + i]
                cos, sin = cos_sin[place, i], cos_sin[place, half + i]
                out[row, begin + i] = one * cos - two * sin
                out[row, begin + half + i] = two * cos + one * sin
            for i in range(begin + 2 * half, begin + head_dim):
                out[row, i] = qkv[row, i]
        for i in range(heads * head_dim, qkv.shape[1]):
            out[row, i] = qkv[row, i]


_FUNCTIONS: dict[str, Callable[[Any, Any, Any], None]] = {
    "multiply": _multiply,
    "multiply_int8": _multiply_int8,
    "multiply_int4": _multiply_int4,
    "norm": _norm,
    "activate": _activate,
    "gather": _gather,
    "append": _append,
    "attend_blocks": _attend_blocks,
    "attend": _attend,
    "rotate": _rotate,
}
_SIGNATURE = types.void(types.int64, types.int64, types.int64)


@cache
def address_of(name: str) -> int:
    """Return the address of a compiled function; the first call compiles it."""
    entry = stored_entry(_FUNCTIONS[name], _SIGNATURE)
    # the entry holds the memory of the code
    _kept.append(entry)
    address: int = entry.address
    return address


_kept: list[Any] = []
