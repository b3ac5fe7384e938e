"""KV blocks and the attention that reads them in plain torch."""

from itertools import pairwise

import torch
from torch import Tensor

from varlen_kernels.reference.norm import norm_heads, rotary
from varlen_kernels.reference.torch_parts import attend, bias_by_distance, split_heads

__all__ = ["append_kv", "attention_paged", "copy_blocks", "paged_tiles"]

# Keys and values of 8 bits, with a scale of 1.
FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = torch.finfo(FP8).max


def append_kv(
    qkv: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position_ids: Tensor | None = None,
    cos_sin: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Write keys and values of tokens into their slots; return the rows with queries.

    With `cos_sin`, queries and keys are rotated first, and with weights they are normed before that: this op is then
    `norm_heads`, `rotary` and the append in one.

    Returns:
        `qkv` as it is without `cos_sin`, else `out`. There, only the queries mean something: `attention_paged` reads
        keys from the caches.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: queries, keys, values of each token. `num_heads`
            is 0 if there are only keys and values: an encoder's output, which cross-attention reads.
        slots: `[tokens]` int64, block · block_size + place in the block, no slot twice; -1 writes nothing.
        key_cache, value_cache: `[blocks, num_kv_heads, block_size, head_dim]`, changed in place. With FP8, numbers past
            its largest one, 448, become that.
        position_ids: `[tokens]` int32, given with `cos_sin`.
        cos_sin: `[positions, head_dim]` fp32, see `rotary`.
        query_weight, key_weight: `[head_dim]`, given with `cos_sin` or not at all, see `norm_heads`.
        eps: added to the mean square.
        out: may be `qkv`; ignored without `cos_sin`.
    """
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    if position_ids is not None and cos_sin is not None:
        if query_weight is not None and key_weight is not None:
            qkv = norm_heads(qkv, query_weight, key_weight, **heads, eps=eps, out=out)
        qkv = rotary(qkv, position_ids, cos_sin, **heads, out=out)
    _, keys, values = split_heads(qkv, num_heads, num_kv_heads)
    block_size = key_cache.shape[2]
    written = slots >= 0
    if not bool(written.all()):
        slots, keys, values = slots[written], keys[written], values[written]
    block, place = slots // block_size, slots % block_size
    if key_cache.dtype == FP8:
        keys, values = (
            each.float().clamp(-_LARGEST_FP8, _LARGEST_FP8).to(FP8).view(torch.uint8)
            for each in (keys, values)
        )
        # bytes, for which torch has an index
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    key_cache[block, :, place] = keys.to(key_cache.dtype)
    value_cache[block, :, place] = values.to(value_cache.dtype)
    return qkv


def paged_tiles(
    qkv: Tensor,
    key_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    cu_blocks: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the tiles of new tokens of `attention_paged` with these arguments.

    A row has the first new token of a sequence, its new tokens, the first query of one tile, the tokens before the new
    ones, and the place of the sequence's blocks in `block_ids`. How many tokens a tile has, and in which order tiles
    come, is the choice of the device: here a tile is a whole sequence. Tiles without queries begin at or after the end
    of their sequence. Rows past the last tile mean nothing.

    Returns:
        `[len(qkv) + 2 · len(cu_seqlens), 5]` int32, more rows than any device needs.

    Args:
        qkv, key_cache: only their shapes and dtypes matter.
        cu_seqlens, context_lens, cu_blocks, num_heads, num_kv_heads, window: see `attention_paged`.
    """
    del key_cache, num_heads, num_kv_heads, window
    if out is None:
        out = cu_seqlens.new_empty(len(qkv) + 2 * len(cu_seqlens), 5)
    new = cu_seqlens.diff()
    columns = cu_seqlens[:-1], new, torch.zeros_like(new), context_lens - new, cu_blocks[:-1]
    torch.stack(columns, dim=1, out=out[: len(new)])
    return out


def attention_paged(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_ids: Tensor,
    cu_blocks: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,  # noqa: ARG001  # an aid of devices
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of new tokens over their sequences' blocks, `[tokens, num_heads · head_dim]`.

    The new tokens of a sequence are the last of its context, and their keys and values are in the caches already. A
    sequence has one new token when it decodes, and several in a chunk of its prompt.

    Args:
        qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_dim]`; only the queries are read. Or only queries,
            `[tokens, num_heads · head_dim]`, for cross-attention. There each new token is a sequence of its own,
            whose context is the source: the token reads all of it.
        key_cache, value_cache: `[blocks, num_kv_heads, block_size, head_dim]`; FP8 is read in the dtype of `qkv`.
        cu_seqlens: `[sequences + 1]` int32, cumulative starts of the new tokens of each sequence.
        context_lens: `[sequences]` int32, keys of each sequence, the new tokens included.
        block_ids: `[blocks in use]` int32, the block table of each sequence, one after the other.
        cu_blocks: `[sequences + 1]` int32, cumulative starts of the block tables.
        bias: finite, by the distance of key and query, see `attention_varlen`.
        tiles: result of `paged_tiles` with the same arguments, to search `cu_seqlens` once for all layers.
        num_heads: a multiple of `num_kv_heads`; neighbouring heads share a key head.
        scale: multiplies the scores, usually head_dim ** -0.5.
        window: number of last tokens that a token reads, itself included; 0 is all.
        soft_cap: limit of scaled scores, 0 is none; see `attention_varlen`.

    Source: Kwon et al. 2023, arXiv:2309.06180 (blocks); Ainslie et al. 2023, arXiv:2305.13245 (grouped heads).
    """
    tokens, head_dim = len(qkv), key_cache.shape[3]
    if key_cache.dtype == FP8:
        key_cache, value_cache = key_cache.to(qkv.dtype), value_cache.to(qkv.dtype)
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    queries = qkv[:, : num_heads * head_dim].view(tokens, num_heads, head_dim)
    starts = cu_blocks.tolist()
    bounds, lengths = cu_seqlens.tolist(), context_lens.tolist()
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        length = lengths[sequence]
        table = block_ids[starts[sequence] : starts[sequence + 1]]
        # [num_kv_heads, length, head_dim]
        keys, values = (
            cache.index_select(0, table)
            .transpose(0, 1)
            .reshape(num_kv_heads, -1, head_dim)[:, :length]
            for cache in (key_cache, value_cache)
        )
        position = torch.arange(length, device=qkv.device)
        query_position = position[length - (end - begin) :, None]
        readable = position <= query_position
        if window:
            readable &= position > query_position - window
        mask = readable
        if bias is not None:
            mask = bias_by_distance(bias, query_position[:, 0], position)
            mask = mask.masked_fill(~readable, -torch.inf)
        q = queries[begin:end].transpose(0, 1)[None].to(keys.dtype)
        context = attend(q, keys[None], values[None], mask, scale=scale, soft_cap=soft_cap)
        out[begin:end].view(end - begin, num_heads, head_dim).copy_(context[0].transpose(0, 1))
    return out


def copy_blocks(memory: Tensor, copies: Tensor) -> None:
    """Copy KV blocks of all layers. A copy of a block to itself changes nothing.

    Args:
        memory: `[caches, blocks, num_kv_heads, block_size, head_dim]`, the keys and the values of all layers; changed.
        copies: `[copies, 2]` int32, each block and its copy. No copy is made twice, or is the source of another one.

    Raises:
        ValueError: `memory` is not contiguous, its blocks are no multiple of 4 bytes, or `copies` is of another form.
    """
    check_copies(memory, copies)
    for source, copy in copies.tolist():
        memory[:, copy] = memory[:, source]


def check_copies(memory: Tensor, copies: Tensor) -> None:
    """Check the arguments of `copy_blocks`.

    Raises:
        ValueError: see there.
    """
    block_bytes = memory.shape[2:].numel() * memory.element_size()
    if memory.ndim != 5 or not memory.is_contiguous() or block_bytes % 4:
        raise ValueError(
            f"memory is {list(memory.shape)} {memory.dtype}, strides {memory.stride()}; it must be contiguous, [caches,"
            " blocks, num_kv_heads, block_size, head_dim], and its blocks multiples of 4 bytes"
        )
    if copies.ndim != 2 or copies.shape[1] != 2 or copies.dtype != torch.int32:
        raise ValueError(
            f"copies is {list(copies.shape)} {copies.dtype}; it must be [copies, 2] {torch.int32}"
        )
