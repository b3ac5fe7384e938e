"""Calls of the ops on KV blocks: append of keys and values, and paged attention."""

import random
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from varlen_bench.ops.call import Inputs, OpCall, Tensors


def append_kv(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
) -> OpCall:
    """Return the append of new keys and values, which fill shuffled blocks in order."""
    blocks = -(-tokens // block_size)
    width = (heads + 2 * kv_heads) * head_dim
    order = shuffled(blocks)
    slots = [order[i // block_size] * block_size + i % block_size for i in range(tokens)]

    def formula(qkv: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:  # noqa: ARG001
        parts = torch.split(qkv.view(tokens, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
        _, keys, values = parts
        return torch.stack((keys, values))

    def read(result: object, inputs: Inputs) -> Tensor:
        assert isinstance(result, tuple)
        # [blocks * block_size, kv_heads, head_dim] each
        places = [cache.transpose(1, 2).flatten(0, 1) for cache in result]
        return torch.stack([place[inputs["slots"]] for place in places])

    cache_shape = (blocks, kv_heads, block_size, head_dim)
    return OpCall(
        op="append_kv",
        shape=f"{tokens} into {block_size} {heads}/{kv_heads}x{head_dim}",
        dtype=dtype,
        inputs=lambda make: {
            "qkv": make.random(tokens, width),
            "slots": make.ints(slots).long(),
            "key_cache": make.unwritten(*cache_shape),
            "value_cache": make.unwritten(*cache_shape),
        },
        formula=formula,
        bytes_moved=4 * tokens * kv_heads * head_dim * dtype.itemsize + 8 * tokens,
        options={"num_heads": heads, "num_kv_heads": kv_heads},
        read=read,
        written=("key_cache", "value_cache"),
        tokens=tokens,
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
    tokens, group = sum(new), heads // kv_heads
    reach = max(contexts)
    counts = [-(-length // block_size) for length in contexts]
    tables = list(accumulate(counts, initial=0))

    def inputs(make: Tensors) -> Inputs:
        return {
            "qkv": make.random(tokens, (heads + 2 * kv_heads) * head_dim),
            "key_cache": make.random(sum(counts), kv_heads, block_size, head_dim),
            "value_cache": make.random(sum(counts), kv_heads, block_size, head_dim),
            "cu_seqlens": make.cu_seqlens(new),
            "context_lens": make.ints(contexts),
            "block_ids": make.ints(shuffled(sum(counts))),
            "cu_blocks": make.ints(tables),
            "bias": make.random(heads, 2 * reach + 1, dtype=torch.float32) if biased else None,
            "tiles": make.unwritten(tokens + 2 * (len(new) + 1), 5, dtype=torch.int32),
            "out": make.unwritten(tokens, heads * head_dim),
        }

    def attended(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Return the context of the last tokens; queries are [new, heads, head_dim]."""
        count, length = len(queries), keys.shape[1]
        q = queries.transpose(0, 1).reshape(kv_heads, group, count, head_dim)
        scores = q @ keys[:, None].transpose(2, 3) * head_dim**-0.5
        position = torch.arange(length, device=keys.device)
        distance = position[length - count :, None] - position
        if bias is not None:
            scores += bias[:, reach - distance].view(scores.shape)
        hidden = distance < 0 if window == 0 else (distance < 0) | (distance >= window)
        context: Tensor = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values[:, None]
        return context.flatten(0, 1).transpose(0, 1).flatten(1)

    def formula(
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        cu_seqlens: Tensor,  # noqa: ARG001
        context_lens: Tensor,  # noqa: ARG001
        block_ids: Tensor,
        cu_blocks: Tensor,  # noqa: ARG001
        bias: Tensor | None,
        tiles: Tensor,  # noqa: ARG001
    ) -> Tensor:
        queries = torch.split(qkv.view(tokens, -1, head_dim)[:, :heads], new)
        rows = []
        for q, (first, last), length in zip(queries, pairwise(tables), contexts, strict=True):
            keys, values = (
                cache[block_ids[first:last].long()].transpose(0, 1).flatten(1, 2)[:, :length]
                for cache in (key_cache, value_cache)
            )
            rows.append(attended(q, keys, values, bias))
        return torch.cat(rows)

    def fill_tiles(ops: Any, inputs: Inputs) -> None:
        names = ("qkv", "key_cache", "cu_seqlens", "context_lens", "cu_blocks")
        ops.paged_tiles(
            *(inputs[name] for name in names),
            num_heads=heads,
            num_kv_heads=kv_heads,
            window=window,
            out=inputs["tiles"],
        )

    read_keys = sum(
        min(length, window + count - 1) if window else length
        for count, length in zip(new, contexts, strict=True)
    )
    pairs = sum(
        min(position, window) if window else position
        for count, length in zip(new, contexts, strict=True)
        for position in range(length - count + 1, length + 1)
    )
    kind = f"window {window} " if window else ""
    return OpCall(
        op="attention_paged",
        shape=f"{tokens} on {sum(contexts)} {kind}{heads}/{kv_heads}x{head_dim}",
        dtype=dtype,
        inputs=inputs,
        formula=formula,
        bytes_moved=2 * (read_keys * kv_heads + tokens * heads) * head_dim * dtype.itemsize,
        options={
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "scale": head_dim**-0.5,
            "window": window,
        },
        lengths=tuple(contexts),
        fill=fill_tiles,
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
    tables = list(accumulate((-(-length // 16) for length in contexts), initial=0))

    def sequences_of(result: object, inputs: Inputs) -> Tensor:  # noqa: ARG001  # a `Read`
        """Return the first row of each sequence, which no launch changes."""
        assert isinstance(result, Tensor)
        is_first = (result[:, 2] == 0) & (result[:, 1] > 0)
        return result[is_first][:sequences]

    def formula(
        qkv: Tensor,  # noqa: ARG001
        key_cache: Tensor,  # noqa: ARG001
        cu_seqlens: Tensor,
        context_lens: Tensor,
        cu_blocks: Tensor,
    ) -> Tensor:
        count = cu_seqlens.diff()
        columns = cu_seqlens[:-1], count, 0 * count, context_lens - count, cu_blocks[:-1]
        return torch.stack(columns, dim=1)

    return OpCall(
        op="paged_tiles",
        shape=f"{tokens} on {sum(contexts)} {heads}/{kv_heads}x{head_dim}",
        dtype=dtype,
        inputs=lambda make: {
            "qkv": make.random(tokens, (heads + 2 * kv_heads) * head_dim),
            "key_cache": make.random(tables[-1], kv_heads, 16, head_dim),
            "cu_seqlens": make.cu_seqlens(new),
            "context_lens": make.ints(contexts),
            "cu_blocks": make.ints(tables),
            "out": make.unwritten(tokens + 2 * (sequences + 1), 5, dtype=torch.int32),
        },
        formula=formula,
        bytes_moved=16 * sequences + 20 * (tokens // 64 + 2 * sequences),
        options={"num_heads": heads, "num_kv_heads": kv_heads},
        read=sequences_of,
        lengths=tuple(contexts),
        threshold=0.0,
    )


def shuffled(blocks: int) -> list[int]:
    """Return the block ids below `blocks` in a fixed random order."""
    order = list(range(blocks))
    random.Random(0).shuffle(order)
    return order
