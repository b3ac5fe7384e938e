"""Attention over packed tokens: each query reads the keys of its own sequence, without padding.

One program owns one tile: BLOCK_M queries of one sequence and one head. It reads the keys in blocks and keeps a running
maximum and a running sum of each query's weights, so scores stay in registers.
Source: Dao 2023, arXiv:2307.08691; Milakov, Gimelshein 2018, arXiv:1805.02867.

A program finds its sequence itself: the tiles of sequence i start at cu_seqlens[i] // BLOCK_M + i. Each sequence has
enough tiles for its length, and at most one more. So the number of tiles follows from the shapes of the batch: the host
needs no sequence length, and one CUDA graph serves every batch of the same shapes.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.checks import check_cu_seqlens, check_dtype, check_out, check_row_layout
from varlen_kernels.tuning import Launch, pick

MAX_HEAD_DIM = 256

LOG2_E = tl.constexpr(math.log2(math.e))

# Sequences that a program reads at once to find its own.
_BLOCK_BATCH = 256
# Lower bounds of the buckets of mean sequence lengths.
_MEAN_LENGTHS = (256, 64, 16, 1)
# Largest BLOCK_M, by mean length: larger tiles read the keys fewer times, but leave more rows empty.
_MAX_BLOCK_M = {256: 128, 64: 64, 16: 32, 1: 16}
_MAX_CANDIDATES = 4
# Hardware limit per thread.
_MAX_REGISTERS = 255

# (BLOCK_M, BLOCK_N, num_warps, num_stages), by (BLOCK_D, bytes per element, has a bias), in ascending order of BLOCK_M.
# All fit the registers of sm_80 and sm_90. fp32 needs small tiles: its operands have twice the size, and each product
# takes three on tensor cores. A bias needs small tiles because it is one load per score.
_TILES: dict[tuple[int, int, bool], list[tuple[int, int, int, int]]] = {
    (64, 2, False): [
        (16, 32, 2, 3),
        (32, 32, 2, 3),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
    ],
    (64, 2, True): [(16, 32, 2, 2), (32, 32, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)],
    (128, 2, False): [
        (16, 32, 2, 3),
        (32, 32, 2, 3),
        (32, 64, 4, 3),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 8, 3),
    ],
    (128, 2, True): [(16, 32, 2, 2), (32, 32, 4, 2), (64, 32, 8, 2)],
    (256, 2, False): [(16, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2)],
    (256, 2, True): [(16, 32, 4, 2), (32, 32, 8, 2), (32, 32, 4, 2), (64, 32, 8, 1)],
    (64, 4, False): [(16, 32, 4, 2), (32, 32, 4, 2)],
    (64, 4, True): [(16, 32, 4, 2), (32, 16, 4, 2)],
    (128, 4, False): [(16, 32, 4, 2), (32, 32, 8, 2)],
    (128, 4, True): [(16, 32, 4, 2), (32, 32, 8, 2)],
    (256, 4, False): [(16, 32, 8, 2)],
}


@triton.jit
def find_tile(
    cu_seqlens_ptr,  # [batch + 1]
    batch,
    tile,
    BLOCK_M: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
):
    """Return a tile's sequence (its number, first token and length) and the tile's first query.

    The tile belongs to the last sequence whose first tile is not after it. First tiles, starts and ends all ascend from
    sequence to sequence, so maxima find them. A binary search would need dependent loads.
    """
    owners = tl.zeros([BLOCK_BATCH], tl.int32)
    first_tiles = tl.zeros([BLOCK_BATCH], tl.int32)
    begins = tl.zeros([BLOCK_BATCH], tl.int32)
    ends = tl.zeros([BLOCK_BATCH], tl.int32)
    # the first tile of sequence i is tile i or a later one
    for first in range(0, tl.minimum(batch, tile + 1), BLOCK_BATCH):
        sequence = first + tl.arange(0, BLOCK_BATCH)
        begin = tl.load(cu_seqlens_ptr + sequence, mask=sequence < batch, other=0)
        end = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch, other=0)
        first_tile = begin // BLOCK_M + sequence
        started = (first_tile <= tile) & (sequence < batch)
        owners = tl.where(started, sequence, owners)
        first_tiles = tl.where(started, first_tile, first_tiles)
        begins = tl.where(started, begin, begins)
        ends = tl.where(started, end, ends)
    begin = tl.max(begins, axis=0)
    first_query = (tile - tl.max(first_tiles, axis=0)) * BLOCK_M
    return tl.max(owners, axis=0), begin, tl.max(ends, axis=0) - begin, first_query


@triton.jit
def load_tile(
    tile_ptr,  # [ROWS, HEAD_DIM]
    num_rows,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return [ROWS, BLOCK_D]: 0 past HEAD_DIM and, if MASKED, from row `num_rows` on."""
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    at = row * STRIDE + col
    if MASKED:
        return tl.load(tile_ptr + at, mask=(row < num_rows) & (col < HEAD_DIM), other=0.0)
    if HEAD_DIM < BLOCK_D:
        return tl.load(tile_ptr + at, mask=col < HEAD_DIM, other=0.0)
    return tl.load(tile_ptr + at)


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

    A score of max_score has weight 1. Scores times `scale` are in base 2, because exp2 is a GPU instruction.
    """
    # scaled after the maximum: one fused multiply-add per score
    new_max = tl.maximum(max_score, tl.max(scores, axis=1) * scale)
    shift = new_max
    if MAY_HIDE_ALL:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])
    rescale = tl.exp2(max_score - shift)
    weight_sum = weight_sum * rescale + tl.sum(weights, axis=1)
    context = tl.dot(weights.to(v.dtype), v, context * rescale[:, None], input_precision="tf32x3")
    return context, weight_sum, new_max


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


@triton.jit
def attend_to_keys(
    context,  # [BLOCK_M, BLOCK_D], weighted sum of the values read so far
    weight_sum,  # [BLOCK_M]
    max_score,  # [BLOCK_M]
    q,  # [BLOCK_M, BLOCK_D]
    keys_ptr,  # [length, HEAD_DIM], of the sequence
    values_ptr,  # [length, HEAD_DIM]
    bias_ptr,  # bias of distance 0, read if HAS_BIAS
    reach,
    first_query,
    first_key,
    length,
    scale,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return context, weight_sum and max_score after BLOCK_N more keys, see `add_values`.

    Without MASKED, every query may read all of these keys.
    """
    num_keys = length - first_key
    at = tl.cast(first_key, tl.int64) * STRIDE
    # keys past the end are loaded as 0: memory there may hold NaN, and a weight of 0 times NaN is NaN
    k = load_tile(keys_ptr + at, num_keys, STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
    v = load_tile(values_ptr + at, num_keys, STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
    row = tl.arange(0, BLOCK_M)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]

    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if HAS_BIAS:
        scores = add_bias(scores * scale, bias_ptr, (first_key - first_query) + (col - row), reach)
        scale = 1.0
    if MASKED:
        readable = col < num_keys
        if CAUSAL:
            readable = readable & (first_key + col <= first_query + row)
        if WINDOW > 0:
            readable = readable & (first_key + col > first_query + row - WINDOW)
        scores = tl.where(readable, scores, float("-inf"))
    # a window or a bias of -inf may hide all keys so far
    return add_values(context, weight_sum, max_score, scores, v, scale, HAS_BIAS or WINDOW > 0)


@triton.jit(do_not_specialize=["batch", "bias_width"])
def _attention_varlen_kernel(
    qkv_ptr,  # [tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    cu_seqlens_ptr,  # [batch + 1]
    bias_ptr,  # [NUM_HEADS, bias_width], read if HAS_BIAS
    out_ptr,  # [tokens, NUM_HEADS * HEAD_DIM]
    batch,
    bias_width,
    scale,
    QKV_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for all keys
    HAS_BIAS: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
):
    """Compute the attention of one tile of queries in one head."""
    # heads vary fastest: in a batch sorted by descending length, the last programs are short
    head = tl.program_id(0) % NUM_HEADS
    tile = tl.program_id(0) // NUM_HEADS
    _, begin, length, first_query = find_tile(cu_seqlens_ptr, batch, tile, BLOCK_M, BLOCK_BATCH)
    if first_query >= length:
        return

    # int64: tokens * QKV_STRIDE may pass 2**31
    sequence_ptr = qkv_ptr + begin.to(tl.int64) * QKV_STRIDE + head * HEAD_DIM
    keys_ptr = sequence_ptr + NUM_HEADS * HEAD_DIM
    if NUM_KV_HEADS < NUM_HEADS:
        keys_ptr -= (head - head // (NUM_HEADS // NUM_KV_HEADS)) * HEAD_DIM
    values_ptr = keys_ptr + NUM_KV_HEADS * HEAD_DIM
    reach = bias_width // 2
    bias_ptr += head.to(tl.int64) * bias_width + reach
    query = first_query + tl.arange(0, BLOCK_M)
    num_queries = length - first_query
    q_ptr = sequence_ptr + first_query.to(tl.int64) * QKV_STRIDE
    q = load_tile(q_ptr, num_queries, QKV_STRIDE, HEAD_DIM, BLOCK_M, BLOCK_D, True)

    context = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # no query of the tile reads a key before the window, so keys and queries are counted from its start
    window_start = 0
    if WINDOW > 0:
        window_start = tl.maximum(first_query - WINDOW + 1, 0)
        keys_ptr += window_start.to(tl.int64) * QKV_STRIDE
        values_ptr += window_start.to(tl.int64) * QKV_STRIDE
    num_keys = length - window_start
    tile_query = first_query - window_start
    # most blocks need no mask: every query may read all keys before `first_masked`
    end = num_keys
    first_masked = num_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(num_keys, tile_query + BLOCK_M)
        first_masked = tile_query // BLOCK_N * BLOCK_N
    # a window is short, so all its blocks are masked
    for MASKED in tl.static_range(1 if WINDOW > 0 else 0, 2):
        loop_begin = first_masked if MASKED and WINDOW == 0 else 0
        loop_end = end if MASKED else first_masked
        # without a window, too few blocks are masked for a pipeline of loads
        for first_key in tl.range(
            loop_begin, loop_end, BLOCK_N, num_stages=1 if MASKED and WINDOW == 0 else None
        ):
            context, weight_sum, max_score = attend_to_keys(
                context,
                weight_sum,
                max_score,
                q,
                keys_ptr,
                values_ptr,
                bias_ptr,
                reach,
                tile_query,
                first_key,
                num_keys,
                scale,
                STRIDE=QKV_STRIDE,
                HEAD_DIM=HEAD_DIM,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
                CAUSAL=CAUSAL,
                WINDOW=WINDOW,
                HAS_BIAS=HAS_BIAS,
                MASKED=MASKED,
            )

    if HAS_BIAS:
        # a query that may read no key gets zeros
        weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    out_row = (begin.to(tl.int64) + query)[:, None] * OUT_STRIDE + head * HEAD_DIM
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = (query < length)[:, None] & (col < HEAD_DIM)
    tl.store(out_ptr + out_row + col, context / weight_sum[:, None], mask=inside)


def attention_varlen(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float,
    causal: bool = False,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale + bias) v in each sequence, see `reference.attention_varlen`.

    Rows of `out` past the last sequence are not written.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, head_dim is over
            MAX_HEAD_DIM (over 128 for fp32 with a bias), `num_kv_heads` does not divide `num_heads`, `scale` is not
            above 0, or `window` is below 0.
    """
    tokens = len(qkv)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    head_dim = check_heads(qkv, num_heads, kv_heads)
    check_scores(scale, window)
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    check_cu_seqlens(cu_seqlens)
    check_out(out, (tokens, num_heads * head_dim), qkv.dtype)
    check_bias(bias, num_heads)
    if bias is not None and head_dim > 128 and qkv.dtype == torch.float32:
        raise ValueError(f"head_dim is {head_dim}; allowed with bias in torch.float32: 1 to 128")
    batch = len(cu_seqlens) - 1
    if tokens == 0 or batch == 0:
        return out
    key = (
        head_dim,
        qkv.dtype,
        causal,
        bias is not None,
        mean_length_bucket(tokens, batch),
    )
    launch = pick("attention_varlen", key, candidate_launches)
    tiles = tokens // launch["BLOCK_M"] + batch
    _attention_varlen_kernel[(tiles * num_heads,)](
        qkv,
        cu_seqlens,
        qkv if bias is None else bias,
        out,
        batch,
        0 if bias is None else bias.shape[1],
        scale * LOG2_E.value,
        QKV_STRIDE=qkv.stride(0),
        OUT_STRIDE=out.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        WINDOW=window if causal else 0,
        HAS_BIAS=bias is not None,
        BLOCK_BATCH=_BLOCK_BATCH,
        BLOCK_D=block_d(head_dim),
        **launch,
    )
    return out


def mean_length_bucket(tokens: int, batch: int) -> int:
    """Return the bucket of the mean sequence length, which launches depend on."""
    return next(length for length in _MEAN_LENGTHS if tokens >= length * batch or length == 1)


def block_d(head_dim: int) -> int:
    """Return the power of two >= head_dim, at least 16 for tensor cores."""
    return max(16, 1 << (head_dim - 1).bit_length())


def candidate_launches(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,  # noqa: ARG001  # part of the key, because it may change which launch is fastest
    has_bias: bool,
    mean_length: int,
) -> list[Launch]:
    """Return the candidate launches for heads of this size; the first is the default.

    Args:
        mean_length: a bucket, see `mean_length_bucket`.
    """
    tiles = _TILES[max(64, block_d(head_dim)), dtype.itemsize, has_bias]
    # the largest BLOCK_M that sequences of the mean length fill, then its neighbours
    fitting = [tile for tile in tiles if tile[0] <= _MAX_BLOCK_M[mean_length]]
    best = len(fitting) - 1
    near = sorted(range(len(tiles)), key=lambda i: (abs(i - best), i > best))[:_MAX_CANDIDATES]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    launches: list[Launch] = [dict(zip(names, tiles[i], strict=True)) for i in near]
    if has_bias or dtype.itemsize == 4:
        # without this limit, ptxas spills a few registers to fit one more program on a multiprocessor
        return [{**launch, "maxnreg": _MAX_REGISTERS} for launch in launches]
    return launches


def check_heads(qkv: Tensor, num_heads: int, num_kv_heads: int, cached_dim: int = 0) -> int:
    """Return the head_dim of `qkv`, whose layout is checked.

    Args:
        cached_dim: head_dim of the caches, if `qkv` may hold queries alone.

    Raises:
        ValueError: the width fits no head_dim up to MAX_HEAD_DIM, `num_kv_heads` does not divide `num_heads`, the
            dtype is not supported, or rows are not contiguous.
    """
    check_dtype(qkv=qkv)
    check_row_layout(qkv=qkv)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads}; allowed: divisors of {num_heads} heads")
    heads, width = num_heads + 2 * num_kv_heads, qkv.shape[1]
    if width == num_heads * cached_dim:
        heads = num_heads
    head_dim = width // heads
    if width != heads * head_dim:
        raise ValueError(
            f"qkv has rows of {width}; allowed: multiples of {num_heads} + 2 · {num_kv_heads} heads"
            + (f", or {num_heads * cached_dim} for queries alone" if cached_dim else "")
        )
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; allowed: 1 to {MAX_HEAD_DIM}")
    return head_dim


def check_scores(scale: float, window: int) -> None:
    """Check the scale of the scores and the length of the window.

    Raises:
        ValueError: `scale` is not above 0, or `window` is below 0.
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}; allowed: above 0")
    if window < 0:
        raise ValueError(f"window is {window}; allowed: 0 (all tokens) and above")


def check_bias(bias: Tensor | None, num_heads: int) -> None:
    """Check the bias of an attention op, if there is one.

    Raises:
        ValueError: it is not `[num_heads, an odd number]`, contiguous, of a supported dtype.
    """
    if bias is None:
        return
    check_dtype(bias=bias)
    shape = bias.shape
    if len(shape) != 2 or shape[0] != num_heads or shape[1] % 2 == 0:
        raise ValueError(f"bias is {list(shape)}; it must be [{num_heads}, an odd number]")
    if not bias.is_contiguous():
        raise ValueError(f"bias has strides {bias.stride()}; it must be contiguous")
