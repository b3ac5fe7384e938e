"""Rows and panels of attention on a CPU, and their products.

A panel holds 16 rows of a matrix, with the features as rows, so that 16 products with one row are one vector.
"""

import numpy as np

from varlen_kernels.cpu.lanes import load, load_first, multiply_add, splat, store
from varlen_kernels.cpu.native import inlined
from varlen_kernels.cpu.target_cpu import LANES

_ZERO = np.float32(0)
# Rows that are multiplied together: their sums are in registers.
ROWS = 4


@inlined
def copy_head(source, row, column, head_dim, destination, to_row):
    """Copy the features of one head as fp32, with zeros up to a whole vector."""
    whole = head_dim // LANES * LANES
    for feature in range(0, whole, LANES):
        store(destination, to_row, feature, load(source, row, column + feature))
    if whole < head_dim:
        rest = load_first(source, row, column + whole, head_dim - whole)
        store(destination, to_row, whole, rest)


@inlined
def clear_rows(matrix, first, last):
    """Write zeros into the rows from `first` to `last` - 1."""
    for row in range(first, last):
        for column in range(0, matrix.shape[1], LANES):
            store(matrix, row, column, splat(_ZERO))


@inlined
def multiply(out, row, column, factors, depth, matrix, first, matrix_column, is_first):
    """Write 4 x 16 numbers of a product, or add them to `out`."""
    if is_first:
        a = b = c = d = splat(_ZERO)
    else:
        a = load(out, row, column)
        b = load(out, row + 1, column)
        c = load(out, row + 2, column)
        d = load(out, row + 3, column)
    for i in range(depth):
        lanes = load(matrix, first + i, matrix_column)
        a = multiply_add(splat(factors[row, i]), lanes, a)
        b = multiply_add(splat(factors[row + 1, i]), lanes, b)
        c = multiply_add(splat(factors[row + 2, i]), lanes, c)
        d = multiply_add(splat(factors[row + 3, i]), lanes, d)
    store(out, row, column, a)
    store(out, row + 1, column, b)
    store(out, row + 2, column, c)
    store(out, row + 3, column, d)
