"""KV blocks on a CPU, compiled by numba: copy them, append tokens, attend to them.

A decode step reads every key and value of its sequences once, so it is bound by memory. Blocks are read where they are:
no key is copied, and no score leaves the cache of its core.
Source: the specification is `reference.attention_paged`; docs/decisions/0019-cpu-decoding.md has measurements.
"""

import math

import numba
import numpy as np
import torch
from torch import Tensor

from varlen_kernels.cpu.threads import run_parts

# Below every score; not infinite, because the compiled code assumes finite numbers.
_LOWEST = np.float32(-1e30)
# Key features below which a second thread costs more than it saves: half a millisecond of work.
_LEAST_SHARED_WORK = 1 << 21


# a context of no tokens divides by zero, which gives NaN
@numba.njit(fastmath=True, nogil=True, cache=True, error_model="numpy")
def _attend_items(
    first_item,
    last_item,
    queries,  # [sequences, at least num_heads * head_dim]
    keys,  # [blocks, num_kv_heads, block_size, head_dim]
    values,  # [blocks, num_kv_heads, block_size, head_dim]
    block_ids,  # [blocks in use]
    cu_blocks,  # [sequences + 1]
    context_lens,  # [sequences]
    bias,  # [num_heads, 2 * reach + 1], or [num_heads, 0] for none
    scale,
    window,
    out,  # [sequences, num_heads * head_dim]
):
    """Write the attention of some items; an item is one key head of one sequence."""
    num_kv_heads, block_size, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    group = out.shape[1] // (num_kv_heads * head_dim)
    # -1 without a bias
    reach = (bias.shape[1] + 1) // 2 - 1
    # scores of one block, of each query head that reads it
    scores = np.empty((group, block_size), np.float32)
    context = np.empty((group, head_dim), np.float32)
    maximum = np.empty(group, np.float32)
    total = np.empty(group, np.float32)
    for item in range(first_item, last_item):
        sequence, kv_head = item // num_kv_heads, item % num_kv_heads
        length = context_lens[sequence]
        begin = max(0, length - window) if window else 0
        head_bias, query_position = bias[kv_head * group : (kv_head + 1) * group], length - 1
        first_feature = kv_head * group * head_dim
        query = queries[sequence, first_feature : first_feature + group * head_dim]
        context[:] = 0.0
        total[:] = 0.0
        maximum[:] = _LOWEST
        for block in range(begin // block_size, (length + block_size - 1) // block_size):
            block_id = block_ids[cu_blocks[sequence] + block]
            first = max(0, begin - block * block_size)
            last = min(block_size, length - block * block_size)
            block_keys, block_values = keys[block_id, kv_head], values[block_id, kv_head]
            for member in range(group):
                member_query = query[member * head_dim : (member + 1) * head_dim]
                member_scores = scores[member]
                largest = maximum[member]
                for place in range(first, last):
                    key = block_keys[place]
                    score = np.float32(0.0)
                    for feature in range(head_dim):
                        score += member_query[feature] * key[feature]
                    score *= scale
                    if reach >= 0:
                        distance = block * block_size + place - query_position
                        score += head_bias[member, max(distance, -reach) + reach]
                    member_scores[place] = score
                    largest = max(largest, score)
                # what was summed with a smaller maximum counts less
                rescale = np.float32(math.exp(maximum[member] - largest))
                maximum[member] = largest
                weights = np.float32(0.0)
                for place in range(first, last):
                    weight = np.float32(math.exp(member_scores[place] - largest))
                    member_scores[place] = weight
                    weights += weight
                total[member] = total[member] * rescale + weights
                member_context = context[member]
                for feature in range(head_dim):
                    member_context[feature] *= rescale
                for place in range(first, last):
                    weight, value = member_scores[place], block_values[place]
                    for feature in range(head_dim):
                        member_context[feature] += weight * value[feature]
        for member in range(group):
            # a division would be one of two: the compiler's vectors multiply by the inverse, its other numbers divide
            factor = np.float32(1.0) / total[member]
            for feature in range(head_dim):
                out[sequence, first_feature + member * head_dim + feature] = (
                    context[member, feature] * factor
                )


@numba.njit(nogil=True, cache=True)
def _append(
    qkv,  # [tokens, num_heads + 2 * num_kv_heads, head_dim]
    slots,  # [tokens]
    key_cache,  # [blocks, num_kv_heads, block_size, head_dim]
    value_cache,  # [blocks, num_kv_heads, block_size, head_dim]
):
    num_kv_heads, block_size, head_dim = key_cache.shape[1], key_cache.shape[2], key_cache.shape[3]
    first_key = qkv.shape[1] - 2 * num_kv_heads
    for token in range(len(slots)):
        if slots[token] < 0:
            continue
        block, place = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            for feature in range(head_dim):
                key = qkv[token, first_key + head, feature]
                key_cache[block, head, place, feature] = key
            for feature in range(head_dim):
                value = qkv[token, first_key + num_kv_heads + head, feature]
                value_cache[block, head, place, feature] = value


@numba.njit(nogil=True, cache=True)
def _copy(
    cache,  # [blocks, numbers of a block]
    sources,  # [copies]
    destinations,  # [copies]
):
    for i in range(len(sources)):
        block, copy = cache[sources[i]], cache[destinations[i]]
        for place in range(len(block)):
            copy[place] = block[place]


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy blocks of a cache, one after another.

    Args:
        cache: `[blocks, num_kv_heads, block_size, head_dim]` fp32, contiguous.
        sources, destinations: `[copies]` int64, block ids.
    """
    _copy(*(each.numpy() for each in (cache.flatten(1), sources, destinations)))


def append_tokens(qkv: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Write the keys and values of `[tokens, heads, head_dim]` fp32 as `reference.append_kv` does."""
    _append(*(each.numpy() for each in (qkv, slots, key_cache, value_cache)))


def attend_tokens(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_ids: Tensor,
    cu_blocks: Tensor,
    bias: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    window: int,
    out: Tensor,
) -> None:
    """Write the attention of one token per sequence into `out`.

    Args:
        qkv: `[sequences, at least num_heads · head_dim]`, at least one; the queries come first.
        key_cache, value_cache: `[blocks, num_kv_heads, block_size, head_dim]` fp32.
        context_lens, block_ids, cu_blocks, bias, scale, window: see `reference.attention_paged`.
        out: `[sequences, num_heads · head_dim]`.
    """
    _, num_kv_heads, _, head_dim = key_cache.shape
    # contiguous, as the queries are, else the code is not vectorized
    fits = out.dtype == torch.float32 and out.is_contiguous()
    context = out if fits else torch.empty(out.shape)
    lengths = context_lens.numpy()
    arrays = (
        qkv.float().contiguous().numpy(),
        *(tensor.numpy() for tensor in (key_cache, value_cache, block_ids, cu_blocks)),
        lengths,
        (
            qkv.new_empty(num_heads, 0, dtype=torch.float32) if bias is None else bias.float()
        ).numpy(),
        np.float32(scale),
        window,
        context.numpy(),
    )
    bounds = [0, len(lengths) * num_kv_heads]
    cores = torch.get_num_threads()
    if cores > 1 and int(lengths.sum()) * num_kv_heads * head_dim >= _LEAST_SHARED_WORK:
        work = np.cumsum(np.repeat(lengths, num_kv_heads))
        bounds[1:1] = np.searchsorted(work, np.arange(1, cores) * (work[-1] / cores)).tolist()
    run_parts(_attend_items, bounds, *arrays)
    if not fits:
        out.copy_(context)
