"""Attention inside packed sequences on a CPU, compiled by numba.

One step is one key head of one sequence. Its keys are copied as panels of 16 keys, with the features as rows, so that
16 scores of a query are one vector; its values are copied as rows. Tiles of 16 queries read blocks of 128 keys with a
running maximum (Milakov, Gimelshein 2018, arXiv:1805.02867), so scores stay in the first-level cache.
"""

import numpy as np

from varlen_kernels.cpu.bodies.attention_weights import (
    ROWS,
    TILE_TOKENS,
    cap_scores,
    clear_past,
    clear_rows,
    clear_unread,
    copy_distances,
    copy_head,
    copy_value,
    distance_bytes,
    factor_matrix,
    fetch_head,
    first_row,
    forget_keys,
    has_tiles,
    largest_score,
    make_distances,
    multiply,
    panel_matrix,
    raise_tops,
    value_matrix,
    weigh,
    write_context,
    write_distance_scores,
    write_panel,
    write_score_bias,
)
from varlen_kernels.cpu.native.lanes import load, splat, sum_of
from varlen_kernels.cpu.native.native import (
    aligned,
    clear,
    fp32_matrix,
    free_memory,
    inlined,
    inlined_body,
    inlined_view,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.cpu.native.tiles import configure_tiles, release_tiles

# The score of no key: its weight is 0 beside the lowest score too.
_NO_KEY = np.float32(-3e38)
_QUERY_TILE = 16
_ZERO, _ONE = np.float32(0), np.float32(1)
_KEY_BLOCK = 128


@inlined
def _copy_keys_and_values(
    qkv, start, length, columns, head_dim, distances, key_rows, panels, values
):
    """Write panels of keys, and values.

    With distances rows of keys are kept too.
    """
    lanes = key_rows
    for first in range(0, length, LANES):
        count = min(LANES, length - first)
        if distances is not None:
            lanes = key_rows[first:]
        for i in range(count):
            row = start + first + i
            if first + i + LANES < length:
                fetch_head(qkv, row + LANES, columns[0], head_dim)
                fetch_head(qkv, row + LANES, columns[1], head_dim)
            copy_head(qkv, row, columns[0], head_dim, lanes, i)
            copy_value(qkv, row, columns[1], head_dim, values, first + i)
        clear_rows(lanes, count, LANES)
        write_panel(lanes, panels, first // LANES)


@inlined
def _attend_tile(
    queries,
    count,
    tile,
    length,
    key_length,
    scale,
    is_causal,
    window,
    soft_cap,
    score_bias,
    keys_values,
    distances,
    room,
):
    """Write the sum of weighted values of some queries, and the sums of their weights.

    Args:
        queries: queries of the sequence from `tile` on; `count` rows, then zeros up to a multiple of `ROWS`.
        length, key_length: number of queries of the sequence, and of keys that they may read.
        keys_values, distances, room: see `attend`; room is overwritten.
    """
    key_rows, panels, values = keys_values
    scores, weights, context, totals, tops, rescales, largest = room
    width, value_pairs = queries.shape[1], 4 // values.itemsize
    rows = (count + ROWS - 1) // ROWS * ROWS
    first_key = max(0, tile - window + 1) // TILE_TOKENS * TILE_TOKENS if window else 0
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
        is_new, row = distances is None, first_row(panels, block // LANES, width)
        apart = LANES * width
        multiply(scores, rows, keys, queries, width, panels, row, apart, scale, is_new)
        if soft_cap > 0:
            cap_scores(scores, count, keys, soft_cap)
        # keys past the last one; not just before they are read, as a vector waits for numbers stored one by one
        for row in range(count):
            for column in range(keys, (keys + LANES - 1) // LANES * LANES):
                scores[row, column] = _NO_KEY
        for row in range(count):
            offset = block - (tile + row) + length - 1
            largest[0, row] = largest_score(scores, row, keys, score_bias, offset)
        raise_tops(largest, tops, rescales, is_first)
        for row in range(count):
            rescale = splat(rescales[0, row])
            weigh(scores, row, keys, tops[0, row], rescale, totals, context, is_first, weights)
        row, apart = block // value_pairs, LANES * value_pairs
        features, depth = context.shape[1], (keys + 1) // 2 * 2 if value_pairs == 2 else keys
        multiply(context, rows, features, weights, depth, values, row, apart, _ONE, is_first)


@inlined
def _attend(
    sequence,
    kv_head,
    qkv,
    cu_seqlens,
    bias,
    key_lengths,
    num_kv_heads,
    scale,
    is_causal,
    window,
    soft_cap,
    out,
    distances,
    views,
):
    """Write the attention of one key head of one sequence.

    Args:
        distances: result of `make_distances`, filled for this head; None: compiled without them.
        views: result of `attention_views`, overwritten.
    """
    _, _, keys_values, _ = views
    num_heads = bias.shape[0]
    group = num_heads // num_kv_heads
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    start = cu_seqlens[sequence]
    length = cu_seqlens[sequence + 1] - start
    key_length = key_lengths[sequence] if len(key_lengths) else length
    key_rows, panels, values = keys_values
    columns = (num_heads + kv_head) * head_dim, (num_heads + num_kv_heads + kv_head) * head_dim
    _copy_keys_and_values(
        qkv, start, key_length, columns, head_dim, distances, key_rows, panels, values
    )
    attend_queries(
        qkv,
        start,
        0,
        length,
        key_length,
        kv_head * group,
        group,
        head_dim,
        bias,
        scale,
        is_causal,
        window,
        soft_cap,
        out,
        distances,
        views,
    )


@inlined
def attend_queries(
    qkv,
    start,
    first_query,
    length,
    key_length,
    first_head,
    num_heads,
    head_dim,
    bias,
    scale,
    is_causal,
    window,
    soft_cap,
    out,
    distances,
    views,
):
    """Write the attention of a key head, whose keys and values are copied.

    Args:
        start: row of the first query.
        first_query: place of the first query in the sequence, whose further tokens are queries too.
        length: tokens of the sequence.
        key_length: keys that the queries may read.
    """
    score_bias, queries, keys_values, room = views
    context, totals, top = room[2:5]
    clear_past(keys_values[2], key_length)
    if has_tiles(queries):
        configure_tiles(_QUERY_TILE)
    for head in range(first_head, first_head + num_heads):
        column = head * head_dim
        if score_bias.shape[1]:
            write_score_bias(score_bias, length, bias, head, is_causal, window)
        for tile in range(first_query, length, _QUERY_TILE):
            count = min(_QUERY_TILE, length - tile)
            first_row = start + tile - first_query
            for row in range(count):
                if tile + row + _QUERY_TILE < length:
                    fetch_head(qkv, first_row + row + _QUERY_TILE, column, head_dim)
                copy_head(qkv, first_row + row, column, head_dim, queries, row)
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
                scale,
                is_causal,
                window,
                soft_cap,
                score_bias,
                keys_values,
                distances,
                room,
            )
            if key_length < length:
                clear_unread(context, totals, top, count)
            for row in range(count):
                total = sum_of(load(totals, row, 0))
                write_context(context, row, total, out, first_row + row, column, head_dim)
    if has_tiles(queries):
        release_tiles()


@inlined
def head_width(head_dim, like):
    """Return the width of a row of factors: whole vectors of numbers or pairs.

    Args:
        like: see `factor_matrix`.
    """
    numbers = 4 * LANES // factor_matrix(like, 0, 0, 0).itemsize
    return (head_dim + numbers - 1) // numbers * numbers


@inlined
def _num_panels(longest):
    """Return the panels of 16 keys, and of values: as many as fill tiles."""
    return (longest + TILE_TOKENS - 1) // TILE_TOKENS * (TILE_TOKENS // LANES)


@inlined
def _sizes(longest, width, needs_score_bias, keeps_keys, number_bytes):
    """Return the sizes of the memory of `_attend`, in bytes; see `attention_views`."""
    panels = _num_panels(longest)
    # a vector that begins at the last distance ends LANES - 1 further
    distances = 2 * longest + LANES if needs_score_bias else 0
    key_rows = panels * LANES if keeps_keys else LANES
    matrices = number_bytes * width * key_rows, number_bytes * LANES * panels * width
    return aligned(4 * distances), *matrices, aligned(4 * _QUERY_TILE * width)


@inlined_view
def attention_views(memory, longest, width, needs_score_bias, keeps_keys, like):
    """Return the memory of `_attend` for sequences of up to `longest` tokens.

    Args:
        memory: its address.
        width: result of `head_width`.
        needs_score_bias: whether something is added to scores, or keys are hidden.
        keeps_keys: whether rows of all keys are kept.
        like: has numbers of the factors, see `factor_matrix`.

    Returns:
        What is added to scores, `[1, distances]` or `[1, 0]`; rows of queries; rows of keys, panels of keys, and
        values; scores, weights, context, totals, largest scores, what sums are multiplied by, and the
        largest scores of a block. Weights of fp32 take the place of scores.
    """
    number_bytes = factor_matrix(like, 0, 0, 0).itemsize
    sizes = _sizes(longest, width, needs_score_bias, keeps_keys, number_bytes)
    panels = _num_panels(longest)
    distances = 2 * longest + LANES if needs_score_bias else 0
    clear(memory, sizes[0])
    score_bias = fp32_matrix(memory, 1, distances)
    memory += sizes[0]
    key_rows = factor_matrix(like, memory, panels * LANES if keeps_keys else LANES, width)
    memory += sizes[1]
    key_panels = panel_matrix(memory, panels, width, like)
    memory += sizes[2]
    values = value_matrix(memory, panels * LANES, width, like)
    memory += sizes[2]
    queries = factor_matrix(like, memory, _QUERY_TILE, width)
    context = fp32_matrix(memory + sizes[3], _QUERY_TILE, width)
    memory += 2 * sizes[3]
    scores = fp32_matrix(memory, _QUERY_TILE, _KEY_BLOCK)
    score_bytes = 4 * _QUERY_TILE * _KEY_BLOCK
    own = 0 if number_bytes == 4 else score_bytes
    weights = factor_matrix(like, memory + own, _QUERY_TILE, _KEY_BLOCK)
    memory += 2 * score_bytes
    totals = fp32_matrix(memory, _QUERY_TILE, LANES)
    memory += 4 * _QUERY_TILE * LANES
    tops = fp32_matrix(memory, 1, _QUERY_TILE)
    rescales = fp32_matrix(memory + 4 * _QUERY_TILE, 1, _QUERY_TILE)
    largest = fp32_matrix(memory + 8 * _QUERY_TILE, 1, _QUERY_TILE)
    room = scores, weights, context, totals, tops, rescales, largest
    return score_bias, queries, (key_rows, key_panels, values), room


@inlined
def attention_bytes(longest, width, needs_score_bias, keeps_keys, like):
    """Return the size of the memory of `attention_views`."""
    number_bytes = factor_matrix(like, 0, 0, 0).itemsize
    sizes = _sizes(longest, width, needs_score_bias, keeps_keys, number_bytes)
    fixed = 4 * _QUERY_TILE * (2 * _KEY_BLOCK + LANES + 3)
    return sizes[0] + sizes[1] + 2 * sizes[2] + 2 * sizes[3] + fixed


@inlined_body
def attend(
    first_item,
    last_item,
    qkv,  # [tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    cu_seqlens,  # [sequences + 1]
    bias,  # [num_heads, 2 * reach + 1], or [num_heads, 0] for none
    key_lengths,  # [sequences], the keys that each reads, or [0] for all
    num_kv_heads,
    scale,
    is_causal,
    window,
    soft_cap,
    out,  # [tokens, num_heads * head_dim]
):
    """Write the attention of some items, ordered by sequence; return whether memory ran out.

    An item is one key head of one sequence.
    """
    head_dim = qkv.shape[1] // (bias.shape[0] + 2 * num_kv_heads)
    width = head_width(head_dim, qkv)
    longest = 0
    for item in range(first_item, last_item):
        sequence = item // num_kv_heads
        longest = max(longest, cu_seqlens[sequence + 1] - cu_seqlens[sequence])
    needs_score_bias = is_causal or window > 0 or bias.shape[1] > 0
    memory = new_memory(attention_bytes(longest, width, needs_score_bias, False, qkv))
    if memory == 0:
        return 1
    views = attention_views(memory, longest, width, needs_score_bias, False, qkv)
    for item in range(first_item, last_item):
        _attend(
            item // num_kv_heads,
            item % num_kv_heads,
            qkv,
            cu_seqlens,
            bias,
            key_lengths,
            num_kv_heads,
            scale,
            is_causal,
            window,
            soft_cap,
            out,
            None,
            views,
        )
    free_memory(memory)
    return 0


@inlined_body
def attend_distances(
    first_item,
    last_item,
    qkv,
    cu_seqlens,
    bias,
    distance_rows,
    distance_keys,
    distance_queries,
    key_lengths,
    num_heads,
    scale,
    is_causal,
    window,
    out,
):
    """Write the attention of some items, ordered by head; return whether memory ran out.

    An item is one head of one sequence. All sequences share the panels of a head's distances.

    Args:
        distance_rows, distance_keys, distance_queries: the tables of `make_distances`.
        first_item, last_item, qkv, cu_seqlens, bias, key_lengths, num_heads, scale, is_causal, window, out: see
            `attend`.
    """
    tables = distance_rows, distance_keys, distance_queries
    head_dim = qkv.shape[1] // (3 * num_heads)
    width = head_width(head_dim, qkv)
    sequences = len(cu_seqlens) - 1
    longest = 0
    for item in range(first_item, last_item):
        sequence = item % sequences
        longest = max(longest, cu_seqlens[sequence + 1] - cu_seqlens[sequence])
    needs_score_bias = is_causal or window > 0 or bias.shape[1] > 0
    own_bytes = attention_bytes(longest, width, needs_score_bias, True, qkv)
    more_bytes = distance_bytes(tables, longest, width, _QUERY_TILE, _KEY_BLOCK, qkv)
    memory = new_memory(own_bytes + more_bytes)
    if memory == 0:
        return 1
    views = attention_views(memory, longest, width, needs_score_bias, True, qkv)
    distances = make_distances(
        memory + own_bytes, tables, longest, width, _QUERY_TILE, _KEY_BLOCK, qkv
    )
    copied_head = -1
    for item in range(first_item, last_item):
        head = item // sequences
        if head != copied_head:
            copied_head = head
            copy_distances(tables, head * head_dim, head_dim, views[1], distances)
        _attend(
            item % sequences,
            head,
            qkv,
            cu_seqlens,
            bias,
            key_lengths,
            num_heads,
            scale,
            is_causal,
            window,
            _ZERO,
            out,
            distances,
            views,
        )
    free_memory(memory)
    return 0
