"""Norms of fp32 rows on CPUs, compiled by numba.

Source: the specifications are the norms of `reference`; Zhang, Sennrich 2019, arXiv:1910.07467 for `is_rms`.
"""

import numba
import numpy as np
from torch import Tensor

from varlen_kernels.cpu.epilogues import NO_MATRIX, load_within, normalize_row, store_within
from varlen_kernels.cpu.lanes import LANES, multiply_add, splat, sum_of
from varlen_kernels.cpu.stored_code import stored
from varlen_kernels.cpu.threads import run_parts, usable_cores

_ZERO, _ONE = np.float32(0), np.float32(1)
# Numbers below which a second thread costs more than it saves.
_LEAST_SHARED_WORK = 1 << 17


def norm_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    *,
    is_rms: bool,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Write the norm of each row of x, or of x + residual.

    Args:
        x, residual, out: `[tokens, hidden]` fp32.
        weight, bias: `[hidden]` fp32.
        eps: added to the variance or the mean square.
        total: gets x + residual; may be one of them, or `out`.
    """
    cores = usable_cores() if x.numel() >= _LEAST_SHARED_WORK else 1
    run_parts(
        norm_some_rows,
        [len(x) * part // cores for part in range(cores + 1)],
        x.numpy(),
        NO_MATRIX if residual is None else residual.numpy(),
        weight.numpy()[None],
        NO_MATRIX if bias is None else bias.numpy()[None],
        np.float32(eps),
        is_rms,
        (out if total is None else total).numpy(),
        out.numpy(),
    )


@numba.njit(forceinline=True, _nrt=False)
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


# a row without variance divides by zero where eps is 0, which gives NaN
@stored(_nrt=False, error_model="numpy")
def norm_some_rows(
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
