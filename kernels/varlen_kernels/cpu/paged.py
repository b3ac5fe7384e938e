"""KV blocks on a CPU, compiled by numba: copy them, append tokens, attend to them.

A decode step reads every key and value of its sequences once, so it is bound by memory. Blocks are read where they are,
once for all query heads of a key head, and no score leaves the cache of its core. The tokens of a block are read as
four runs side by side: a core reads several streams of memory faster than one. The products of 16 keys are summed
together, so that no score is a sum of its own.
Source: the specification is `reference.attention_paged`; docs/decisions/0019-cpu-decoding.md has measurements.
"""

import numpy as np

from varlen_kernels.cpu.attention_panels import copy_head
from varlen_kernels.cpu.attention_weights import LOWEST, weigh, write_context
from varlen_kernels.cpu.lanes import (
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
from varlen_kernels.cpu.native import (
    aligned,
    clear,
    fp32_matrix,
    fp32_vector,
    free_memory,
    inlined,
    matrix_like,
    new_memory,
)
from varlen_kernels.cpu.target_cpu import LANES

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
def _attend_keys(keys, values, first, count, bias, first_head, distance, scores, no_bias, state):
    """Add some keys and values to the contexts of the queries of a key head.

    Args:
        first, count: first row and number of the keys.
        bias: `[num_heads, 2 * reach + 1]`, or `[num_heads, 0]` for none.
        distance: the distance from the query to the first key.
        scores: overwritten.
        no_bias: `[1, 0]`.
        state: queries, contexts, sums of weights and largest scores, `[query heads, ...]`.
    """
    query, context, totals, top = state
    length = _run_length(count)
    _write_scores(scores, query, keys, first, count)
    for member in range(query.shape[0]):
        if bias.shape[1]:
            _bias_scores(scores, member, count, bias, first_head + member, distance)
        for i in range(count, _RUNS * length):
            scores[member, _column(i // length, i % length)] = _NO_KEY
        weigh(scores, member, _RUNS * length, no_bias, 0, top, totals, context, False)
        _add_values(context, member, scores, values, first, count)


@inlined
def _copy_row(source, row, column, count, destination, to_row):
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
def attend_blocks(
    first_item,
    last_item,
    queries,  # [sequences, at least num_heads * head_dim]
    keys,  # [blocks * num_kv_heads * block_size, head_dim]
    values,  # [blocks * num_kv_heads * block_size, head_dim]
    num_kv_heads,
    block_size,
    block_ids,  # [blocks in use]
    cu_blocks,  # [sequences + 1]
    context_lens,  # [sequences]
    bias,  # [num_heads, 2 * reach + 1], or [num_heads, 0] for none
    scale,
    window,
    out,  # [sequences, num_heads * head_dim]
):
    """Write the attention of some items; return whether memory ran out.

    An item is one key head of one sequence. The context of a sequence without keys is NaN.
    """
    head_dim, group = keys.shape[1], bias.shape[0] // num_kv_heads
    width = (head_dim + LANES - 1) // LANES * LANES
    columns = _RUNS * _run_length(block_size)
    # rows of a width that is not whole vectors are copied, with zeros behind them
    is_whole = width == head_dim
    copied_rows = 0 if is_whole else block_size
    head_bytes = aligned(4 * group * width)
    copied_bytes = aligned(keys.itemsize * copied_rows * width)
    score_bytes = aligned(4 * group * columns)
    memory = new_memory(
        score_bytes + 2 * head_bytes + 2 * copied_bytes + 4 * group * LANES + aligned(4 * group)
    )
    if memory == 0:
        return 1
    no_bias = fp32_matrix(memory, 1, 0)
    scores = fp32_matrix(memory, group, columns)
    place = memory + score_bytes
    query = fp32_matrix(place, group, width)
    context = fp32_matrix(place + head_bytes, group, width)
    place += 2 * head_bytes
    clear(place, 2 * copied_bytes)
    key_rows = matrix_like(keys, place, copied_rows, width)
    value_rows = matrix_like(values, place + copied_bytes, copied_rows, width)
    place += 2 * copied_bytes
    totals = fp32_matrix(place, group, LANES)
    top = fp32_vector(place + 4 * group * LANES, group)
    state = query, context, totals, top
    for item in range(first_item, last_item):
        sequence, kv_head = item // num_kv_heads, item % num_kv_heads
        first_head, length = kv_head * group, context_lens[sequence]
        begin = max(0, length - window) if window else 0
        _begin(queries, sequence, first_head * head_dim, head_dim, scale, state)
        for block in range(begin // block_size, (length + block_size - 1) // block_size):
            position = max(begin, block * block_size)
            count = min(length, (block + 1) * block_size) - position
            block_id = np.int64(block_ids[cu_blocks[sequence] + block])
            first = (block_id * num_kv_heads + kv_head) * block_size + position % block_size
            block_keys, block_values = keys, values
            if not is_whole:
                for i in range(count):
                    _copy_row(keys, first + i, 0, head_dim, key_rows, i)
                    _copy_row(values, first + i, 0, head_dim, value_rows, i)
                block_keys, block_values, first = key_rows, value_rows, 0
            _attend_keys(
                block_keys,
                block_values,
                first,
                count,
                bias,
                first_head,
                position - (length - 1),
                scores,
                no_bias,
                state,
            )
        for member in range(group):
            column = (first_head + member) * head_dim
            total = sum_of(load(totals, member, 0))
            write_context(context, member, total, out, sequence, column, head_dim)
    free_memory(memory)
    return 0


@inlined
def append_rows(
    first_head,
    last_head,
    qkv,  # [tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    slots,  # [tokens]
    keys,  # [blocks * num_kv_heads * block_size, head_dim]
    values,  # [blocks * num_kv_heads * block_size, head_dim]
    num_kv_heads,
    block_size,
):
    """Write the keys and values of some key heads."""
    head_dim = keys.shape[1]
    first_value = qkv.shape[1] - num_kv_heads * head_dim
    first_key = first_value - num_kv_heads * head_dim
    # by head, because the slots of neighbouring tokens are neighbours
    for head in range(first_head, last_head):
        column = head * head_dim
        for token in range(len(slots)):
            if slots[token] < 0:
                continue
            block, place = slots[token] // block_size, slots[token] % block_size
            row = (block * num_kv_heads + head) * block_size + place
            _copy_row(qkv, token, first_key + column, head_dim, keys, row)
            _copy_row(qkv, token, first_value + column, head_dim, values, row)


@inlined
def copy_some_blocks(
    cache,  # [blocks * rows of a block, numbers of a row]
    sources,  # [copies]
    destinations,  # [copies]
    rows,
):
    """Copy blocks, one after another."""
    for i in range(len(sources)):
        for row in range(rows):
            source, destination = sources[i] * rows + row, destinations[i] * rows + row
            _copy_row(cache, source, 0, cache.shape[1], cache, destination)
