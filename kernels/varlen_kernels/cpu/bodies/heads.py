"""Norms and rotary positions of heads on CPUs, for functions that numba compiles.

Source: the specifications are `reference.norm_heads` and `reference.rotary`.
"""

import numpy as np

from varlen_kernels.cpu.bodies.epilogues import (
    load_up_to,
    load_within,
    store_up_to,
    store_within,
)
from varlen_kernels.cpu.native.lanes import multiply_add, splat, sum_of
from varlen_kernels.cpu.native.native import inlined, inlined_body
from varlen_kernels.cpu.native.target_cpu import LANES

_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined
def write_rotated_head(
    source,
    row,
    column,
    head_dim,
    weight,  # [1, head_dim] of a norm before the rotation, or [0, 0] for none
    eps,
    cos_sin,  # [positions, 2 * half]
    position,
    destination,
    to_row,
    to_column,
):
    """Write a head, normed and rotated; it may be written over itself."""
    half, is_normed = cos_sin.shape[1] // 2, weight.shape[1] > 0
    factor = splat(_ONE)
    if is_normed:
        factor = splat(_factor_of(source, row, column, head_dim, eps))
    for i in range(0, half, LANES):
        count, other = half - i, half + i
        one = load_up_to(source, row, column + i, count)
        two = load_up_to(source, row, column + other, count)
        if is_normed:
            one = one * factor * load_up_to(weight, 0, i, count)
            two = two * factor * load_up_to(weight, 0, other, count)
        cos = load_up_to(cos_sin, position, i, count)
        sin = load_up_to(cos_sin, position, other, count)
        store_up_to(destination, to_row, to_column + i, one * cos - two * sin, count)
        store_up_to(destination, to_row, to_column + other, two * cos + one * sin, count)
    for i in range(2 * half, head_dim, LANES):
        value = load_up_to(source, row, column + i, head_dim - i)
        if is_normed:
            value = value * factor * load_up_to(weight, 0, i, head_dim - i)
        store_up_to(destination, to_row, to_column + i, value, head_dim - i)


@inlined
def _factor_of(source, row, column, head_dim, eps):
    """Return 1 over the root of a head's mean square."""
    total = splat(_ZERO)
    for i in range(0, head_dim, LANES):
        value = load_up_to(source, row, column + i, head_dim - i)
        total = multiply_add(value, value, total)
    return _ONE / np.sqrt(sum_of(total) / np.float32(head_dim) + eps)


@inlined_body
def rotate(
    first,
    last,
    qkv,  # [tokens, width]
    position_ids,  # [tokens]
    cos_sin,
    no_weight,
    heads,
    head_dim,
    out,  # [tokens, width]
):
    """Write the rows of some tokens, whose first heads are rotated."""
    for row in range(first, last):
        position = np.int64(position_ids[row])
        for head in range(heads):
            column, to = head * head_dim, row
            write_rotated_head(
                qkv, row, column, head_dim, no_weight, _ZERO, cos_sin, position, out, to, column
            )
        for column in range(heads * head_dim, qkv.shape[1], LANES):
            store_within(out, row, column, load_within(qkv, row, column))
    return 0
