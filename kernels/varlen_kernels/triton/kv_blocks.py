"""Attention to keys and values in KV blocks: what the kernels of `attention_paged` share.

A tile has one row per query head and new token. All heads of a row read one key head, so each key is read once for
several query heads. Keys are read BLOCK_N at a time, in any blocks: each key's address follows from the block table.
Where a KV block holds BLOCK_N keys or several times as many, these are one run of memory, and one address is read.
Source: Kwon et al. 2023, arXiv:2309.06180 (block tables); Ainslie et al. 2023, arXiv:2305.13245 (grouped heads).
"""

import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.paged import FP8
from varlen_kernels.triton.attention_blocks import add_bias, add_values, cap_scores, multiply_keys
from varlen_kernels.triton.checks import check_dtype

# Fewest rows of a matrix product on tensor cores; larger groups of heads are divided.
_MAX_TILE_HEADS = 16
_BLOCK_MULTIPLE = 16
_LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def for_cache(
    x,
    cache_ptr,
):
    """Return x in the dtype of a cache, at most the largest number of FP8."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32)
        # NaN stays
        x = tl.where(x > _LARGEST_FP8, _LARGEST_FP8, tl.where(x < -_LARGEST_FP8, -_LARGEST_FP8, x))
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def attend_to_blocks(
    context,  # [ROWS, BLOCK_D], weighted sum of the values read so far
    weight_sum,  # [ROWS]
    max_score,  # [ROWS]
    q,  # [ROWS, BLOCK_D]
    position,  # [ROWS, 1] of each query in its sequence
    keys_ptr,  # [blocks, BLOCK_STRIDE], first key of the head
    values_ptr,  # [blocks, BLOCK_STRIDE]
    table_ptr,  # block ids of the sequence
    first_key,
    end,  # no query reads this key or later ones
    scale,
    bias_ptr,  # [ROWS, 1], bias of distance 0 of each row, read if HAS_BIAS
    reach,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return context, weight_sum and max_score after BLOCK_N more keys, see `add_values`.

    Without MASKED, every query may read all of these keys. With ALIGNED, `first_key` is a multiple of BLOCK_N.
    """
    key = first_key + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = col < HEAD_DIM
    if MASKED:
        # the table ends with the sequence, and memory past the last key may hold NaN
        exists = key < end
        inside = inside & exists[:, None]
    if ALIGNED and BLOCK_SIZE % BLOCK_N == 0:
        # int64: blocks * BLOCK_STRIDE may pass 2**31
        block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
        run = block * BLOCK_STRIDE + first_key % BLOCK_SIZE * HEAD_DIM
        keys_ptr += run
        values_ptr += run
        at = tl.arange(0, BLOCK_N)[:, None] * HEAD_DIM + col
    else:
        if MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=exists, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        at = block.to(tl.int64) * BLOCK_STRIDE + key % BLOCK_SIZE * HEAD_DIM
        at = at[:, None] + col
    if MASKED or HEAD_DIM < BLOCK_D:
        k = tl.load(keys_ptr + at, mask=inside, other=0.0)
        v = tl.load(values_ptr + at, mask=inside, other=0.0)
    else:
        k = tl.load(keys_ptr + at)
        v = tl.load(values_ptr + at)

    if k.dtype == tl.float8e4nv:
        k, v = k.to(q.dtype), v.to(q.dtype)
    scores = multiply_keys(q.to(k.dtype), k)
    key = key[None, :]
    if SOFT_CAP > 0:
        scores = cap_scores(scores, scale, SOFT_CAP)
        scale = 1.0
    if HAS_BIAS:
        scores = add_bias(scores * scale, bias_ptr, key - position, reach)
        scale = 1.0
    if MASKED:
        readable = (key < end) & (key <= position)
        if WINDOW > 0:
            readable = readable & (key > position - WINDOW)
        scores = tl.where(readable, scores, float("-inf"))
    # a window may hide all keys so far
    return add_values(context, weight_sum, max_score, scores, v, scale, WINDOW > 0)


def tile_heads(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Return the query heads of one tile, and the tiles of one key head."""
    group = num_heads // num_kv_heads
    heads = min(group, _MAX_TILE_HEADS)
    return heads, triton.cdiv(group, heads)


def check_caches(key_cache: Tensor, value_cache: Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Check the shapes, dtype and layout of the caches of one layer.

    Raises:
        ValueError: they are not `[blocks, num_kv_heads, block_size, head_dim]`, contiguous, of one supported dtype,
            or block_size is not a multiple of 16.
    """
    if key_cache.dtype != FP8:
        check_dtype(key_cache=key_cache)
    for name, cache in {"key_cache": key_cache, "value_cache": value_cache}.items():
        shape = cache.shape
        if len(shape) != 4 or (shape[1], shape[3]) != (num_kv_heads, head_dim):
            raise ValueError(
                f"{name} is {list(shape)}; it must be [blocks, {num_kv_heads}, block_size, {head_dim}]"
            )
        if shape != key_cache.shape or cache.dtype != key_cache.dtype:
            raise ValueError(
                f"{name} is {list(shape)} {cache.dtype};"
                f" key_cache is {list(key_cache.shape)} {key_cache.dtype}"
            )
        if not cache.is_contiguous():
            raise ValueError(f"{name} has strides {cache.stride()}; it must be contiguous")
    block_size = key_cache.shape[2]
    if block_size == 0 or block_size % _BLOCK_MULTIPLE:
        raise ValueError(f"block_size is {block_size}; allowed: multiples of {_BLOCK_MULTIPLE}")
