"""Attention inside packed sequences on a CPU, compiled by numba.

One step is one key head of one sequence. Its keys are copied as panels of 16 keys, with the features as rows, so that
16 scores of a query are one vector; its values are copied as rows. Tiles of 16 queries read blocks of 128 keys with a
running maximum (Milakov, Gimelshein 2018, arXiv:1805.02867), so scores stay in the first-level cache. A sequence has
the same result by itself and in a batch, to the last bit.
Source: the specification is `reference.attention_varlen`.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from varlen_kernels.cpu.attention_distances import (
    copy_distances,
    make_distances,
    write_distance_scores,
)
from varlen_kernels.cpu.attention_panels import ROWS, clear_rows, copy_head, multiply
from varlen_kernels.cpu.attention_weights import (
    clear_unread,
    forget_keys,
    weigh,
    write_context,
    write_score_bias,
)
from varlen_kernels.cpu.lanes import LANES, as_array, load, splat, sum_of, transpose
from varlen_kernels.cpu.stored_code import stored
from varlen_kernels.cpu.threads import run_parts, usable_cores
from varlen_kernels.reference.attention import Distances

# The score of no key: its weight is 0 beside the lowest score too.
_NO_KEY = np.float32(-3e38)
_QUERY_TILE = 16
_KEY_BLOCK = 128
# Multiplications below which a second thread costs more than it saves.
_LEAST_SHARED_WORK = 1 << 22


@numba.njit(forceinline=True, _nrt=False)
def _copy_keys_and_values(
    qkv, start, length, columns, head_dim, scale, distances, key_rows, panels, values
):
    """Write panels of scaled keys, and rows of values.

    With distances rows of keys are kept too; they are not scaled.
    """
    width = values.shape[1]
    lanes = key_rows
    for first in range(0, length, LANES):
        count = min(LANES, length - first)
        if distances is not None:
            lanes = key_rows[first:]
        for i in range(count):
            row = start + first + i
            copy_head(qkv, row, columns[0], head_dim, lanes, i)
            copy_head(qkv, row, columns[1], head_dim, values, first + i)
        clear_rows(lanes, count, LANES)
        for feature in range(0, width, LANES):
            transpose(lanes, feature, panels, first // LANES * width + feature, splat(scale))


@numba.njit(forceinline=True, _nrt=False)
def _attend_tile(
    queries,
    count,
    tile,
    length,
    key_length,
    is_causal,
    window,
    score_bias,
    keys_values,
    distances,
    room,
):
    """Write the sum of weighted values of some queries, and the sums of their weights.

    Args:
        queries: queries of the sequence from `tile` on; `count` rows, then zeros up to a multiple of `ROWS`.
        length, key_length: number of queries of the sequence, and of keys that they may read.
        keys_values, distances, room: see `attend_items`; room is overwritten.
    """
    key_rows, panels, values = keys_values
    scores, context, totals, top = room
    width = queries.shape[1]
    rows = (count + ROWS - 1) // ROWS * ROWS
    first_key = max(0, tile - window + 1) // LANES * LANES if window else 0
    last_key = key_length
    if is_causal:
        last_key = min(key_length, tile + count)
    elif window:
        last_key = min(key_length, tile + count + window - 1)
    for block in range(first_key, last_key, _KEY_BLOCK):
        keys = min(_KEY_BLOCK, last_key - block)
        is_first = block == first_key
        if distances is not None:
            write_distance_scores(scores, queries, count, tile, key_rows, keys, block, distances)
        for column in range(0, keys, LANES):
            panel = (block + column) // LANES * width
            for row in range(0, rows, ROWS):
                is_only = distances is None
                multiply(scores, row, column, queries, width, panels, panel, 0, is_only)
        # keys past the last one; not just before they are read, as a vector waits for numbers stored one by one
        for row in range(count):
            for column in range(keys, (keys + LANES - 1) // LANES * LANES):
                scores[row, column] = _NO_KEY
        for row in range(count):
            offset = block - (tile + row) + length - 1
            weigh(scores, row, keys, score_bias, offset, top, totals, context, is_first)
        for feature in range(0, width, LANES):
            for row in range(0, rows, ROWS):
                multiply(context, row, feature, scores, keys, values, block, feature, is_first)


@numba.njit(_nrt=False)
def _attend(
    sequence,
    kv_head,
    qkv,
    cu_seqlens,
    first_key_end,
    bias,
    num_kv_heads,
    scale,
    is_causal,
    window,
    out,
    distances,
    memory,
):
    """Write the attention of one key head of one sequence.

    Args:
        distances: result of `make_distances`, filled for this head; None: compiled without them.
        memory: result of `_allocate`, overwritten.
    """
    score_bias, queries, keys_values, room = memory
    num_heads = bias.shape[0]
    group = num_heads // num_kv_heads
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    start = cu_seqlens[sequence]
    length = cu_seqlens[sequence + 1] - start
    key_length = cu_seqlens[first_key_end + sequence] - start
    key_rows, panels, values = keys_values
    context, totals, top = room[1:]
    columns = (num_heads + kv_head) * head_dim, (num_heads + num_kv_heads + kv_head) * head_dim
    _copy_keys_and_values(
        qkv, start, key_length, columns, head_dim, scale, distances, key_rows, panels, values
    )
    for head in range(kv_head * group, (kv_head + 1) * group):
        column = head * head_dim
        if score_bias.shape[1]:
            write_score_bias(score_bias, length, bias, head, is_causal, window)
        for tile in range(0, length, _QUERY_TILE):
            count = min(_QUERY_TILE, length - tile)
            for row in range(count):
                copy_head(qkv, start + tile + row, column, head_dim, queries, row)
            # up to a multiple of ROWS
            clear_rows(queries, count, min(count + ROWS - 1, _QUERY_TILE))
            if key_length < length:
                forget_keys(totals, top, count)
            _attend_tile(
                queries,
                count,
                tile,
                length,
                key_length,
                is_causal,
                window,
                score_bias,
                keys_values,
                distances,
                room,
            )
            if key_length < length:
                clear_unread(context, totals, top, count)
            for row in range(count):
                total = sum_of(load(totals, row, 0))
                to_row = start + tile + row
                write_context(context, row, total, out, to_row, column, head_dim)


@numba.njit(forceinline=True)
def _allocate(longest, width, needs_score_bias, keeps_keys):
    """Return the memory of `_attend` for sequences of up to `longest` tokens.

    Args:
        width: features of a head, rounded up to a multiple of 16.
        needs_score_bias: whether something is added to scores, or keys are hidden.
        keeps_keys: whether rows of all keys are kept.

    Returns:
        What is added to scores, `[1, distances]` or `[1, 0]`; rows of queries; rows of keys, panels of keys, and
        rows of values; scores, context, totals and largest scores.
    """
    panels = (longest + LANES - 1) // LANES
    # a vector that begins at the last distance ends LANES - 1 further
    distances = 2 * longest + LANES if needs_score_bias else 0
    keys_values = (
        np.empty((panels * LANES if keeps_keys else LANES, width), np.float32),
        np.empty((panels * width, LANES), np.float32),
        np.empty((panels * LANES, width), np.float32),
    )
    room = (
        np.empty((_QUERY_TILE, _KEY_BLOCK), np.float32),
        np.empty((_QUERY_TILE, width), np.float32),
        np.empty((_QUERY_TILE, LANES), np.float32),
        np.empty(_QUERY_TILE, np.float32),
    )
    score_bias = np.zeros((1, distances), np.float32)
    return score_bias, np.empty((_QUERY_TILE, width), np.float32), keys_values, room


@stored()
def attend_items(
    first_item,
    last_item,
    qkv,  # [tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    cu_seqlens,  # [sequences + 1], perhaps followed by the end of the keys of each
    first_key_end,  # place of the end of the first sequence's keys
    bias,  # [num_heads, 2 * reach + 1], or [num_heads, 0] for none
    num_kv_heads,
    scale,
    is_causal,
    window,
    out,  # [tokens, num_heads * head_dim]
):
    """Write the attention of some items, ordered by sequence.

    An item is one key head of one sequence.
    """
    head_dim = qkv.shape[1] // (bias.shape[0] + 2 * num_kv_heads)
    width = (head_dim + LANES - 1) // LANES * LANES
    longest = 0
    for item in range(first_item, last_item):
        sequence = item // num_kv_heads
        longest = max(longest, cu_seqlens[sequence + 1] - cu_seqlens[sequence])
    memory = _allocate(longest, width, is_causal or window > 0 or bias.shape[1] > 0, False)
    for item in range(first_item, last_item):
        _attend(
            item // num_kv_heads,
            item % num_kv_heads,
            qkv,
            cu_seqlens,
            first_key_end,
            bias,
            num_kv_heads,
            scale,
            is_causal,
            window,
            out,
            None,
            memory,
        )


@stored()
def _attend_items_with_distances(
    first_item,
    last_item,
    tables,
    qkv,
    cu_seqlens,
    first_key_end,
    bias,
    num_heads,
    scale,
    is_causal,
    window,
    out,
):
    """Write the attention of some items, ordered by head.

    An item is one head of one sequence. All sequences share the panels of a head's distances.

    Args:
        tables: see `make_distances`.
        first_item, last_item, qkv, cu_seqlens, first_key_end, bias, num_heads, scale, is_causal, window, out: see
            `attend_items`.
    """
    head_dim = qkv.shape[1] // (3 * num_heads)
    width = (head_dim + LANES - 1) // LANES * LANES
    # ends of keys follow
    sequences = len(cu_seqlens) - 1 if first_key_end == 1 else first_key_end - 1
    longest = 0
    for item in range(first_item, last_item):
        sequence = item % sequences
        longest = max(longest, cu_seqlens[sequence + 1] - cu_seqlens[sequence])
    memory = _allocate(longest, width, is_causal or window > 0 or bias.shape[1] > 0, True)
    distances = make_distances(tables, longest, width, _QUERY_TILE, _KEY_BLOCK)
    copied_head = -1
    for item in range(first_item, last_item):
        head = item // sequences
        if head != copied_head:
            copied_head = head
            copy_distances(tables, head * head_dim, head_dim, scale, memory[1], distances)
        _attend(
            item % sequences,
            head,
            qkv,
            cu_seqlens,
            first_key_end,
            bias,
            num_heads,
            scale,
            is_causal,
            window,
            out,
            distances,
            memory,
        )


def attend_sequences(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,  # noqa: ARG001  # read by GPUs
    distances: Distances | None = None,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float,
    causal: bool = False,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention inside each sequence of fp32 or bf16, see `reference.attention_varlen`."""
    kv_heads = num_kv_heads or num_heads
    if out is None:
        head_dim = qkv.shape[1] // (num_heads + 2 * kv_heads)
        out = qkv.new_empty(len(qkv), num_heads * head_dim)
    bounds = cu_seqlens.numpy()
    ends, first_key_end = bounds, 1
    if key_lengths is not None:
        ends = np.concatenate((bounds, bounds[:-1] + key_lengths.numpy()))
        first_key_end = len(bounds)
    arguments = (
        as_array(qkv),
        ends,
        first_key_end,
        (torch.empty(num_heads, 0) if bias is None else bias.float()).numpy(),
        kv_heads,
        np.float32(scale),
        causal,
        window,
        as_array(out),
    )
    items = (len(bounds) - 1) * kv_heads
    parts = [0, items]
    cores = usable_cores()
    if cores > 1:
        squares = np.diff(bounds).astype(np.int64) ** 2
        if int(squares.sum()) * qkv.shape[1] >= _LEAST_SHARED_WORK:
            repeat = np.repeat if distances is None else np.tile
            work = np.cumsum(repeat(squares, kv_heads))
            parts[1:1] = np.searchsorted(work, np.arange(1, cores) * (work[-1] / cores)).tolist()
    if distances is None:
        run_parts(attend_items, parts, *arguments)
        return out
    none = qkv.new_empty(0, 0)
    keys, queries = (none if x is None else x for x in (distances.keys, distances.queries))
    tables = distances.rows.numpy(), as_array(keys), as_array(queries)
    run_parts(_attend_items_with_distances, parts, tables, *arguments)
    return out
