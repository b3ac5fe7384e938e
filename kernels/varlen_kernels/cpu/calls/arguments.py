"""The arguments of functions of `entries`, as numbers and arrays.

An argument is a place in memory: three numbers for each tensor, which are its address, its rows and its columns, all 0
where it is left out; then constants, a float as the bits of a double.
"""

from typing import Any

import numpy as np

from varlen_kernels.cpu.native.native import (
    fp32_matrix,
    fp32_vector,
    fp64_vector,
    inlined,
    inlined_view,
    int32_matrix,
    int32_vector,
    int64_vector,
    uint8_matrix,
    uint8_vector,
    uint32_matrix,
)


@inlined
def number(arguments, place):
    """Return the whole number at a place of the arguments."""
    return int64_vector(arguments, place + 1)[place]


@inlined
def fp32_number(arguments, place):
    """Return the number at a place of the arguments, as fp32."""
    return np.float32(fp64_vector(arguments, place + 1)[place])


@inlined
def address(arguments, tensor):
    """Return the address of a tensor."""
    return number(arguments, 3 * tensor)


@inlined
def rows_of(arguments, tensor):
    """Return the rows of a tensor."""
    return number(arguments, 3 * tensor + 1)


@inlined
def columns_of(arguments, tensor):
    """Return the columns of a tensor: axes after the first count as one."""
    return number(arguments, 3 * tensor + 2)


@inlined
def count_of(arguments, tensor):
    """Return the numbers of a tensor."""
    return rows_of(arguments, tensor) * columns_of(arguments, tensor)


def matrix_of(view: Any) -> Any:
    """Return a reader of tensors, `[rows, columns]`."""

    @inlined_view
    def matrix(arguments, tensor):
        rows, columns = rows_of(arguments, tensor), columns_of(arguments, tensor)
        return view(address(arguments, tensor), rows, columns)

    return matrix


def vector_of(view: Any) -> Any:
    """Return a reader of tensors as one axis."""

    @inlined_view
    def vector(arguments, tensor):
        return view(address(arguments, tensor), count_of(arguments, tensor))

    return vector


def row_of(view: Any) -> Any:
    """Return a reader of tensors as one row, `[1, numbers]`; `[0, 0]` for none."""

    @inlined_view
    def row(arguments, tensor):
        numbers = count_of(arguments, tensor)
        return view(address(arguments, tensor), min(1, numbers), numbers)

    return row


def cache_of(view: Any) -> Any:
    """Return a reader of KV caches, `[rows, head_dim]`."""

    @inlined_view
    def cache(arguments, tensor, head_dim):
        rows = count_of(arguments, tensor) // head_dim
        return view(address(arguments, tensor), rows, head_dim)

    return cache


fp32, fp32_numbers, fp32_row = (
    matrix_of(fp32_matrix),
    vector_of(fp32_vector),
    row_of(fp32_matrix),
)
fp64_numbers = vector_of(fp64_vector)
codes_of, id_rows, bit_rows = map(matrix_of, (uint8_matrix, int32_matrix, uint32_matrix))
ids_of, long_ids_of, bytes_of = map(vector_of, (int32_vector, int64_vector, uint8_vector))


@inlined_view
def bias_of_heads(arguments, tensor, num_heads):
    """Return the bias of scores, `[num_heads, distances]`; no distances if it is left out."""
    return fp32_matrix(address(arguments, tensor), num_heads, columns_of(arguments, tensor))
