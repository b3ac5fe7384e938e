"""Rows of tables and activations on CPUs, for functions that numba compiles.

Source: the specifications are `reference.embed`, `reference.activate`, `reference.to_fp32` and `reference.local_ids`.
"""

import numpy as np

from varlen_kernels.cpu.bodies.epilogues import activated, load_up_to, load_within, store_within
from varlen_kernels.cpu.native.lanes import multiply_add, splat
from varlen_kernels.cpu.native.native import inlined_body
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.op_table import NO_ACTIVATION


@inlined_body
def activate(
    first,
    last,
    x,  # [tokens, features], or twice the features: the second half is a factor
    bias,  # [1, features], or [0, 0] for none
    kind,
    out,  # [tokens, features]
):
    """Write the activations of some rows."""
    features = out.shape[1]
    for row in range(first, last):
        for column in range(0, features, LANES):
            # not past the last feature, which the factors follow
            value = load_up_to(x, row, column, features - column)
            if bias.shape[1]:
                value = value + load_within(bias, 0, column)
            if kind != NO_ACTIVATION:
                value = activated(value, kind)
            if x.shape[1] > features:
                value = value * load_within(x, row, features + column)
            store_within(out, row, column, value)
    return 0


@inlined_body
def gather(
    first,
    last,
    ids,  # [tokens]
    table,  # [rows, hidden]
    ids_2,  # [tokens], or [0] for none, as are the others
    table_2,
    ids_3,
    table_3,
    scale,  # of the first table
    out,  # [tokens, hidden]
):
    """Write the sums of rows of up to three tables."""
    factor = splat(scale)
    for row in range(first, last):
        for column in range(0, out.shape[1], LANES):
            value = load_within(table, ids[row], column)
            if len(ids_2):
                value = multiply_add(value, factor, load_within(table_2, ids_2[row], column))
                if len(ids_3):
                    value = value + load_within(table_3, ids_3[row], column)
            else:
                value = value * factor
            store_within(out, row, column, value)
    return 0


@inlined_body
def widen(first, last, x, out):
    """Write some rows in fp32."""
    for row in range(first, last):
        for column in range(0, out.shape[1], LANES):
            store_within(out, row, column, load_within(x, row, column))
    return 0


@inlined_body
def local_ids(first, last, ids, begin, count, out):
    """Write the rows of some tokens in a part of a table."""
    for i in range(first, last):
        place = np.int64(ids[i]) - begin
        out[i] = place if 0 <= place < count else count
    return 0
