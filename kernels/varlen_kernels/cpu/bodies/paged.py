"""KV blocks on a CPU, for functions that numba compiles: appended tokens, copies, and attention.

A decode step reads every key and value of its sequences once, so it is bound by memory. Blocks are read where they are,
once for all query heads of a key head, and no score leaves the cache of its core. The tokens of a block are read as
four runs side by side: a core reads several streams of memory faster than one. The products of 16 keys are summed
together, so that no score is a sum of its own. docs/decisions/0019-cpu-decoding.md has measurements.
Several new tokens of a sequence: its keys and values are copied once for each key head, into what `attention` reads.
"""

import numpy as np

from varlen_kernels.cpu.bodies.attention import (
    attend_queries,
    attention_bytes,
    attention_views,
    head_width,
)
from varlen_kernels.cpu.bodies.attention_weights import (
    LOWEST,
    cap_scores,
    clear_rows,
    copy_head,
    copy_value,
    largest_score,
    weigh,
    write_context,
    write_panel,
)
from varlen_kernels.cpu.bodies.rows import write_rotated_head
from varlen_kernels.cpu.native.lanes import (
    exp,
    fetch_early,
    fold_1,
    fold_2,
    fold_4,
    fold_8,
    load,
    load_first,
    multiply_add,
    splat,
    store,
    store_first,
    sum_of,
)
from varlen_kernels.cpu.native.native import (
    aligned,
    clear,
    copy_bytes,
    fp32_matrix,
    fp32_vector,
    free_memory,
    inlined,
    inlined_body,
    inlined_view,
    matrix_like,
    new_memory,
)
from varlen_kernels.cpu.native.target_cpu import LANES
from varlen_kernels.cpu.native.tiles import ROW_BYTES


@inlined
def copy_row(source, row, column, count, destination, to_row):
    """Copy `count` numbers into the first columns of a row."""
    whole = count // LANES * LANES
    for feature in range(0, whole, LANES):
        store(destination, to_row, feature, load(source, row, column + feature))
    if 0 < whole < count:
        # again some numbers of the vector before it
        rest = count - LANES
        store(destination, to_row, rest, load(source, row, column + rest))
    elif whole < count:
        store_first(destination, to_row, 0, load_first(source, row, column, count), count)


@inlined
def block_row(position, blocks, first_block, kv_head, num_kv_heads, block_size):
    """Return the row of a token's key in the cache, for one key head."""
    block = np.int64(blocks[first_block + position // block_size])
    return (block * num_kv_heads + kv_head) * block_size + position % block_size


@inlined_body
def append(
    first,
    last,
    qkv,  # [tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    slots,  # [tokens]
    keys,  # [blocks * num_kv_heads * block_size, head_dim]
    values,  # [blocks * num_kv_heads * block_size, head_dim]
    position_ids,  # [tokens], or [0] for no rotation
    cos_sin,  # [positions, head_dim]
    query_weight,  # [1, head_dim], or [0, 0] for no norm
    key_weight,  # [1, head_dim], or [0, 0] for no norm
    num_heads,
    num_kv_heads,
    block_size,
    eps,
    out,  # [tokens, qkv.shape[1]], gets rotated queries
):
    """Write the keys and values of some tokens, and their queries if these are rotated."""
    head_dim = keys.shape[1]
    is_rotated = len(position_ids) > 0
    if is_rotated:
        for token in range(first, last):
            position = np.int64(position_ids[token])
            for head in range(num_heads):
                column = head * head_dim
                write_rotated_head(
                    qkv,
                    token,
                    column,
                    head_dim,
                    query_weight,
                    eps,
                    cos_sin,
                    position,
                    out,
                    token,
                    column,
                )
            if slots[token] < 0:
                continue
            for head in range(num_kv_heads):
                column = (num_heads + head) * head_dim
                row = _slot_row(slots[token], head, num_kv_heads, block_size)
                write_rotated_head(
                    qkv, token, column, head_dim, key_weight, eps, cos_sin, position, keys, row, 0
                )
    # by head, because the slots of neighbouring tokens are neighbours
    for head in range(num_kv_heads):
        column = (num_heads + head) * head_dim
        for token in range(first, last):
            if slots[token] < 0:
                continue
            row = _slot_row(slots[token], head, num_kv_heads, block_size)
            if not is_rotated:
                copy_row(qkv, token, column, head_dim, keys, row)
            copy_row(qkv, token, column + num_kv_heads * head_dim, head_dim, values, row)
    return 0


@inlined
def _slot_row(slot, kv_head, num_kv_heads, block_size):
    """Return the row of a slot in the cache, for one key head."""
    return (slot // block_size * num_kv_heads + kv_head) * block_size + slot % block_size


@inlined_body
def copy_blocks(
    first,
    last,
    memory,
    copies,  # [copies, 2]
    block_bytes,
    cache_bytes,
):
    """Copy blocks of some of the caches that begin at an address."""
    for number in range(first, last):
        cache = memory + number * cache_bytes
        for i in range(len(copies)):
            source, copy = np.int64(copies[i, 0]), np.int64(copies[i, 1])
            if source != copy:
                copy_bytes(cache + copy * block_bytes, cache + source * block_bytes, block_bytes)
    return 0


# The score of no key: its weight is 0 beside the lowest score too.
_NO_KEY = np.float32(-3e38)
_ZERO = np.float32(0)
# Parts of a block that are read side by side, each in its order.
_RUNS = 4
# Vectors of a context whose sums are in registers.
_SUMS = 4


@inlined
def _run_length(count):
    """Return the tokens of a run: a multiple of 4, so 4 runs fill vectors."""
    return (count + LANES - 1) // LANES * (LANES // _RUNS)


@inlined
def _column(run, place):
    """Return the column of a token's score: a vector has four scores of each run."""
    tokens = LANES // _RUNS
    return place // tokens * LANES + run * tokens + place % tokens


@inlined
def _rows(first, last, place, length):
    """Return the row at one place of each run; past the last row, the last."""
    row = first + place
    return (
        min(row, last),
        min(row + length, last),
        min(row + 2 * length, last),
        min(row + 3 * length, last),
    )


@inlined
def _multiply_keys(query, member, keys, first, last, place, length):
    """Return four parts of each product of a query with four keys.

    The keys are at one place of each run; lanes 4 · run to 4 · run + 3 belong to it.
    """
    row_a, row_b, row_c, row_d = _rows(first, last, place, length)
    a = b = c = d = splat(_ZERO)
    for feature in range(0, query.shape[1], LANES):
        lanes = load(query, member, feature)
        a = multiply_add(load(keys, row_a, feature), lanes, a)
        b = multiply_add(load(keys, row_b, feature), lanes, b)
        c = multiply_add(load(keys, row_c, feature), lanes, c)
        d = multiply_add(load(keys, row_d, feature), lanes, d)
    return fold_4(fold_8(a, c), fold_8(b, d))


@inlined
def _write_scores(scores, query, keys, first, count):
    """Write the products of the queries of a key head with some keys.

    Args:
        first, count: first row and number of the keys. Places past them have the scores of the last key.
    """
    length, last = _run_length(count), first + count - 1
    for place in range(0, length, LANES // _RUNS):
        for member in range(query.shape[0]):
            a = _multiply_keys(query, member, keys, first, last, place, length)
            b = _multiply_keys(query, member, keys, first, last, place + 1, length)
            c = _multiply_keys(query, member, keys, first, last, place + 2, length)
            d = _multiply_keys(query, member, keys, first, last, place + 3, length)
            scores_of_four = fold_1(fold_2(a, c), fold_2(b, d))
            store(scores, member, _column(0, place), scores_of_four)


@inlined
def _bias_scores(scores, member, count, bias, head, distance):
    """Add the bias of a head; the first key has the distance `distance`."""
    length, reach = _run_length(count), bias.shape[1] // 2
    for i in range(count):
        column = max(distance + i, -reach) + reach
        scores[member, _column(i // length, i % length)] += bias[head, column]


@inlined
def _add_values(context, member, weights, values, first, count):
    """Add `count` weighted values, from row `first` on, to a context."""
    length, last, width = _run_length(count), first + count - 1, context.shape[1]
    whole = width // (_SUMS * LANES) * (_SUMS * LANES)
    for feature in range(0, whole, _SUMS * LANES):
        a = load(context, member, feature)
        b = load(context, member, feature + LANES)
        c = load(context, member, feature + 2 * LANES)
        d = load(context, member, feature + 3 * LANES)
        for place in range(length):
            for run in range(_RUNS):
                weight = splat(weights[member, _column(run, place)])
                row = min(first + place + run * length, last)
                a = multiply_add(load(values, row, feature), weight, a)
                b = multiply_add(load(values, row, feature + LANES), weight, b)
                c = multiply_add(load(values, row, feature + 2 * LANES), weight, c)
                d = multiply_add(load(values, row, feature + 3 * LANES), weight, d)
        store(context, member, feature, a)
        store(context, member, feature + LANES, b)
        store(context, member, feature + 2 * LANES, c)
        store(context, member, feature + 3 * LANES, d)
    for feature in range(whole, width, LANES):
        # a sum of each run: one sum would wait for itself
        a = load(context, member, feature)
        b = c = d = splat(_ZERO)
        for place in range(length):
            row_a, row_b, row_c, row_d = _rows(first, last, place, length)
            weight_a = splat(weights[member, _column(0, place)])
            weight_b = splat(weights[member, _column(1, place)])
            weight_c = splat(weights[member, _column(2, place)])
            weight_d = splat(weights[member, _column(3, place)])
            a = multiply_add(load(values, row_a, feature), weight_a, a)
            b = multiply_add(load(values, row_b, feature), weight_b, b)
            c = multiply_add(load(values, row_c, feature), weight_c, c)
            d = multiply_add(load(values, row_d, feature), weight_d, d)
        store(context, member, feature, (a + b) + (c + d))


@inlined
def _begin(queries, sequence, column, head_dim, scale, state):
    """Copy the scaled queries of a key head, and clear what is summed for them."""
    query, context, totals, top = state
    for member in range(query.shape[0]):
        copy_head(queries, sequence, column + member * head_dim, head_dim, query, member)
        for feature in range(0, query.shape[1], LANES):
            store(query, member, feature, load(query, member, feature) * splat(scale))
            store(context, member, feature, splat(_ZERO))
        store(totals, member, 0, splat(_ZERO))
        top[member] = LOWEST


@inlined
def _attend_keys(
    keys, values, first, count, bias, first_head, distance, soft_cap, scores, no_bias, state
):
    """Add some keys and values to the contexts of the queries of a key head.

    Args:
        first, count: first row and number of the keys.
        bias: `[num_heads, 2 * reach + 1]`, or `[num_heads, 0]` for none.
        distance: the distance from the query to the first key.
        soft_cap: limit of scores, 0 for none.
        scores: overwritten.
        no_bias: `[1, 0]`.
        state: queries, contexts, sums of weights and largest scores, `[query heads, ...]`.
    """
    query, context, totals, top = state
    length = _run_length(count)
    _write_scores(scores, query, keys, first, count)
    if soft_cap > 0:
        cap_scores(scores, query.shape[0], _RUNS * length, soft_cap)
    for member in range(query.shape[0]):
        if bias.shape[1]:
            _bias_scores(scores, member, count, bias, first_head + member, distance)
        for i in range(count, _RUNS * length):
            scores[member, _column(i // length, i % length)] = _NO_KEY
        columns, before = _RUNS * length, top[member]
        top[member] = max(before, largest_score(scores, member, columns, no_bias, 0))
        rescale = exp(splat(before - top[member]))
        weigh(scores, member, columns, top[member], rescale, totals, context, False, scores)
        _add_values(context, member, scores, values, first, count)


@inlined
def _attend_token(
    row,
    length,
    queries,
    keys,
    values,
    blocks,
    first_block,
    kv_head,
    num_kv_heads,
    block_size,
    bias,
    scale,
    window,
    soft_cap,
    out,
    memory,
):
    """Write the attention of one token for one key head; see `attend_tokens`."""
    scores, no_bias, state, key_rows, value_rows = memory
    query, context, totals, _ = state
    head_dim, group = keys.shape[1], query.shape[0]
    first_head = kv_head * group
    begin = max(0, length - window) if window else 0
    _begin(queries, row, first_head * head_dim, head_dim, scale, state)
    for block in range(begin // block_size, (length + block_size - 1) // block_size):
        position = max(begin, block * block_size)
        count = min(length, (block + 1) * block_size) - position
        first = block_row(position, blocks, first_block, kv_head, num_kv_heads, block_size)
        # the next head, which lies behind this one, is read in this order too
        for i in range(first + block_size, first + block_size + count):
            for feature in range(0, head_dim, ROW_BYTES // keys.itemsize):
                fetch_early(keys, i, feature)
                fetch_early(values, i, feature)
        block_keys, block_values = keys, values
        if key_rows.shape[0]:
            for i in range(count):
                copy_row(keys, first + i, 0, head_dim, key_rows, i)
                copy_row(values, first + i, 0, head_dim, value_rows, i)
            block_keys, block_values, first = key_rows, value_rows, 0
        distance = position - (length - 1)
        _attend_keys(
            block_keys,
            block_values,
            first,
            count,
            bias,
            first_head,
            distance,
            soft_cap,
            scores,
            no_bias,
            state,
        )
    for member in range(group):
        total = sum_of(load(totals, member, 0))
        column = (first_head + member) * head_dim
        write_context(context, member, total, out, row, column, head_dim)


@inlined
def _token_bytes(group, width, columns, copied_rows, item_bytes):
    """Return the size of the memory of `_token_views`, and of its parts."""
    sizes = aligned(4 * group * columns), aligned(4 * group * width)
    copied = aligned(item_bytes * copied_rows * width)
    total = sizes[0] + 2 * sizes[1] + 2 * copied + 4 * group * LANES + aligned(4 * group)
    return total, sizes[0], sizes[1], copied


@inlined_view
def _token_views(place, keys, group, width, columns, copied_rows):
    """Return the memory of `_attend_token`, from an address on.

    Returns:
        Scores; a matrix without numbers; queries, contexts, sums of weights and largest scores; and copies of rows of
        keys and of values with zeros behind them, where rows of the cache are not whole vectors.
    """
    _, score_bytes, head_bytes, copied = _token_bytes(
        group, width, columns, copied_rows, keys.itemsize
    )
    no_bias, scores = fp32_matrix(place, 1, 0), fp32_matrix(place, group, columns)
    place += score_bytes
    query = fp32_matrix(place, group, width)
    context = fp32_matrix(place + head_bytes, group, width)
    place += 2 * head_bytes
    clear(place, 2 * copied)
    key_rows = matrix_like(keys, place, copied_rows, width)
    value_rows = matrix_like(keys, place + copied, copied_rows, width)
    place += 2 * copied
    totals = fp32_matrix(place, group, LANES)
    top = fp32_vector(place + 4 * group * LANES, group)
    return scores, no_bias, (query, context, totals, top), key_rows, value_rows


@inlined_body
def attend_tokens(
    first_item,
    last_item,
    queries,  # [tokens, at least num_heads * head_dim]
    keys,  # [blocks * num_kv_heads * block_size, head_dim]
    values,  # [blocks * num_kv_heads * block_size, head_dim]
    num_kv_heads,
    block_size,
    cu_seqlens,  # [sequences + 1]
    context_lens,  # [sequences]
    blocks,  # [blocks in use]
    cu_blocks,  # [sequences + 1]
    bias,  # [num_heads, 2 * reach + 1], or [num_heads, 0] for none
    scale,
    window,
    soft_cap,
    out,  # [tokens, num_heads * head_dim]
):
    """Write the attention of sequences with one new token; return whether memory ran out.

    An item is one key head of one sequence. The heads of a sequence lie side by side in its blocks, and their items
    follow one another. The context of a sequence without keys is NaN.
    """
    head_dim, group = keys.shape[1], bias.shape[0] // num_kv_heads
    width = (head_dim + LANES - 1) // LANES * LANES
    columns = _RUNS * _run_length(block_size)
    copied_rows = 0 if width == head_dim else block_size
    memory = new_memory(_token_bytes(group, width, columns, copied_rows, keys.itemsize)[0])
    if memory == 0:
        return 1
    views = _token_views(memory, keys, group, width, columns, copied_rows)
    for item in range(first_item, last_item):
        sequence, kv_head = item // num_kv_heads, item % num_kv_heads
        start = cu_seqlens[sequence]
        if cu_seqlens[sequence + 1] - start == 1:
            _attend_token(
                start,
                context_lens[sequence],
                queries,
                keys,
                values,
                blocks,
                cu_blocks[sequence],
                kv_head,
                num_kv_heads,
                block_size,
                bias,
                scale,
                window,
                soft_cap,
                out,
                views,
            )
    free_memory(memory)
    return 0


@inlined
def _copy_context(
    length,
    keys,
    values,
    blocks,
    first_block,
    kv_head,
    num_kv_heads,
    block_size,
    keys_values,
):
    """Write panels of the keys of a sequence, and its values."""
    lanes, panels, paired_values = keys_values
    head_dim = keys.shape[1]
    for first in range(0, length, LANES):
        count = min(LANES, length - first)
        for i in range(count):
            position = first + i
            row = block_row(position, blocks, first_block, kv_head, num_kv_heads, block_size)
            copy_head(keys, row, 0, head_dim, lanes, i)
            copy_value(values, row, 0, head_dim, paired_values, position)
        clear_rows(lanes, count, LANES)
        write_panel(lanes, panels, first // LANES)


@inlined_body
def attend_chunks(
    first_item,
    last_item,
    queries,
    keys,
    values,
    num_kv_heads,
    block_size,
    cu_seqlens,
    context_lens,
    blocks,
    cu_blocks,
    bias,
    scale,
    window,
    soft_cap,
    out,
):
    """Write the attention of sequences with several new tokens; return whether memory ran out.

    Args:
        first_item, last_item: items, each one key head of one sequence, ordered by key head: sequences with several new
            tokens are the last ones, so cores share them by heads.
        queries, keys, values, num_kv_heads, block_size, cu_seqlens, context_lens, blocks, cu_blocks, bias, scale: see
            `paged.attend_tokens`.
        window, soft_cap, out: see there.
    """
    sequences, longest = len(context_lens), 0
    head_dim, group = keys.shape[1], bias.shape[0] // num_kv_heads
    width = head_width(head_dim, queries)
    for item in range(first_item, last_item):
        sequence = item % sequences
        if cu_seqlens[sequence + 1] - cu_seqlens[sequence] > 1:
            longest = max(longest, context_lens[sequence])
    if longest == 0:
        return 0
    memory = new_memory(attention_bytes(longest, width, True, False, queries))
    if memory == 0:
        return 1
    views = attention_views(memory, longest, width, True, False, queries)
    for item in range(first_item, last_item):
        kv_head, sequence = item // sequences, item % sequences
        start, length = cu_seqlens[sequence], context_lens[sequence]
        count = cu_seqlens[sequence + 1] - start
        if count > 1:
            _copy_context(
                length,
                keys,
                values,
                blocks,
                cu_blocks[sequence],
                kv_head,
                num_kv_heads,
                block_size,
                views[2],
            )
            attend_queries(
                queries,
                start,
                length - count,
                length,
                length,
                kv_head * group,
                group,
                head_dim,
                bias,
                scale,
                True,
                window,
                soft_cap,
                out,
                None,
                views,
            )
    free_memory(memory)
    return 0
