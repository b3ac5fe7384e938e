"""Linear layers in int8 with what follows them, on one core or on several.

Tokens or panels of features are shared. Either way a result has the same bits on any number of threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from varlen_kernels import Activation
from varlen_kernels.cpu.int8_panels import (
    BLOCK,
    GELU,
    GELU_TANH,
    NO_ACTIVATION,
    RELU,
    SILU,
    multiply_rows,
    normalize_rows,
)
from varlen_kernels.cpu.int8_tile import TILE_ROWS
from varlen_kernels.cpu.team import PART, pointer_of, run_team, take_part
from varlen_kernels.cpu.threads import has_own_cores, run_parts, usable_cores
from varlen_kernels.reference.linear_int8 import OUTLIERS, Int8Weight

# Multiplications below which a second thread costs more than it saves: one that sleeps, and one of torch's team.
_LEAST_SHARED_WORK = 1 << 25
_LEAST_TEAM_WORK = 1 << 21
# Stands for a matrix that is left out, or for vectors.
_NONE, _NO_VECTOR = torch.empty(0, 0), torch.empty(0)
_ACTIVATIONS: Mapping[Activation | None, int] = {
    None: NO_ACTIVATION,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "silu": SILU,
    "relu": RELU,
}
# Numbers before the addresses of tensors, with the counter of parts; tensors of `_Operands`.
_SIZES, _ARRAYS = 13, 11


@dataclass(frozen=True, slots=True)
class ResidualNorm:
    """The residual sum and norm after a linear layer.

    Attributes:
        residual: `[tokens, features]` fp32, may be `out` or `total`.
        weight, bias: `[features]`.
        eps: added to the variance, or to the mean square.
        total: memory of the sum, if it is a result too.
        is_rms: whether it is an RMS norm; else a layer norm.
    """

    residual: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float
    total: Tensor | None = None
    is_rms: bool = False


class _Operands(NamedTuple):
    """The tensors of `multiply_rows`; those that are left out are empty."""

    x: Tensor
    panels: Tensor
    scale: Tensor
    fp32_rows: Tensor
    outliers: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor
    eps: Tensor
    out: Tensor
    normed: Tensor


def multiply_panels(
    x: Tensor,
    layer: Int8Weight,
    *,
    kind: Activation | None = None,
    norm: ResidualNorm | None = None,
    out: Tensor | None,
) -> Tensor:
    """Return `linear_int8`, its activation, or its norm after a residual sum.

    Args:
        x, kind: see the reference; all tensors are contiguous.
        layer: weight and bias; `int8_tile.pack_panels` made the codes.
        norm: sum and norm that follow, if there is no activation.
    """
    if out is None:
        out = torch.empty(x.shape[0], layer.scale.shape[0])
    residual, weight, bias, eps = _NONE, _NO_VECTOR, _NO_VECTOR, _NO_VECTOR
    if norm is not None:
        residual, weight, eps = norm.residual, norm.weight, torch.tensor([norm.eps])
        bias = torch.zeros_like(weight) if norm.bias is None else norm.bias
    codes, scale, fp32_rows, outliers, levels = layer
    total = out if norm is None or norm.total is None else norm.total
    factors = x, codes, scale, fp32_rows, outliers
    operands = _Operands(*factors, residual, weight, bias, eps, total, out)
    options = levels, _ACTIVATIONS[kind], norm is not None and norm.is_rms
    work, cores = len(x) * codes.numel(), usable_cores()
    has_team = cores > 1 and work >= _LEAST_TEAM_WORK and not has_own_cores()
    if has_team and _run_team(operands, options, cores):
        return out
    bounds = [0, len(x)]
    if work >= _LEAST_SHARED_WORK:
        parts = min(cores, -(-len(x) // TILE_ROWS))
        bounds = [len(x) * part // parts for part in range(parts + 1)]
    arrays = [each.numpy() for each in operands]
    run_parts(multiply_rows, bounds, 0, len(codes), *arrays, *options)
    return out


def _run_team(operands: _Operands, options: tuple[int, int, bool], cores: int) -> bool:
    """Multiply on torch's threads: blocks of tokens, or panels of fewer tokens.

    Return False if there are no such threads.
    """
    x, panels, weight = operands.x, operands.panels, operands.weight
    by_panel = len(x) < cores * BLOCK
    # a norm needs all panels
    is_normed_later = by_panel and len(weight) > 0
    norm_features = 0 if is_normed_later else len(weight)
    sizes = *x.shape, *panels.shape, len(operands.scale), len(operands.residual), norm_features
    addresses = [each.data_ptr() for each in operands]
    arguments = [cores, by_panel, *sizes, *options, *addresses]
    if not run_team(_multiply_part.address, arguments, cores):
        return False
    if is_normed_later:
        arrays = operands.out, weight, operands.bias, operands.eps, operands.normed
        normalize_rows(*(each.numpy() for each in arrays), options[-1])
    return True


@numba.cfunc(PART, cache=True)
def _multiply_part(arguments):
    """Write the results of parts of tokens or panels until none is left."""
    numbers = numba.carray(arguments, _SIZES + _ARRAYS, np.int64)
    parts, by_panel, tokens, hidden = numbers[1], numbers[2], numbers[3], numbers[4]
    panels, panel_bytes, features = numbers[5], numbers[6], numbers[7]
    residual_rows, norm_features = numbers[8], numbers[9]
    to, at = numba.carray, _SIZES
    while True:
        part = take_part(arguments)
        if part >= parts:
            return
        first, last = part, part + 1
        multiply_rows(
            0 if by_panel else tokens * first // parts,
            tokens if by_panel else tokens * last // parts,
            panels * first // parts if by_panel else 0,
            panels * last // parts if by_panel else panels,
            to(pointer_of(numbers[at]), (tokens, hidden), np.float32),
            to(pointer_of(numbers[at + 1]), (panels, panel_bytes), np.int8),
            to(pointer_of(numbers[at + 2]), (features,), np.float32),
            to(pointer_of(numbers[at + 3]), (2 + OUTLIERS, features), np.float32),
            to(pointer_of(numbers[at + 4]), (OUTLIERS,), np.int64),
            to(pointer_of(numbers[at + 5]), (residual_rows, features), np.float32),
            to(pointer_of(numbers[at + 6]), (norm_features,), np.float32),
            to(pointer_of(numbers[at + 7]), (norm_features,), np.float32),
            to(pointer_of(numbers[at + 8]), (1,), np.float32),
            to(pointer_of(numbers[at + 9]), (tokens, features), np.float32),
            to(pointer_of(numbers[at + 10]), (tokens, features), np.float32),
            numbers[10],
            numbers[11],
            numbers[12] != 0,
        )
