"""Rows, appended tokens and copies of KV blocks, for functions that numba compiles.

Source: the specification is `reference.append_kv`.
"""

import numpy as np

from varlen_kernels.cpu.bodies.heads import write_rotated_head
from varlen_kernels.cpu.native.lanes import load, load_first, store, store_first
from varlen_kernels.cpu.native.native import copy_bytes, inlined, inlined_body
from varlen_kernels.cpu.native.target_cpu import LANES


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
