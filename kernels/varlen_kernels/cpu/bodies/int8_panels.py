"""Linear layers in int8 with what follows them, compiled by numba.

A block of tokens becomes codes, and its products with each panel of the weight become numbers while they are in
registers and the first-level cache: scales, outliers, bias and activation cost no pass over memory. A token has the
same result by itself and in a batch, and on any number of threads, to the last bit.
Source: the specifications are the functions of `reference.linear_int8`.
"""

from varlen_kernels.cpu.bodies.epilogues import activated, load_within, store_within
from varlen_kernels.cpu.bodies.int8_layout import TILE_FEATURES, TILE_ROWS
from varlen_kernels.cpu.bodies.int8_rows import keep_columns, quantize_row, whole_vectors
from varlen_kernels.cpu.bodies.int8_tile import multiply_pair, multiply_row, multiply_tile, prefetch
from varlen_kernels.cpu.native.lanes import load, multiply_add, splat
from varlen_kernels.cpu.native.native import (
    aligned,
    clear,
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    new_memory,
    uint8_matrix,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.op_table import BLOCK, NO_ACTIVATION
from varlen_kernels.reference.linear_int8 import FACTORS


@inlined
def _prefetch_tile(out, to_row, rows, first_column):
    """Have the memory of a tile's results in the cache when they are there."""
    for i in range(rows):
        for column in range(first_column, min(first_column + TILE_FEATURES, out.shape[1]), LANES):
            prefetch(out, to_row + i, column)


@inlined
def _multiply_tile(codes, tile, rows, panels, panel, sums):
    """Write the products of the rows of a tile; others have no meaning."""
    if rows == 1:
        multiply_row(codes, tile, panels, panel, sums)
    elif rows == 2:
        multiply_pair(codes, tile, panels, panel, sums)
    else:
        multiply_tile(codes, tile, panels, panel, sums)


@inlined
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


@inlined
def _activate_tile(values, rows, first_column, kind, out, to_row):
    """Write the activation of the first rows of a tile."""
    for i in range(rows):
        for column in range(first_column, min(first_column + TILE_FEATURES, out.shape[1]), LANES):
            value = load(values, i, column - first_column)
            store_within(out, to_row + i, column, activated(value, kind))


@inlined_body
def multiply_codes(
    first_unit,
    last_unit,
    x,  # [tokens, hidden]
    panels,  # see int8_layout.pack_panels and pack_halves
    scale,  # [1, features]
    fp32_rows,  # [2 + OUTLIERS, features]
    outliers,  # [OUTLIERS], ascending
    levels,
    kind,
    out,  # [tokens, features]
):
    """Write the results of some units; return whether memory ran out.

    A unit is a panel of a block of tokens; the panels of a block come one after another.
    """
    columns = whole_vectors(x.shape[1])
    code_bytes, factor_bytes = aligned(BLOCK * columns), aligned(4 * BLOCK * FACTORS)
    kept_bytes = aligned(4 * columns)
    memory = new_memory(code_bytes + factor_bytes + kept_bytes + 4 * TILE_ROWS * TILE_FEATURES)
    if memory == 0:
        return 1
    # the last tile has rows past the last token, whose results are not written
    clear(memory, code_bytes + factor_bytes)
    codes = uint8_matrix(memory, BLOCK, columns)
    factors = fp32_matrix(memory + code_bytes, BLOCK, FACTORS)
    kept = fp32_matrix(memory + code_bytes + factor_bytes, 1, columns)
    sums = fp32_matrix(memory + code_bytes + factor_bytes + kept_bytes, TILE_ROWS, TILE_FEATURES)
    keep_columns(outliers, x.shape[1], kept)
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
    free_memory(memory)
    return 0
