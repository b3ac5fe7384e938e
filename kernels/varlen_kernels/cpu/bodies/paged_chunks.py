"""Attention of several new tokens over KV blocks, for functions that numba compiles.

The keys and values of the sequence are copied once for each key head, into what `attention` reads.
Source: the specification is `reference.attention_paged`.
"""

from varlen_kernels.cpu.bodies.attention import attend_queries, attention_bytes, attention_views
from varlen_kernels.cpu.bodies.attention_weights import clear_rows, copy_head
from varlen_kernels.cpu.bodies.kv_blocks import block_row
from varlen_kernels.cpu.native.lanes import splat, transpose
from varlen_kernels.cpu.native.native import free_memory, inlined, inlined_body, new_memory
from varlen_kernels.cpu.native.target_cpu import LANES


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
    scale,
    keys_values,
):
    """Write panels of the scaled keys of a sequence, and rows of its values."""
    lanes, panels, value_rows = keys_values
    head_dim, width = keys.shape[1], value_rows.shape[1]
    for first in range(0, length, LANES):
        count = min(LANES, length - first)
        for i in range(count):
            position = first + i
            row = block_row(position, blocks, first_block, kv_head, num_kv_heads, block_size)
            copy_head(keys, row, 0, head_dim, lanes, i)
            copy_head(values, row, 0, head_dim, value_rows, position)
        clear_rows(lanes, count, LANES)
        for feature in range(0, width, LANES):
            transpose(lanes, feature, panels, first // LANES * width + feature, splat(scale))


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
    width = (head_dim + LANES - 1) // LANES * LANES
    for item in range(first_item, last_item):
        sequence = item % sequences
        if cu_seqlens[sequence + 1] - cu_seqlens[sequence] > 1:
            longest = max(longest, context_lens[sequence])
    if longest == 0:
        return 0
    memory = new_memory(attention_bytes(longest, width, True, False))
    if memory == 0:
        return 1
    views = attention_views(memory, longest, width, True, False)
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
                scale,
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
                True,
                window,
                soft_cap,
                out,
                None,
                views,
            )
    free_memory(memory)
    return 0
