"""Rows, appended tokens and copies of KV blocks, for functions that numba compiles.

Source: the specification is `reference.append_kv`.
"""

import numpy as np

from varlen_kernels.cpu.lanes import load, load_first, store, store_first
from varlen_kernels.cpu.native import copy_bytes, inlined
from varlen_kernels.cpu.target_cpu import LANES


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
            copy_row(qkv, token, first_key + column, head_dim, keys, row)
            copy_row(qkv, token, first_value + column, head_dim, values, row)


@inlined
def copy_some_blocks(
    cache,
    copies,  # [copies, 2]
    block_bytes,
):
    """Copy blocks of the cache at an address."""
    for i in range(len(copies)):
        source, copy = np.int64(copies[i, 0]), np.int64(copies[i, 1])
        if source != copy:
            copy_bytes(cache + copy * block_bytes, cache + source * block_bytes, block_bytes)
