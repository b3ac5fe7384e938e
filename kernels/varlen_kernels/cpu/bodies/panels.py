"""Linear layers with what follows them, compiled by numba.

The weight is in panels, which `panel_tile` multiplies. Many tokens are multiplied in blocks whose rows stay in the
second-level cache while each panel passes; few tokens are split over cores by panels. Bias and activation are added to
a tile while it is in the first-level cache. bf16 is summed in fp32; where the CPU does not multiply it, it is widened
when it is loaded.
A token has the same result by itself and in a batch, and on any number of threads, to the last bit.
Source: the specifications are `reference.linear` and `reference.activate`.
"""

from varlen_kernels.cpu.bodies.epilogues import activated, load_within, store_within
from varlen_kernels.cpu.bodies.panel_layout import HAS_PAIRS, PANEL_FEATURES, TILE_ROWS
from varlen_kernels.cpu.bodies.panel_tile import multiply_rows
from varlen_kernels.cpu.native.lanes import load
from varlen_kernels.cpu.native.native import (
    aligned,
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.op_table import BLOCK, NO_ACTIVATION


@inlined
def _finish_tile(sums, rows, panel, bias, layer, kind, out, to_row):
    """Write the results of the first rows of a tile."""
    first = panel * PANEL_FEATURES
    for lane in range(0, min(PANEL_FEATURES, out.shape[1] - first), LANES):
        column = first + lane
        for i in range(rows):
            value = load(sums, i, lane)
            if bias.shape[1]:
                value = value + load_within(bias, layer, column)
            if kind != NO_ACTIVATION:
                value = activated(value, kind)
            store_within(out, to_row + i, column, value)


@inlined
def multiply_block(
    first, last, first_panel, last_panel, x, wide, panels, bias, layer, kind, sums, out
):
    """Write some features of up to a block of tokens.

    Args:
        first_panel, last_panel: bounds of its panels in the layer.
        panels, bias: panels and biases of layers of one size, one after another.
        layer: number of the layer.
    """
    begin_panel = layer * ((out.shape[1] + PANEL_FEATURES - 1) // PANEL_FEATURES)
    count = last - first
    tiles = (count + TILE_ROWS - 1) // TILE_ROWS
    is_ready = wide.shape[1] == 0
    if not is_ready:
        for i in range(count):
            for column in range(0, x.shape[1], LANES):
                store_within(wide, i, column, load_within(x, first + i, column))
    for panel in range(first_panel, last_panel):
        # tiles of about the same height: a low one takes as long as one of four rows
        for tile in range(tiles):
            begin, end = count * tile // tiles, count * (tile + 1) // tiles
            if is_ready:
                multiply_rows(end - begin, x, first + begin, panels, begin_panel + panel, sums)
            else:
                multiply_rows(end - begin, wide, begin, panels, begin_panel + panel, sums)
            _finish_tile(sums, end - begin, panel, bias, layer, kind, out, first + begin)


@inlined_body
def multiply(
    first_unit,
    last_unit,
    x,  # [tokens, hidden]
    panels,  # see panel_layout.pack_panels
    bias,  # [1, features], or [1, 0] for none
    kind,
    out,  # [tokens, features]
):
    """Write the results of some units, by block; return whether memory ran out."""
    wide_features = 0 if x.itemsize == 4 or HAS_PAIRS else x.shape[1]
    sum_bytes = aligned(4 * TILE_ROWS * PANEL_FEATURES)
    memory = new_memory(sum_bytes + 4 * BLOCK * wide_features)
    if memory == 0:
        return 1
    sums = fp32_matrix(memory, TILE_ROWS, PANEL_FEATURES)
    wide = fp32_matrix(memory + sum_bytes, BLOCK, wide_features)
    unit = first_unit
    while unit < last_unit:
        block, panel = unit // len(panels), unit % len(panels)
        count = min(len(panels) - panel, last_unit - unit)
        first = block * BLOCK
        multiply_block(
            first,
            min(first + BLOCK, len(x)),
            panel,
            panel + count,
            x,
            wide,
            panels,
            bias,
            0,
            kind,
            sums,
            out,
        )
        unit += count
    free_memory(memory)
    return 0
