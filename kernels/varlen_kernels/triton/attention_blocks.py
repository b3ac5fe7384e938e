"""Blocks of keys and values in attention kernels: loads, products, and running sums.

The kernels of `attention_paged` read them from KV blocks. A tile has one row per query head and new token. All heads of
a row read one key head, so each key is read once for several query heads. Keys are read BLOCK_N at a time, in any
blocks: each key's address follows from the block table. Where a KV block holds BLOCK_N keys or several times as many,
these are one run of memory, and one address is read.
Source: Dao 2023, arXiv:2307.08691; Milakov, Gimelshein 2018, arXiv:1805.02867; Kwon et al. 2023, arXiv:2309.06180
(block tables); Ainslie et al. 2023, arXiv:2305.13245 (grouped heads).
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.paged import FP8
from varlen_kernels.triton.checks import check_contiguous, check_dtype

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_tile(
    tile_ptr,  # [ROWS, HEAD_DIM]; or several, [heads, 1, 1]
    num_rows,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return [ROWS, BLOCK_D], or [heads, ROWS, BLOCK_D].

    It is 0 past HEAD_DIM and, if MASKED, from row `num_rows` on.
    """
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    rows_ptr = tile_ptr + (row * STRIDE + col)
    if not MASKED and HEAD_DIM == BLOCK_D:
        return tl.load(rows_ptr)
    inside = col < HEAD_DIM
    if MASKED:
        inside = (row < num_rows) & inside
    if len(rows_ptr.shape) == 3:
        inside = inside[None, :, :]
    return tl.load(rows_ptr, mask=inside, other=0.0)


@triton.jit
def multiply_keys(
    q,  # [ROWS, BLOCK_D], or [heads, ROWS, BLOCK_D]
    k,  # [BLOCK_N, BLOCK_D], or [heads, BLOCK_N, BLOCK_D]
):
    """Return q kᵀ, in each head."""
    if len(k.shape) == 3:
        return tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="tf32x3")
    return tl.dot(q, tl.trans(k), input_precision="tf32x3")


@triton.jit
def add_values(
    context,  # [ROWS, BLOCK_D], weighted sum of the values read so far
    weight_sum,  # [ROWS]
    max_score,  # [ROWS]
    scores,  # [ROWS, BLOCK_N], -inf for a key that the query does not read
    v,  # [BLOCK_N, BLOCK_D]
    scale,
    MAY_HIDE_ALL: tl.constexpr,  # whether a query may have read no key yet
):
    """Return context, weight_sum and max_score after BLOCK_N more keys and values.

    All may have a leading axis of heads. A score of max_score has weight 1. Scores times `scale` are in base 2, because
    exp2 is a GPU instruction.
    """
    KEYS: tl.constexpr = len(scores.shape) - 1
    # scaled after the maximum: one fused multiply-add per score
    new_max = tl.maximum(max_score, tl.max(scores, axis=KEYS) * scale)
    shift = new_max
    if MAY_HIDE_ALL:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - tl.expand_dims(shift, KEYS))
    rescale = tl.exp2(max_score - shift)
    weight_sum = weight_sum * rescale + tl.sum(weights, axis=KEYS)
    context *= tl.expand_dims(rescale, KEYS)
    context = tl.dot(weights.to(v.dtype), v, context, input_precision="tf32x3")
    return context, weight_sum, new_max


@triton.jit
def cap_scores(
    scores,  # [ROWS, BLOCK_N]
    scale,  # of the scores to base 2
    SOFT_CAP: tl.constexpr,
):
    """Return scores in base 2, limited to SOFT_CAP in base e."""
    LIMIT: tl.constexpr = SOFT_CAP * LOG2_E
    # 2 · sigmoid(2 x) - 1 is tanh(x)
    return LIMIT * (2.0 * tl.sigmoid(scores * (2.0 * scale / LIMIT)) - 1.0)


@triton.jit
def add_bias(
    scores,  # [ROWS, BLOCK_N], in base 2
    bias_ptr,  # bias of distance 0, for all rows or for each
    distance,  # [ROWS, BLOCK_N], of each key from its query
    reach,
):
    """Return the scores plus the bias of each distance, clamped to -reach and reach."""
    distance = tl.minimum(tl.maximum(distance, -reach), reach)
    return scores + tl.load(bias_ptr + distance).to(tl.float32) * LOG2_E


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
        check_contiguous(**{name: cache})
    block_size = key_cache.shape[2]
    if block_size == 0 or block_size % _BLOCK_MULTIPLE:
        raise ValueError(f"block_size is {block_size}; allowed: multiples of {_BLOCK_MULTIPLE}")
