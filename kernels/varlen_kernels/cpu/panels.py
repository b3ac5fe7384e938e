"""Linear layers in fp32 with what follows them, compiled by numba.

The weight is in panels, which `panel_tile` multiplies. Many tokens are multiplied in blocks whose rows stay in the
second-level cache while each panel passes; few tokens are split over cores by panels. Bias and activation are added to
a tile while it is in the first-level cache. bf16 is widened when it is loaded, and summed in fp32.
A token has the same result by itself and in a batch, and on any number of threads, to the last bit.
Source: the specifications are `reference.linear` and `reference.activate`.
"""

import numba
import numpy as np
from torch import Tensor

from varlen_kernels import Activation
from varlen_kernels.cpu.epilogues import (
    ACTIVATIONS,
    NO_ACTIVATION,
    activated,
    load_within,
    store_within,
)
from varlen_kernels.cpu.lanes import LANES, as_array, load
from varlen_kernels.cpu.panel_ops import PanelWeight
from varlen_kernels.cpu.panel_tile import PANEL_FEATURES, TILE_ROWS, multiply_rows
from varlen_kernels.cpu.stored_code import stored
from varlen_kernels.cpu.threads import run_parts, usable_cores

# Tokens of a block.
BLOCK = 16 * TILE_ROWS
# Multiplications below which a second thread costs more than it saves. Weights are read at the speed of about 8 tokens.
_LEAST_SHARED_WORK = 1 << 23
_READ_TOKENS = 8
# Parts of each core, so that a thread that begins late leaves little for the others to wait for.
_PARTS = 2


def multiply_panels(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None,
    *,
    kind: Activation | None = None,
    out: Tensor | None,
) -> Tensor:
    """Return `reference.linear` or its activation.

    Args:
        x: `[tokens, hidden]` in the weight's dtype.
        bias: `[features]`.
    """
    tokens, panels = len(x), len(weight.panels)
    if out is None:
        out = x.new_empty(tokens, weight.features)
    parts = 1
    if (tokens + _READ_TOKENS) * weight.panels.numel() >= _LEAST_SHARED_WORK:
        cores = usable_cores()
        parts = _PARTS * cores if cores > 1 else 1
    units = -(-tokens // BLOCK) * panels
    run_parts(
        multiply_units,
        [units * part // parts for part in range(parts + 1)],
        as_array(x),
        as_array(weight.panels),
        as_array((x.new_empty(0) if bias is None else bias)[None]),
        ACTIVATIONS[kind],
        as_array(out),
    )
    return out


@numba.njit(forceinline=True, _nrt=False)
def _finish_tile(sums, rows, panel, bias, kind, out, to_row):
    """Write the results of the first rows of a tile."""
    first = panel * PANEL_FEATURES
    for lane in range(0, min(PANEL_FEATURES, out.shape[1] - first), LANES):
        column = first + lane
        for i in range(rows):
            value = load(sums, i, lane)
            if bias.shape[1]:
                value = value + load_within(bias, 0, column)
            if kind != NO_ACTIVATION:
                value = activated(value, kind)
            store_within(out, to_row + i, column, value)


@numba.njit(forceinline=True, _nrt=False)
def _multiply_block(first, last, first_panel, last_panel, x, wide, panels, bias, kind, sums, out):
    """Write some features of up to a block of tokens."""
    count = last - first
    tiles = (count + TILE_ROWS - 1) // TILE_ROWS
    is_wide = wide.shape[1] == 0
    if not is_wide:
        for i in range(count):
            for column in range(0, x.shape[1], LANES):
                store_within(wide, i, column, load_within(x, first + i, column))
    for panel in range(first_panel, last_panel):
        # tiles of about the same height: a low one takes as long as one of four rows
        for tile in range(tiles):
            begin, end = count * tile // tiles, count * (tile + 1) // tiles
            if is_wide:
                multiply_rows(end - begin, x, first + begin, panels, panel, sums)
            else:
                multiply_rows(end - begin, wide, begin, panels, panel, sums)
            _finish_tile(sums, end - begin, panel, bias, kind, out, first + begin)


@stored()
def multiply_units(
    first_unit,
    last_unit,
    x,  # [tokens, hidden]
    panels,  # see panel_tile.pack_panels
    bias,  # [1, features], or [1, 0] for none
    kind,
    out,  # [tokens, features]
):
    """Write the results of some units, in order of the blocks."""
    sums = np.empty((TILE_ROWS, PANEL_FEATURES), np.float32)
    wide = np.empty((BLOCK, 0 if x.itemsize == 4 else x.shape[1]), np.float32)
    unit = first_unit
    while unit < last_unit:
        block, panel = unit // len(panels), unit % len(panels)
        count = min(len(panels) - panel, last_unit - unit)
        first = block * BLOCK
        _multiply_block(
            first,
            min(first + BLOCK, len(x)),
            panel,
            panel + count,
            x,
            wide,
            panels,
            bias,
            kind,
            sums,
            out,
        )
        unit += count
