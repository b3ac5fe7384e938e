"""Linear layers in int8 with what follows them, compiled by numba for CPUs with VNNI.

A block of tokens becomes codes, and its products with each panel of the weight become numbers while they are in
registers and the first-level cache: scales, outliers, bias, activation and residual cost no pass over memory. A layer
norm reads the block's rows while they are in the second-level cache. A token has the same result by
itself and in a batch, to the last bit.
Source: the specifications are the functions of `reference.linear_int8`.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from varlen_kernels import Activation
from varlen_kernels.cpu.epilogues import (
    ACTIVATIONS,
    NO_ACTIVATION,
    NO_MATRIX,
    LayerNorm,
    activated,
    load_within,
    normalize_row,
    store_within,
)
from varlen_kernels.cpu.int8_rows import FACTORS, kept_columns, quantize_row
from varlen_kernels.cpu.int8_tile import TILE_FEATURES, TILE_ROWS, multiply_tile, prefetch
from varlen_kernels.cpu.lanes import LANES, load, multiply_add, splat
from varlen_kernels.cpu.threads import run_parts, usable_cores
from varlen_kernels.reference.linear_int8 import Int8Weight

# Tokens whose codes and results stay in the second-level cache; a multiple of TILE_ROWS.
_BLOCK = 96
# Multiplications below which a second thread costs more than it saves.
_LEAST_SHARED_WORK = 1 << 25


def multiply_panels(
    x: Tensor,
    layer: Int8Weight,
    *,
    kind: Activation | None = None,
    norm: LayerNorm | None = None,
    out: Tensor | None,
) -> Tensor:
    """Return `linear_int8`, its activation, or its layer norm after a residual sum.

    Args:
        x, kind: see the reference.
        layer: weight and bias; `int8_tile.pack_panels` made the codes.
        norm: layer norm that follows, if there is no activation.
    """
    tokens = x.shape[0]
    if out is None:
        out = torch.empty(tokens, layer.scale.shape[0])
    residual = weight = bias = NO_MATRIX
    if norm is not None:
        residual, weight = norm.residual.numpy(), norm.weight.numpy()[None]
        bias = NO_MATRIX if norm.bias is None else norm.bias.numpy()[None]
    bounds = [0, tokens]
    if tokens * layer.codes.numel() >= _LEAST_SHARED_WORK:
        parts = min(usable_cores(), -(-tokens // TILE_ROWS))
        bounds = [tokens * part // parts for part in range(parts + 1)]
    run_parts(
        _multiply_rows,
        bounds,
        x.numpy(),
        layer.codes.numpy(),
        layer.scale.numpy()[None],
        layer.fp32_rows.numpy(),
        layer.outliers.numpy(),
        residual,
        weight,
        bias,
        out.numpy(),
        layer.levels,
        ACTIVATIONS[kind],
        np.float32(norm.eps if norm else 0),
    )
    return out


@numba.njit(forceinline=True, _nrt=False)
def _prefetch_tile(out, to_row, rows, first_column):
    """Have the memory of a tile's results in the cache when they are there."""
    for i in range(rows):
        for column in range(first_column, min(first_column + TILE_FEATURES, out.shape[1]), LANES):
            prefetch(out, to_row + i, column)


@numba.njit(forceinline=True, _nrt=False)
def _scale_tile(
    sums, rows, factors, tile, scale, fp32_rows, first_column, residual, out, to_row, to_column
):
    """Write the values of sums, with outliers, bias and a residual that is not empty.

    Args:
        sums: `[TILE_ROWS, TILE_FEATURES]`; the first rows count.
        factors: `[tokens, FACTORS]`, the rows of the tile start at row `tile`.
        first_column: column of the tile in `scale` and `fp32_rows`.
        out: may be `sums`.
    """
    for lane in range(0, min(TILE_FEATURES, scale.shape[1] - first_column), LANES):
        column = first_column + lane
        scales = load_within(scale, 0, column)
        weight_sums, bias = load_within(fp32_rows, 0, column), load_within(fp32_rows, 1, column)
        # one name for each of OUTLIERS
        first, second = load_within(fp32_rows, 2, column), load_within(fp32_rows, 3, column)
        third, fourth = load_within(fp32_rows, 4, column), load_within(fp32_rows, 5, column)
        for i in range(rows):
            row = tile + i
            value = multiply_add(splat(factors[row, 1]), weight_sums, bias)
            value = multiply_add(splat(factors[row, 2]), first, value)
            value = multiply_add(splat(factors[row, 3]), second, value)
            value = multiply_add(splat(factors[row, 4]), third, value)
            value = multiply_add(splat(factors[row, 5]), fourth, value)
            steps = load(sums, i, lane) * splat(factors[row, 0])
            value = multiply_add(steps, scales, value)
            if residual.shape[1]:
                value = value + load_within(residual, to_row + i, column)
            store_within(out, to_row + i, to_column + lane, value)


@numba.njit(forceinline=True, _nrt=False)
def _activate_tile(values, rows, first_column, kind, out, to_row):
    """Write the activation of the first rows of a tile."""
    for i in range(rows):
        for column in range(first_column, min(first_column + TILE_FEATURES, out.shape[1]), LANES):
            value = load(values, i, column - first_column)
            store_within(out, to_row + i, column, activated(value, kind))


# a row without variance divides by zero where eps is 0, which gives NaN
@numba.njit(nogil=True, cache=True, error_model="numpy")
def _multiply_rows(
    first_token,
    last_token,
    x,  # [tokens, hidden]
    panels,  # see int8_tile.pack_panels
    scale,  # [1, features]
    fp32_rows,  # [2 + OUTLIERS, features]
    outliers,  # [OUTLIERS], ascending
    residual,  # [tokens, features], or [0, 0] for none
    weight,  # [1, features] of the norm, or [0, 0] for none
    bias,  # the same
    out,  # [tokens, features]
    levels,
    kind,
    eps,
):
    """Write the results of some tokens."""
    kept = kept_columns(outliers, x.shape[1])
    # the last tile has rows past the last token, whose results are not written
    codes = np.zeros((_BLOCK, kept.shape[1]), np.uint8)
    factors = np.zeros((_BLOCK, FACTORS), np.float32)
    sums = np.empty((TILE_ROWS, TILE_FEATURES), np.float32)
    for block in range(first_token, last_token, _BLOCK):
        count = min(_BLOCK, last_token - block)
        for i in range(count):
            quantize_row(x, block + i, outliers, kept, levels, 0, codes, factors, i)
        for panel in range(len(panels)):
            for tile in range(0, count, TILE_ROWS):
                column, rows = panel * TILE_FEATURES, min(TILE_ROWS, count - tile)
                _prefetch_tile(out, block + tile, rows, column)
                multiply_tile(codes, tile, panels, panel, sums)
                of_tile = sums, rows, factors, tile, scale, fp32_rows, column
                if kind == NO_ACTIVATION:
                    _scale_tile(*of_tile, residual, out, block + tile, column)
                else:
                    _scale_tile(*of_tile, residual, sums, 0, 0)
                    _activate_tile(sums, rows, column, kind, out, block + tile)
        if weight.shape[1]:
            for i in range(count):
                normalize_row(out, block + i, weight, bias, eps, out)
