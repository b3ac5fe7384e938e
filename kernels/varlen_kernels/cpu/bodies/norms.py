"""Norms of rows on CPUs, for functions that numba compiles.

Source: the specifications are the norms of `reference`; Zhang, Sennrich 2019, arXiv:1910.07467 for `is_rms`.
"""

import numpy as np

from varlen_kernels.cpu.bodies.epilogues import load_within, normalize_row, store_within
from varlen_kernels.cpu.native.lanes import multiply_add, splat, sum_of
from varlen_kernels.cpu.native.native import inlined, inlined_body
from varlen_kernels.cpu.native.target_cpu import LANES

_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined
def _divide_by_root_mean_square(matrix, row, weight, eps, out):
    """Write the RMS norm of a row into `out`, which may be `matrix`."""
    features = matrix.shape[1]
    total = splat(_ZERO)
    for column in range(0, features, LANES):
        value = load_within(matrix, row, column)
        total = multiply_add(value, value, total)
    factor = _ONE / np.sqrt(sum_of(total) / np.float32(features) + eps)
    for column in range(0, features, LANES):
        scaled = load_within(matrix, row, column) * splat(factor)
        store_within(out, row, column, scaled * load_within(weight, 0, column))


@inlined_body
def norm(
    first,
    last,
    x,  # [tokens, hidden]
    residual,  # [tokens, hidden], or [0, 0] for none
    weight,  # [1, hidden]
    bias,  # [1, hidden], or [0, 0] for none
    eps,
    is_rms,
    total,  # [tokens, hidden], gets the sum with a residual
    out,  # [tokens, hidden]
):
    """Write the norms of some rows."""
    rows = x
    if residual.shape[1]:
        for row in range(first, last):
            for column in range(0, x.shape[1], LANES):
                value = load_within(x, row, column) + load_within(residual, row, column)
                store_within(total, row, column, value)
        rows = total
    for row in range(first, last):
        if is_rms:
            _divide_by_root_mean_square(rows, row, weight, eps, out)
        else:
            normalize_row(rows, row, weight, bias, eps, out)
    return 0
