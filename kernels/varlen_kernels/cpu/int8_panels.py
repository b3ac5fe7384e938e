"""Linear layers in int8 with what follows them, compiled by numba.

A block of tokens becomes codes, and its products with each panel of the weight become numbers while they are in
registers and the first-level cache: scales, outliers, bias and activation cost no pass over memory. A token has the
same result by itself and in a batch, and on any number of threads, to the last bit.
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
    activated,
    load_within,
    store_within,
)
from varlen_kernels.cpu.int8_rows import FACTORS, kept_columns, quantize_row
from varlen_kernels.cpu.int8_tile import (
    TILE_FEATURES,
    TILE_ROWS,
    multiply_pair,
    multiply_row,
    multiply_tile,
    prefetch,
)
from varlen_kernels.cpu.lanes import LANES, load, multiply_add, splat
from varlen_kernels.cpu.stored_code import stored
from varlen_kernels.cpu.threads import run_parts, usable_cores
from varlen_kernels.reference.linear_int8 import Int8Weight

# Tokens whose codes and results stay in the second-level cache; a multiple of TILE_ROWS.
BLOCK = 96
# Multiplications below which a second thread costs more than it saves.
_LEAST_SHARED_WORK = 1 << 25
# Parts of each core: each part makes the codes of its tokens.
_PARTS = 2


def multiply_panels(
    x: Tensor, layer: Int8Weight, *, kind: Activation | None = None, out: Tensor | None
) -> Tensor:
    """Return `linear_int8` or its activation.

    Args:
        x, kind: see the reference.
        layer: weight and bias; `int8_tile.pack_panels` or `pack_halves` made the codes.
    """
    if out is None:
        out = torch.empty(len(x), layer.scale.shape[0])
    units, parts = -(-len(x) // BLOCK) * len(layer.codes), 1
    if len(x) * layer.codes.numel() >= _LEAST_SHARED_WORK and usable_cores() > 1:
        parts = _PARTS * usable_cores()
    run_parts(
        multiply_int8_units,
        [units * part // parts for part in range(parts + 1)],
        x.numpy(),
        layer.codes.numpy(),
        layer.scale.numpy()[None],
        layer.fp32_rows.numpy(),
        layer.outliers.numpy(),
        layer.levels,
        ACTIVATIONS[kind],
        out.numpy(),
    )
    return out


@numba.njit(forceinline=True, _nrt=False)
def _prefetch_tile(out, to_row, rows, first_column):
    """Have the memory of a tile's results in the cache when they are there."""
    for i in range(rows):
        for column in range(first_column, min(first_column + TILE_FEATURES, out.shape[1]), LANES):
            prefetch(out, to_row + i, column)


@numba.njit(forceinline=True, _nrt=False)
def _multiply_tile(codes, tile, rows, panels, panel, sums):
    """Write the products of the rows of a tile; others have no meaning."""
    if rows == 1:
        multiply_row(codes, tile, panels, panel, sums)
    elif rows == 2:
        multiply_pair(codes, tile, panels, panel, sums)
    else:
        multiply_tile(codes, tile, panels, panel, sums)


@numba.njit(forceinline=True, _nrt=False)
def _scale_tile(sums, rows, factors, tile, scale, fp32_rows, first_column, out, to_row, to_column):
    """Write the values of sums, with outliers and bias.

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
            store_within(out, to_row + i, to_column + lane, value)


@numba.njit(forceinline=True, _nrt=False)
def _activate_tile(values, rows, first_column, kind, out, to_row):
    """Write the activation of the first rows of a tile."""
    for i in range(rows):
        for column in range(first_column, min(first_column + TILE_FEATURES, out.shape[1]), LANES):
            value = load(values, i, column - first_column)
            store_within(out, to_row + i, column, activated(value, kind))


@stored()
def multiply_int8_units(
    first_unit,
    last_unit,
    x,  # [tokens, hidden]
    panels,  # see int8_tile.pack_panels and pack_halves
    scale,  # [1, features]
    fp32_rows,  # [2 + OUTLIERS, features]
    outliers,  # [OUTLIERS], ascending
    levels,
    kind,
    out,  # [tokens, features]
):
    """Write the results of some units: panels of blocks of tokens, block by block."""
    kept = kept_columns(outliers, x.shape[1])
    # the last tile has rows past the last token, whose results are not written
    codes = np.zeros((BLOCK, kept.shape[1]), np.uint8)
    factors = np.zeros((BLOCK, FACTORS), np.float32)
    sums = np.empty((TILE_ROWS, TILE_FEATURES), np.float32)
    unit = first_unit
    while unit < last_unit:
        block, panel = unit // len(panels) * BLOCK, unit % len(panels)
        panel_end = min(len(panels), panel + last_unit - unit)
        unit += panel_end - panel
        count = min(BLOCK, len(x) - block)
        for i in range(count):
            quantize_row(x, block + i, outliers, kept, levels, 0, codes, factors, i)
        while panel < panel_end:
            for tile in range(0, count, TILE_ROWS):
                column, rows = panel * TILE_FEATURES, min(TILE_ROWS, count - tile)
                _prefetch_tile(out, block + tile, rows, column)
                _multiply_tile(codes, tile, rows, panels, panel, sums)
                of_tile = sums, rows, factors, tile, scale, fp32_rows, column
                if kind == NO_ACTIVATION:
                    _scale_tile(*of_tile, out, block + tile, column)
                else:
                    _scale_tile(*of_tile, sums, 0, 0)
                    _activate_tile(sums, rows, column, kind, out, block + tile)
            panel += 1
