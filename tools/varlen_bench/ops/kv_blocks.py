"""Calls of the ops on KV blocks: append of keys and values, and paged attention."""

import random
from typing import Any

import torch
from torch import Tensor

from varlen_bench.ops.call import (
    Inputs,
    Made,
    Make,
    OpCall,
    bounds,
    random_fp32,
    shaped,
    unwritten,
)
from varlen_bench.ops.rows import RMS_NORM_EPS, positions_of
from varlen_bench.ops.sequences import first_tiles

# Blocks of a model whose blocks are copied.
_BLOCKS = 128


def append_kv(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    rotated: bool = False,
    normed: bool = False,
) -> OpCall:
    """Return the append of new keys and values, which fill shuffled blocks in order.

    Args:
        rotated: whether queries and keys get rotary positions.
        normed: whether they are normed before.
    """
    blocks = shuffled(-(-tokens // block_size))
    slots = [blocks[i // block_size] * block_size + i % block_size for i in range(tokens)]
    cache = unwritten(dtype, len(blocks), kv_heads, block_size, head_dim)
    row = (tokens, (heads + 2 * kv_heads) * head_dim)

    def read(result: Any, inputs: Inputs) -> Tensor:
        # [blocks * block_size, kv_heads, head_dim] each
        places = [cache.transpose(1, 2).flatten(0, 1) for cache in result]
        appended = torch.stack([place[inputs["slots"]] for place in places])
        if not rotated:
            return appended
        return torch.cat([inputs["out"][:, : heads * head_dim].flatten(), appended.flatten()])

    kinds = [name for name, is_on in (("normed", normed), ("rotated", rotated)) if is_on]
    return OpCall(
        "append_kv",
        " ".join([f"{tokens} into {block_size} {heads}/{kv_heads}x{head_dim}", *kinds]),
        dtype,
        {
            "qkv": row,
            "slots": lambda make: make.ints(slots).long(),
            "key_cache": cache,
            "value_cache": cache,
            **(positions_of(tokens, head_dim) if rotated else {}),
            **(shaped((head_dim,), "query_weight key_weight") if normed else {}),
        },
        row if rotated else None,
        {"num_heads": heads, "num_kv_heads": kv_heads, "eps": RMS_NORM_EPS},
        read=read,
        written=("key_cache", "value_cache"),
        # queries that are not rotated are not read; weights and angles stay in the cache
        moved=2 * tokens * (row[1] if rotated else 2 * kv_heads * head_dim) * dtype.itemsize
        + 8 * tokens,
        tokens=tokens,
        threshold=None if rotated else 0.0,
    )


def copy_blocks(
    copies: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
) -> OpCall:
    """Return copies of blocks into others, and of one to itself.

    Args:
        copies: number of blocks that are copied, below 64.
        layers: number of layers, which have keys and values.
    """
    half = _BLOCKS // 2
    pairs = [pair for i in range(copies) for pair in (i, half + i)]
    shape = 2 * layers, _BLOCKS, kv_heads, block_size, head_dim

    def read(result: Any, _: Inputs) -> Tensor:
        memory: Tensor = result[0]
        return memory

    return OpCall(
        "copy_blocks",
        f"{copies} of {block_size} {layers}x{kv_heads}x{head_dim}",
        dtype,
        {
            "memory": shape,
            "copies": lambda make: make.ints([*pairs, half - 1, half - 1]).view(-1, 2),
        },
        read=read,
        written=("memory",),
        moved=2 * copies * 2 * layers * kv_heads * block_size * head_dim * dtype.itemsize,
        threshold=0.0,
    )


def attention_paged(
    new: list[int],
    contexts: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    window: int = 0,
    biased: bool = False,
) -> OpCall:
    """Return attention of new tokens over shuffled KV blocks.

    Args:
        new: new tokens of each sequence; all ones for a decode step.
        contexts: tokens of each sequence, the new ones included.
        window: number of last tokens that a token reads; 0 is all.
        biased: whether to add a bias by the distance of query and key.
    """
    tokens = sum(new)
    inputs = _step(new, contexts, heads, kv_heads, head_dim, block_size)
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "window": window}
    shared = list(inputs)
    inputs |= {
        "value_cache": inputs["key_cache"],
        "block_ids": shuffled(sum(-(-length // block_size) for length in contexts)),
        "bias": random_fp32(heads, 2 * max(contexts) + 1) if biased else None,
        "tiles": _tiles(new),
    }

    def fill_tiles(ops: Any, tensors: Inputs) -> None:
        ops.paged_tiles(*(tensors[name] for name in shared), **options, out=tensors["tiles"])

    read_keys = pairs = 0
    for count, length in zip(new, contexts, strict=True):
        read_keys += min(length, (window or length) + count - 1)
        positions = range(length - count + 1, length + 1)
        pairs += sum(min(position, window or length) for position in positions)
    kind = f"window {window} " if window else ""
    return OpCall(
        "attention_paged",
        f"{tokens} on {sum(contexts)} {kind}{heads}/{kv_heads}x{head_dim}",
        dtype,
        inputs,
        (tokens, heads * head_dim),
        {**options, "scale": head_dim**-0.5},
        lengths=tuple(contexts),
        fill=fill_tiles,
        moved=2 * (read_keys * kv_heads + tokens * heads) * head_dim * dtype.itemsize,
        flops=4 * heads * head_dim * pairs,
        tokens=tokens,
    )


def paged_tiles(
    new: list[int],
    contexts: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> OpCall:
    """Return the tiles of paged attention over blocks of 16."""
    tokens, sequences = sum(new), len(new)
    return OpCall(
        "paged_tiles",
        f"{tokens} on {sum(contexts)} {heads}/{kv_heads}x{head_dim}",
        dtype,
        _step(new, contexts, heads, kv_heads, head_dim, 16),
        _tiles(new),
        {"num_heads": heads, "num_kv_heads": kv_heads},
        # the first row of each sequence, which no launch changes
        read=lambda result, _: first_tiles(result)[:sequences],
        lengths=tuple(contexts),
        moved=16 * sequences + 20 * (tokens // 64 + 2 * sequences),
        threshold=0.0,
    )


def shuffled(blocks: int) -> list[int]:
    """Return the block ids below `blocks` in a fixed random order."""
    order = list(range(blocks))
    random.Random(0).shuffle(order)
    return order


def _step(
    new: list[int],
    contexts: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> dict[str, Made]:
    """Return the inputs of `paged_tiles`, in order."""
    blocks = bounds([-(-length // block_size) for length in contexts])
    return {
        "qkv": (sum(new), (heads + 2 * kv_heads) * head_dim),
        "key_cache": (blocks[-1], kv_heads, block_size, head_dim),
        "cu_seqlens": bounds(new),
        "context_lens": contexts,
        "cu_blocks": blocks,
    }


def _tiles(new: list[int]) -> Make:
    return unwritten(torch.int32, sum(new) + 2 * (len(new) + 1), 5)
