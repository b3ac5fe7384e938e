"""What low-rank adapters add to rows of a linear layer, compiled by numba.

A unit is a row. Up to TILE_ROWS rows of one adapter are gathered in fp32, multiplied by the first factor of each part,
and what that gives, in registers and the first-level cache, by the second one; the sums are added to the rows of the
result. No other memory is written, and ranks that an adapter does not have are not read. bf16 is widened.
A row has the same result by itself and among others, and on any number of threads, to the last bit.
Source: the specification is `reference.add_adapters`.
"""

from varlen_kernels.cpu.bodies.epilogues import (
    load_up_to,
    load_within,
    store_up_to,
    store_within,
)
from varlen_kernels.cpu.bodies.panel_layout import PANEL_FEATURES, TILE_ROWS
from varlen_kernels.cpu.bodies.panel_tile import multiply_columns, multiply_vector
from varlen_kernels.cpu.native.lanes import load
from varlen_kernels.cpu.native.native import (
    aligned,
    copy_bytes,
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES


@inlined_body
def copy_apart(first, last, x, x_address, out_address):
    """Copy a matrix, unless it is there already; one unit."""
    if first < last and x_address != out_address:
        copy_bytes(out_address, x_address, x.size * x.itemsize)
    return 0


@inlined
def _add_sums(sums, count, lane, rows, row, bias, group, column, last_column, out):
    """Add a vector of the sums of some rows to their rows of the result."""
    width = last_column - column
    for i in range(count):
        value = load(sums, i, lane) + load_up_to(out, rows[row + i], column, width)
        if bias.shape[1]:
            value = value + load_up_to(bias, group, column, width)
        store_up_to(out, rows[row + i], column, value, width)


@inlined
def _add_tile(
    row, count, x, wide, rows, group, ranks, first, second, spans, bias, inner_memory, sums, out
):
    """Add what an adapter adds to up to TILE_ROWS rows, from `row` on.

    Args:
        wide: `[TILE_ROWS, hidden]` fp32, overwritten.
        inner_memory: address of TILE_ROWS rows of ranks in fp32, overwritten.
        sums: `[TILE_ROWS, PANEL_FEATURES]` fp32, overwritten.
    """
    hidden = x.shape[1]
    for i in range(count):
        for column in range(0, hidden, LANES):
            store_within(wide, i, column, load_within(x, rows[row + i], column))
    for part in range(0, spans.shape[1], 4):
        rank, last_rank = spans[group, part], spans[group, part + 1]
        feature, last_feature = spans[group, part + 2], spans[group, part + 3]
        used = last_rank - rank
        inner = fp32_matrix(inner_memory, TILE_ROWS, used)
        for column in range(0, used, LANES):
            multiply_vector(count, wide, 0, first, group * hidden, rank + column, sums)
            if len(second):
                for i in range(count):
                    store_up_to(inner, i, column, load(sums, i, 0), used - column)
            else:
                place = feature + column
                _add_sums(sums, count, 0, rows, row, bias, group, place, last_feature, out)
        if used and len(second):
            for column in range(0, last_feature - feature, PANEL_FEATURES):
                multiply_columns(count, inner, 0, second, group * ranks + rank, column, sums)
                begin = feature + column
                for lane in range(0, min(PANEL_FEATURES, last_feature - begin), LANES):
                    place = begin + lane
                    _add_sums(sums, count, lane, rows, row, bias, group, place, last_feature, out)


@inlined_body
def add_adapters(
    first_row,
    last_row,
    x,  # [tokens, hidden]
    rows,  # [rows]
    cu_groups,  # [groups + 1]
    first,  # [groups · hidden, ranks]
    second,  # [groups · ranks, width], or [0, 0] for none
    spans,  # [groups, 4 · parts]
    bias,  # [groups, features], or [0, 0] for none
    ranks,
    out,  # [tokens, features]
):
    """Add to some rows; return whether memory ran out."""
    wide_bytes = aligned(4 * TILE_ROWS * x.shape[1])
    inner_bytes = aligned(4 * TILE_ROWS * ranks)
    memory = new_memory(wide_bytes + inner_bytes + 4 * TILE_ROWS * PANEL_FEATURES)
    if memory == 0:
        return 1
    wide = fp32_matrix(memory, TILE_ROWS, x.shape[1])
    sums = fp32_matrix(memory + wide_bytes + inner_bytes, TILE_ROWS, PANEL_FEATURES)
    for group in range(len(cu_groups) - 1):
        begin = max(first_row, cu_groups[group])
        count = min(last_row, cu_groups[group + 1]) - begin
        tiles = (count + TILE_ROWS - 1) // TILE_ROWS
        # tiles of about the same height
        for tile in range(tiles):
            row, end = begin + count * tile // tiles, begin + count * (tile + 1) // tiles
            _add_tile(
                row,
                end - row,
                x,
                wide,
                rows,
                group,
                ranks,
                first,
                second,
                spans,
                bias,
                memory + wide_bytes,
                sums,
                out,
            )
    free_memory(memory)
    return 0
