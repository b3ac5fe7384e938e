"""Functions that `calls` runs: each works on some units of an op.

They read their arguments from memory: three numbers for each tensor, which are its address, its rows and its columns,
all 0 where it is left out; then constants, a float as the bits of a double. The comments of a function name its
tensors, its constants and its unit. It returns 0, or 1 if it had too little memory. `machine_code` compiles and loads
them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from varlen_kernels.cpu.activation_kinds import NO_ACTIVATION
from varlen_kernels.cpu.attention import attend_items, attend_items_with_distances
from varlen_kernels.cpu.beam import step_sequences
from varlen_kernels.cpu.call_code import run_alone, run_shared
from varlen_kernels.cpu.epilogues import activated, load_within, store_within
from varlen_kernels.cpu.int8_panels import multiply_int8_units
from varlen_kernels.cpu.int8_rows import dequantize_some_rows, quantize_some_rows
from varlen_kernels.cpu.lanes import load, load_first, multiply_add, splat, store_first
from varlen_kernels.cpu.native import (
    bf16_matrix,
    fp32_matrix,
    fp32_vector,
    fp64_vector,
    inlined,
    inlined_view,
    int8_matrix,
    int32_matrix,
    int32_vector,
    int64_vector,
    uint8_matrix,
    uint8_vector,
    uint32_matrix,
)
from varlen_kernels.cpu.norms import norm_some_rows
from varlen_kernels.cpu.paged import append_rows, attend_chunks, attend_tokens, copy_some_blocks
from varlen_kernels.cpu.panels import multiply_units
from varlen_kernels.cpu.sampling import sample_rows
from varlen_kernels.cpu.target_cpu import LANES

# numba's function of whole numbers. An op's function gets the address of its arguments, its first unit, and the one
# after its last.
Entry: TypeAlias = Any


@inlined
def _number(arguments, place):
    """Return the whole number at a place of the arguments."""
    return int64_vector(arguments, place + 1)[place]


@inlined
def _float(arguments, place):
    return np.float32(fp64_vector(arguments, place + 1)[place])


@inlined
def _address(arguments, tensor):
    return _number(arguments, 3 * tensor)


@inlined
def _rows(arguments, tensor):
    return _number(arguments, 3 * tensor + 1)


@inlined
def _columns(arguments, tensor):
    return _number(arguments, 3 * tensor + 2)


@inlined
def _count(arguments, tensor):
    """Return the numbers of a tensor."""
    return _rows(arguments, tensor) * _columns(arguments, tensor)


def _matrix_of(view: Any) -> Any:
    """Return a reader of tensors, `[rows, columns]`."""

    @inlined_view
    def matrix(arguments, tensor):
        rows, columns = _rows(arguments, tensor), _columns(arguments, tensor)
        return view(_address(arguments, tensor), rows, columns)

    return matrix


def _vector_of(view: Any) -> Any:
    """Return a reader of tensors as one axis."""

    @inlined_view
    def vector(arguments, tensor):
        return view(_address(arguments, tensor), _count(arguments, tensor))

    return vector


def _row_of(view: Any) -> Any:
    """Return a reader of tensors as one row, `[1, numbers]`; `[0, 0]` for none."""

    @inlined_view
    def row(arguments, tensor):
        numbers = _count(arguments, tensor)
        return view(_address(arguments, tensor), min(1, numbers), numbers)

    return row


def _cache_of(view: Any) -> Any:
    """Return a reader of KV caches, `[rows, head_dim]`."""

    @inlined_view
    def cache(arguments, tensor, head_dim):
        rows = _count(arguments, tensor) // head_dim
        return view(_address(arguments, tensor), rows, head_dim)

    return cache


_fp32, _fp32_numbers, _fp32_row = (
    _matrix_of(fp32_matrix),
    _vector_of(fp32_vector),
    _row_of(fp32_matrix),
)
_fp64_numbers = _vector_of(fp64_vector)
_codes, _id_rows, _bits = map(_matrix_of, (uint8_matrix, int32_matrix, uint32_matrix))
_ids, _long_ids, _bytes = map(_vector_of, (int32_vector, int64_vector, uint8_vector))


@inlined_view
def _bias_of_heads(arguments, tensor, num_heads):
    """Return the bias of scores, `[num_heads, distances]`; no distances if it is left out."""
    return fp32_matrix(_address(arguments, tensor), num_heads, _columns(arguments, tensor))


def _multiply(view: Any) -> Entry:
    # x, panels, bias, out; the activation; a unit is a panel of a block of rows
    matrix, row = _matrix_of(view), _row_of(view)

    @inlined
    def multiply(arguments, first, last):
        return multiply_units(
            first,
            last,
            matrix(arguments, 0),
            matrix(arguments, 1),
            row(arguments, 2),
            _number(arguments, 12),
            matrix(arguments, 3),
        )

    return multiply


def _multiply_codes(view: Any) -> Entry:
    # x, panels, scale, fp32_rows, outliers, out; the largest code, the activation; a unit is a panel of a block of rows
    codes = _matrix_of(view)

    @inlined
    def multiply(arguments, first, last):
        return multiply_int8_units(
            first,
            last,
            _fp32(arguments, 0),
            codes(arguments, 1),
            _fp32_row(arguments, 2),
            _fp32(arguments, 3),
            _long_ids(arguments, 4),
            _number(arguments, 18),
            _number(arguments, 19),
            _fp32(arguments, 5),
        )

    return multiply


@inlined
def _quantize(arguments, first, last):
    # x, outliers, codes, factors; the largest code, the lowest code; a unit is a row
    return quantize_some_rows(
        first,
        last,
        _fp32(arguments, 0),
        _long_ids(arguments, 1),
        _number(arguments, 12),
        _number(arguments, 13),
        _codes(arguments, 2),
        _fp32(arguments, 3),
    )


def _dequantize(view: Any) -> Entry:
    # sums, factors, scale, fp32_rows, out; a unit is a row
    sums = _matrix_of(view)

    @inlined
    def dequantize(arguments, first, last):
        dequantize_some_rows(
            first,
            last,
            sums(arguments, 0),
            _fp32(arguments, 1),
            _fp32_row(arguments, 2),
            _fp32(arguments, 3),
            _fp32(arguments, 4),
        )
        return 0

    return dequantize


def _norm(view: Any) -> Entry:
    # x, residual, weight, bias, total, out; eps, whether it is an RMS norm; a unit is a row
    matrix, row = _matrix_of(view), _row_of(view)

    @inlined
    def norm(arguments, first, last):
        norm_some_rows(
            first,
            last,
            matrix(arguments, 0),
            matrix(arguments, 1),
            row(arguments, 2),
            row(arguments, 3),
            _float(arguments, 18),
            _number(arguments, 19) != 0,
            matrix(arguments, 4),
            matrix(arguments, 5),
        )
        return 0

    return norm


def _activate(view: Any) -> Entry:
    # x, bias, out; the activation; a unit is a row. The second half of a row of x, if it has one, is a factor.
    matrix, row_of = _matrix_of(view), _row_of(view)

    @inlined
    def activate(arguments, first, last):
        x, bias, out = matrix(arguments, 0), row_of(arguments, 1), matrix(arguments, 2)
        kind, features = _number(arguments, 9), out.shape[1]
        for row in range(first, last):
            for column in range(0, features, LANES):
                # not past the last feature, which the factors follow
                count = features - column
                value = (
                    load(x, row, column) if count >= LANES else load_first(x, row, column, count)
                )
                if bias.shape[1]:
                    value = value + load_within(bias, 0, column)
                if kind != NO_ACTIVATION:
                    value = activated(value, kind)
                if x.shape[1] > features:
                    value = value * load_within(x, row, features + column)
                store_within(out, row, column, value)
        return 0

    return activate


def _gather(view: Any) -> Entry:
    # ids, table, ids, table, ids, table, out; the scale of the first; a unit is a row of out
    matrix = _matrix_of(view)

    @inlined
    def gather(arguments, first, last):
        ids, table = _ids(arguments, 0), matrix(arguments, 1)
        ids_2, table_2 = _ids(arguments, 2), matrix(arguments, 3)
        ids_3, table_3 = _ids(arguments, 4), matrix(arguments, 5)
        out, scale = matrix(arguments, 6), splat(_float(arguments, 21))
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
        return 0

    return gather


def _append(view: Any) -> Entry:
    # qkv, slots, keys, values; key heads, tokens of a block, head_dim; a unit is a key head
    matrix, cache = _matrix_of(view), _cache_of(view)

    @inlined
    def append(arguments, first, last):
        head_dim = _number(arguments, 14)
        append_rows(
            first,
            last,
            matrix(arguments, 0),
            _long_ids(arguments, 1),
            cache(arguments, 2, head_dim),
            cache(arguments, 3, head_dim),
            _number(arguments, 12),
            _number(arguments, 13),
        )
        return 0

    return append


def _attend_blocks(attend_some: Any, view: Any) -> Entry:
    # qkv, keys, values, cu_seqlens, context_lens, block_ids, cu_blocks, bias, out; heads, key heads, tokens of a block,
    # head_dim, scale, window; a unit is a key head of a sequence
    matrix, cache = _matrix_of(view), _cache_of(view)

    @inlined
    def attend(arguments, first, last):
        num_heads, num_kv_heads = _number(arguments, 27), _number(arguments, 28)
        block_size, head_dim = _number(arguments, 29), _number(arguments, 30)
        return attend_some(
            first,
            last,
            matrix(arguments, 0),
            cache(arguments, 1, head_dim),
            cache(arguments, 2, head_dim),
            num_kv_heads,
            block_size,
            _ids(arguments, 3),
            _ids(arguments, 4),
            _ids(arguments, 5),
            _ids(arguments, 6),
            _bias_of_heads(arguments, 7, num_heads),
            _float(arguments, 31),
            _number(arguments, 32),
            matrix(arguments, 8),
        )

    return attend


@inlined
def _copy_blocks(arguments, first, last):
    # cache, sources, destinations; bytes of a block; there is one unit: copies are made in order
    if first < last:
        block_bytes = _number(arguments, 9)
        ids = _long_ids(arguments, 1), _long_ids(arguments, 2)
        copy_some_blocks(_address(arguments, 0), ids[0], ids[1], block_bytes)
    return 0


def _attend(view: Any) -> Entry:
    # qkv, cu_seqlens, bias, key_lengths, out; heads, key heads, scale, causal, window; a unit is a key head of a
    # sequence
    matrix = _matrix_of(view)

    @inlined
    def attend(arguments, first, last):
        return attend_items(
            first,
            last,
            matrix(arguments, 0),
            _ids(arguments, 1),
            _bias_of_heads(arguments, 2, _number(arguments, 15)),
            _ids(arguments, 3),
            _number(arguments, 16),
            _float(arguments, 17),
            _number(arguments, 18) != 0,
            _number(arguments, 19),
            matrix(arguments, 4),
        )

    return attend


def _attend_distances(view: Any) -> Entry:
    # qkv, cu_seqlens, bias, rows, keys and queries of distances, key_lengths, out; heads, scale, causal, window; a unit
    # is a head of a sequence, ordered by head
    matrix = _matrix_of(view)

    @inlined
    def attend(arguments, first, last):
        num_heads = _number(arguments, 24)
        tables = _ids(arguments, 3), matrix(arguments, 4), matrix(arguments, 5)
        return attend_items_with_distances(
            first,
            last,
            tables,
            matrix(arguments, 0),
            _ids(arguments, 1),
            _bias_of_heads(arguments, 2, num_heads),
            _ids(arguments, 6),
            num_heads,
            _float(arguments, 25),
            _number(arguments, 26) != 0,
            _number(arguments, 27),
            matrix(arguments, 7),
        )

    return attend


def _rotate(view: Any) -> Entry:
    # qkv, position_ids, cos_sin, out; rotated heads, head_dim; a unit is a token
    matrix = _matrix_of(view)

    @inlined
    def rotate(arguments, first, last):
        qkv, ids, cos_sin = matrix(arguments, 0), _ids(arguments, 1), _fp32(arguments, 2)
        out, heads, head_dim = matrix(arguments, 3), _number(arguments, 12), _number(arguments, 13)
        half, width = cos_sin.shape[1] // 2, qkv.shape[1]
        for row in range(first, last):
            place = ids[row]
            for head in range(heads):
                begin = head * head_dim
                for i in range(0, half, LANES):
                    count, other = min(LANES, half - i), begin + half + i
                    one = load_first(qkv, row, begin + i, count)
                    two = load_first(qkv, row, other, count)
                    cos = load_first(cos_sin, place, i, count)
                    sin = load_first(cos_sin, place, half + i, count)
                    store_first(out, row, begin + i, one * cos - two * sin, count)
                    store_first(out, row, other, two * cos + one * sin, count)
                for i in range(begin + 2 * half, begin + head_dim):
                    out[row, i] = qkv[row, i]
            for i in range(heads * head_dim, width):
                out[row, i] = qkv[row, i]
        return 0

    return rotate


@inlined
def _step_beams(arguments, first, last):
    # logits, scores, finished, bounds of the edits of rows, their tokens and factors, tokens, parents, scores; a unit
    # is a sequence
    return step_sequences(
        first,
        last,
        _fp32(arguments, 0),
        _fp32(arguments, 1),
        _bytes(arguments, 2),
        _long_ids(arguments, 3),
        _ids(arguments, 4),
        _fp32_numbers(arguments, 5),
        _id_rows(arguments, 6),
        _id_rows(arguments, 7),
        _fp32(arguments, 8),
    )


@inlined
def _sample(arguments, first, last):
    # logits, temperature, top_k, top_p, min_p, uniform, out; a unit is a row
    return sample_rows(
        first,
        last,
        _fp32(arguments, 0),
        _bits(arguments, 0),
        _fp32_numbers(arguments, 1),
        _ids(arguments, 2),
        _fp32_numbers(arguments, 3),
        _fp32_numbers(arguments, 4),
        _fp64_numbers(arguments, 5),
        _ids(arguments, 6),
    )


@inlined
def _run_shared(table, rows, columns, counts, stay, spent):
    # see call_code.run_shared
    run_shared(table, rows, columns, counts, stay, spent)
    return 0


@inlined
def _run_alone(table, rows, columns):
    # see call_code.run_alone
    return run_alone(table, rows, columns)


# Of ops in fp32 and bf16: the same function for another type, by name.
_IN_BOTH_DTYPES: Mapping[str, Callable[[Any], Entry]] = {
    "multiply": _multiply,
    "norm": _norm,
    "activate": _activate,
    "gather": _gather,
    "append": _append,
    "attend_tokens": partial(_attend_blocks, attend_tokens),
    "attend_chunks": partial(_attend_blocks, attend_chunks),
    "attend": _attend,
    "attend_distances": _attend_distances,
    "rotate": _rotate,
}
# What makes the function of each name.
MAKERS: Mapping[str, Callable[[], Entry]] = {
    **{name: partial(make, fp32_matrix) for name, make in _IN_BOTH_DTYPES.items()},
    **{f"{name}_bf16": partial(make, bf16_matrix) for name, make in _IN_BOTH_DTYPES.items()},
    "multiply_int8": partial(_multiply_codes, int8_matrix),
    "multiply_int4": partial(_multiply_codes, uint8_matrix),
    "copy_blocks": lambda: _copy_blocks,
    "quantize": lambda: _quantize,
    "dequantize": partial(_dequantize, fp32_matrix),
    "dequantize_int32": partial(_dequantize, int32_matrix),
    "step_beams": lambda: _step_beams,
    "sample": lambda: _sample,
    "run_shared": lambda: _run_shared,
    "run_alone": lambda: _run_alone,
}
