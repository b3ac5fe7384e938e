"""Blocks of keys and values in attention kernels: loads, products, and running sums.

Source: Dao 2023, arXiv:2307.08691; Milakov, Gimelshein 2018, arXiv:1805.02867.
"""

import math

import triton
import triton.language as tl

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
