"""Products of rows sorted by group: experts of tokens, or adapters, compiled by numba.

A unit of a product is a panel of one group; the same panel of all groups is one after another, so that threads share
the work however the rows are divided among groups. A thread multiplies the rows of a group by all its panels of it
before the next group, while the rows are in the second-level cache. A group without rows takes no time.

A unit of adapters is a row. Up to TILE_ROWS rows of one adapter are gathered in fp32, multiplied by the first factor of
each part, and what that gives, in registers and the first-level cache, by the second one; the sums are added to the
rows of the result. No other memory is written, and ranks that an adapter does not have are not read. bf16 is widened.
"""

import math

import numpy as np

from varlen_kernels.cpu.bodies.epilogues import load_up_to, load_within, store_up_to, store_within
from varlen_kernels.cpu.bodies.panel_layout import HAS_PAIRS, PANEL_FEATURES, TILE_ROWS
from varlen_kernels.cpu.bodies.panels import (
    SUM_ROWS,
    multiply_block,
    multiply_columns,
    multiply_vector,
)
from varlen_kernels.cpu.native.lanes import load, multiply_add, splat
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
from varlen_kernels.functions import BLOCK, NO_ACTIVATION

_ZERO = np.float32(0)


@inlined
def _clear_rest(first, cu_groups, out):
    """Write zeros into the rows of no group, in the first part of the units."""
    if first == 0:
        for row in range(cu_groups[len(cu_groups) - 1], len(out)):
            for column in range(0, out.shape[1], LANES):
                store_within(out, row, column, splat(_ZERO))


@inlined_body
def multiply_groups(
    first,
    last,
    x,  # [rows, hidden]
    panels,  # see panel_layout.pack_groups
    cu_groups,  # [groups + 1]
    bias,  # [groups, features], or [0, 0] for none
    out,  # [rows, features]
):
    """Write the results of some units; return whether memory ran out."""
    groups = len(cu_groups) - 1
    wide_features = 0 if x.itemsize == 4 or HAS_PAIRS else x.shape[1]
    sum_bytes = aligned(4 * SUM_ROWS * PANEL_FEATURES)
    memory = new_memory(sum_bytes + 4 * BLOCK * wide_features)
    if memory == 0:
        return 1
    sums = fp32_matrix(memory, SUM_ROWS, PANEL_FEATURES)
    wide = fp32_matrix(memory + sum_bytes, BLOCK, wide_features)
    _clear_rest(first, cu_groups, out)
    for group in range(groups):
        # unit u is panel u // groups of group u % groups
        first_panel = (first - group + groups - 1) // groups
        last_panel = (last - group + groups - 1) // groups
        begin, end = np.int64(cu_groups[group]), np.int64(cu_groups[group + 1])
        if first_panel < last_panel:
            for row in range(begin, end, BLOCK):
                multiply_block(
                    row,
                    min(row + BLOCK, end),
                    first_panel,
                    last_panel,
                    x,
                    wide,
                    panels,
                    bias,
                    group,
                    NO_ACTIVATION,
                    sums,
                    out,
                )
    free_memory(memory)
    return 0


@inlined_body
def choose_experts(
    first,
    last,
    logits,  # [tokens, experts]
    normalize,
    weights,  # [tokens, count]
    places,  # [tokens, count], the experts
):
    """Write the experts of some tokens in the order of their logits, and their weights."""
    count, experts = places.shape[1], logits.shape[1]
    for token in range(first, last):
        expert, limit = -1, np.float32(np.inf)
        for number in range(count):
            # the next one in the order of logits; where a logit is NaN, perhaps the last one again
            best, largest = max(expert, 0), np.float32(-np.inf)
            is_found = False
            for i in range(experts):
                logit = logits[token, i]
                is_next = logit < limit or (logit == limit and i > expert)
                if is_next and (not is_found or logit > largest):
                    best, largest, is_found = i, logit, True
            expert, limit = best, largest
            places[token, number] = expert
        highest = logits[token, places[token, 0]]
        total = _ZERO
        for number in range(count):
            power = np.float32(math.exp(logits[token, places[token, number]] - highest))
            weights[token, number] = power
            total += power
        if not normalize:
            total = _ZERO
            for i in range(experts):
                total += np.float32(math.exp(logits[token, i] - highest))
        for number in range(count):
            weights[token, number] /= total
    return 0


@inlined_body
def sort_choices(
    _first,
    _last,
    places,  # [tokens, count], the experts, which rows replace
    rows,  # [tokens · count]
    cu_groups,  # [experts + 1]
):
    """Write the row of each choice, the token of each row, and bounds."""
    count, experts = places.shape[1], len(cu_groups) - 1
    for expert in range(experts + 1):
        cu_groups[expert] = 0
    for token in range(len(places)):
        for number in range(count):
            cu_groups[places[token, number] + 1] += 1
    for expert in range(experts):
        cu_groups[expert + 1] += cu_groups[expert]
    # each bound moves to the next one while rows are given out
    for token in range(len(places)):
        for number in range(count):
            expert = places[token, number]
            row = cu_groups[expert]
            cu_groups[expert] = row + 1
            places[token, number] = row
            rows[row] = token
    for expert in range(experts, 0, -1):
        cu_groups[expert] = cu_groups[expert - 1]
    cu_groups[0] = 0
    return 0


@inlined_body
def sum_experts(
    first,
    last,
    x,  # [rows, features]
    weights,  # [tokens, count]
    places,  # [tokens, count]
    bias,  # [1, features], or [0, 0] for none
    out,  # [tokens, features]
):
    """Write the sums of some tokens."""
    for token in range(first, last):
        for column in range(0, out.shape[1], LANES):
            total = splat(_ZERO)
            for number in range(places.shape[1]):
                value = load_within(x, places[token, number], column)
                total = multiply_add(value, splat(weights[token, number]), total)
            if bias.shape[1]:
                total = total + load_within(bias, 0, column)
            store_within(out, token, column, total)
    return 0


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
