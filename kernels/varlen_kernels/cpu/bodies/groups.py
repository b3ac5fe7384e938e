"""Products of rows sorted by group, and the experts of tokens, compiled by numba.

A unit of a product is a panel of one group; the same panel of all groups is one after another, so that threads share
the work however the rows are divided among groups. A thread multiplies the rows of a group by all its panels of it
before the next group, while the rows are in the second-level cache. A group without rows takes no time.
Weights are in panels (`panel_tile`).
A row has the same result by itself and among others, and on any number of threads, to the last bit.
Source: the specifications are `reference.linear_groups`, `reference.route_tokens` and `reference.sum_experts`.
"""

import math

import numpy as np

from varlen_kernels.cpu.bodies.epilogues import load_within, store_within
from varlen_kernels.cpu.bodies.panel_layout import HAS_PAIRS, PANEL_FEATURES, TILE_ROWS
from varlen_kernels.cpu.bodies.panels import multiply_block
from varlen_kernels.cpu.native.lanes import multiply_add, splat
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
    sum_bytes = aligned(4 * TILE_ROWS * PANEL_FEATURES)
    memory = new_memory(sum_bytes + 4 * BLOCK * wide_features)
    if memory == 0:
        return 1
    sums = fp32_matrix(memory, TILE_ROWS, PANEL_FEATURES)
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
