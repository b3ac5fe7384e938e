"""Attention over packed tokens: each query reads the keys of its own sequence, without padding.

One program owns one tile: BLOCK_M queries of one sequence and one head. It reads the keys in blocks and keeps a running
maximum and a running sum of each query's weights, so scores stay in registers.
Source: Dao 2023, arXiv:2307.08691; Milakov, Gimelshein 2018, arXiv:1805.02867.

Which tile a program owns: see `attention_tiles`.

The distances between a tile of queries and a block of keys are consecutive, so the products with the keys and queries
of distances are two small matrices, [queries, distances] and [keys, distances]. A score takes one element of its row of
each. Source: He et al. 2020, arXiv:2006.03654, section 3.1.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.attention import Distances
from varlen_kernels.triton.attention_blocks import (
    LOG2_E,
    add_bias,
    add_values,
    cap_scores,
    load_tile,
    multiply_keys,
)
from varlen_kernels.triton.attention_tiles import (
    BLOCK_BATCH,
    attention_launch,
    block_d,
    check_tiles,
    find_tile,
    masked_keys,
    num_tiles,
    read_tile,
)
from varlen_kernels.triton.checks import (
    check_bias,
    check_contiguous,
    check_cu_seqlens,
    check_heads,
    check_key_lengths,
    check_out,
    check_scores,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels

# Largest heads whose tiles fit the registers, by bytes per element.
_MAX_HEAD_DIM = {2: 128, 4: 64}


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
    distance_rows_ptr,  # [distance_width], read if there are keys or queries of distances
    distance_keys_ptr,  # [rows, HEAD_DIM], read if HAS_DISTANCE_KEYS
    distance_queries_ptr,  # [rows, HEAD_DIM], read if HAS_DISTANCE_QUERIES
    distance_width,
    first_query,
    first_key,
    length,
    scale,
    STRIDE: tl.constexpr,
    DISTANCE_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DISTANCE_KEYS: tl.constexpr,
    HAS_DISTANCE_QUERIES: tl.constexpr,
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

    scores = multiply_keys(q, k)
    if HAS_DISTANCE_KEYS or HAS_DISTANCE_QUERIES:
        scores = add_distance_products(
            scores,
            q,
            k,
            distance_rows_ptr,
            distance_keys_ptr,
            distance_queries_ptr,
            distance_width,
            first_key - first_query,
            STRIDE=DISTANCE_STRIDE,
            HEAD_DIM=HEAD_DIM,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            HAS_KEYS=HAS_DISTANCE_KEYS,
            HAS_QUERIES=HAS_DISTANCE_QUERIES,
        )
    if SOFT_CAP > 0:
        scores = cap_scores(scores, scale, SOFT_CAP)
        scale = 1.0
    if HAS_BIAS:
        scores = add_bias(scores * scale, bias_ptr, (first_key - first_query) + (col - row), reach)
        scale = 1.0
    if MASKED:
        readable = col < num_keys
        if CAUSAL:
            readable = readable & (first_key + col <= first_query + row)
        if WINDOW > 0:
            readable = readable & (first_key + col > first_query + row - WINDOW)
            if not CAUSAL:
                readable = readable & (first_key + col < first_query + row + WINDOW)
        scores = tl.where(readable, scores, float("-inf"))
    # a window or a bias of -inf may hide all keys so far
    return add_values(context, weight_sum, max_score, scores, v, scale, HAS_BIAS or WINDOW > 0)


@triton.jit(do_not_specialize=["batch", "bias_width", "distance_width"])
def _attention_varlen_kernel(
    qkv_ptr,  # [tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    cu_seqlens_ptr,  # [batch + 1]
    key_lengths_ptr,  # [batch], read if HAS_KEY_LENGTHS, but not if HAS_TILES
    bias_ptr,  # [NUM_HEADS, bias_width], read if HAS_BIAS
    tiles_ptr,  # [tiles, columns], read if HAS_TILES
    distance_rows_ptr,  # [distance_width], read if there are keys or queries of distances
    distance_keys_ptr,  # [rows, NUM_HEADS * HEAD_DIM], read if HAS_DISTANCE_KEYS
    distance_queries_ptr,  # [rows, NUM_HEADS * HEAD_DIM], read if HAS_DISTANCE_QUERIES
    out_ptr,  # [tokens, NUM_HEADS * HEAD_DIM]
    batch,
    bias_width,
    distance_width,
    scale,
    QKV_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for all keys
    SOFT_CAP: tl.constexpr,  # limit of scores, 0 for none
    HAS_KEY_LENGTHS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DISTANCE_KEYS: tl.constexpr,
    HAS_DISTANCE_QUERIES: tl.constexpr,
    HAS_TILES: tl.constexpr,
    TAIL_FIRST: tl.constexpr,  # whether the last block of keys is read first, outside of a loop
    BLOCK_BATCH: tl.constexpr,
    HEADS: tl.constexpr,  # of one program, a divisor of NUM_HEADS
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    # heads vary fastest: in a batch sorted by descending length, the last programs are short
    head = tl.program_id(0) % (NUM_HEADS // HEADS) * HEADS
    tile = tl.program_id(0) // (NUM_HEADS // HEADS)
    if HAS_TILES:
        begin, length, first_query, key_length = read_tile(tiles_ptr, tile, HAS_KEY_LENGTHS)
    else:
        sequence, begin, length, first_query = find_tile(
            cu_seqlens_ptr, batch, tile, BLOCK_M, BLOCK_BATCH
        )
        key_length = length
        if HAS_KEY_LENGTHS:
            key_length = tl.load(key_lengths_ptr + sequence)
    if first_query >= length:
        return

    if HEADS > 1:
        # one warp a head, and all that follows has an axis of heads
        head = (head + tl.arange(0, HEADS))[:, None, None]
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

    context = tl.zeros(q.shape, tl.float32)
    weight_sum = tl.zeros(q.shape[:-1], tl.float32)
    max_score = tl.full(q.shape[:-1], float("-inf"), tl.float32)
    # no query of the tile reads a key before the window, so keys and queries are counted from its start
    window_start = 0
    if WINDOW > 0:
        window_start = tl.maximum(first_query - WINDOW + 1, 0)
        keys_ptr += window_start.to(tl.int64) * QKV_STRIDE
        values_ptr += window_start.to(tl.int64) * QKV_STRIDE
    num_keys = key_length - window_start
    tile_query = first_query - window_start
    first_masked, end = masked_keys(
        num_keys, tile_query, CAUSAL, WINDOW, HAS_KEY_LENGTHS, TAIL_FIRST, BLOCK_M, BLOCK_N
    )
    # the tail first: its loads overlap the loads of queries
    for MASKED in tl.static_range(
        1 if TAIL_FIRST or WINDOW > 0 else 0, -1 if TAIL_FIRST else 2, -1 if TAIL_FIRST else 1
    ):
        loop_begin = first_masked if MASKED else 0
        span = end - first_masked if MASKED else first_masked
        if MASKED and TAIL_FIRST:
            # the compiler sees a single block
            span = BLOCK_N
        # without a window, too few blocks are masked for a pipeline of loads
        for offset in tl.range(0, span, BLOCK_N, num_stages=1 if MASKED and WINDOW == 0 else None):
            context, weight_sum, max_score = attend_to_keys(
                context,
                weight_sum,
                max_score,
                q,
                keys_ptr,
                values_ptr,
                bias_ptr,
                reach,
                distance_rows_ptr,
                distance_keys_ptr + head * HEAD_DIM,
                distance_queries_ptr + head * HEAD_DIM,
                distance_width,
                tile_query,
                loop_begin + offset,
                num_keys,
                scale,
                STRIDE=QKV_STRIDE,
                DISTANCE_STRIDE=NUM_HEADS * HEAD_DIM,
                HEAD_DIM=HEAD_DIM,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
                CAUSAL=CAUSAL,
                WINDOW=WINDOW,
                SOFT_CAP=SOFT_CAP,
                HAS_BIAS=HAS_BIAS,
                HAS_DISTANCE_KEYS=HAS_DISTANCE_KEYS,
                HAS_DISTANCE_QUERIES=HAS_DISTANCE_QUERIES,
                MASKED=MASKED,
            )

    if HAS_BIAS or (HAS_KEY_LENGTHS and WINDOW > 0):
        # a query that may read no key gets zeros
        weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    out_row = (begin.to(tl.int64) + query)[:, None] * OUT_STRIDE + head * HEAD_DIM
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = (query < length)[:, None] & (col < HEAD_DIM)
    if HEADS > 1:
        inside = inside[None, :, :]
    context /= tl.expand_dims(weight_sum, len(context.shape) - 1)
    tl.store(out_ptr + out_row + col, context, mask=inside)


def attention_varlen(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    tiles: Tensor | None = None,
    distances: Distances | None = None,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ · scale + bias) v in each sequence, see `reference.attention_varlen`.

    Rows of `out` past the last sequence are not written.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, head_dim is over
            MAX_HEAD_DIM (over 128 for fp32 with a bias, and see `check_distances`), `num_kv_heads` does not divide
            `num_heads`, `scale` is not above 0, `window` or `soft_cap` is below 0, there are `distances` and a
            `soft_cap`, or `tiles` is not of `attention_tiles`.
    """
    tokens = len(qkv)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    head_dim = check_heads(qkv, num_heads, kv_heads)
    check_scores(scale, window, soft_cap)
    if soft_cap and distances is not None:
        raise ValueError(f"soft_cap is {soft_cap}; allowed with distances: 0")
    if out is None:
        out = qkv.new_empty(tokens, num_heads * head_dim)
    check_cu_seqlens(cu_seqlens)
    check_out(out, (tokens, num_heads * head_dim), qkv.dtype)
    check_bias(bias, num_heads)
    check_key_lengths(key_lengths, cu_seqlens)
    if bias is not None and head_dim > 128 and qkv.dtype == torch.float32:
        raise ValueError(f"head_dim is {head_dim}; allowed with bias in torch.float32: 1 to 128")
    check_distances(
        distances,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=qkv.dtype,
    )
    batch = len(cu_seqlens) - 1
    if tokens == 0 or batch == 0:
        return out
    if tiles is not None:
        check_tiles(tiles, qkv, cu_seqlens, has_key_lengths=key_lengths is not None)
    forms = causal, bias is not None, distances is not None
    launch = attention_launch(head_dim, qkv.dtype, *forms, tokens, batch)
    # keys and values of the tail must fit the registers beside the queries
    is_plain = not any(forms) and window == 0
    heads = math.gcd(num_heads, launch["HEADS"])
    rows, keys, queries = distances or (None, None, None)
    programs = num_tiles(tokens, batch, launch["BLOCK_M"]) * (num_heads // heads)
    _attention_varlen_kernel[(programs,)](
        qkv,
        cu_seqlens,
        cu_seqlens if key_lengths is None else key_lengths,
        qkv if bias is None else bias,
        cu_seqlens if tiles is None else tiles,
        cu_seqlens if rows is None else rows,
        qkv if keys is None else keys,
        qkv if queries is None else queries,
        out,
        batch,
        0 if bias is None else bias.shape[1],
        0 if rows is None else len(rows),
        scale * LOG2_E.value,
        QKV_STRIDE=qkv.stride(0),
        OUT_STRIDE=out.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        HAS_KEY_LENGTHS=key_lengths is not None,
        HAS_BIAS=bias is not None,
        HAS_DISTANCE_KEYS=keys is not None,
        HAS_DISTANCE_QUERIES=queries is not None,
        HAS_TILES=tiles is not None,
        TAIL_FIRST=is_plain and head_dim <= 64 and qkv.dtype.itemsize == 2,
        BLOCK_BATCH=BLOCK_BATCH,
        BLOCK_D=block_d(head_dim),
        **{**launch, "HEADS": heads, "num_warps": heads * launch["num_warps"]},
        **dependent_launch(),
    )
    return out


@triton.jit
def load_distances(
    table_ptr,  # [rows, HEAD_DIM]
    row,  # [BAND]
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return these rows of a table, [BAND, BLOCK_D]: 0 past HEAD_DIM."""
    col = tl.arange(0, BLOCK_D)[None, :]
    at = row.to(tl.int64)[:, None] * STRIDE + col
    if HEAD_DIM < BLOCK_D:
        return tl.load(table_ptr + at, mask=col < HEAD_DIM, other=0.0)
    return tl.load(table_ptr + at)


@triton.jit
def add_distance_products(
    scores,  # [BLOCK_M, BLOCK_N]
    q,  # [BLOCK_M, BLOCK_D]
    k,  # [BLOCK_N, BLOCK_D]
    rows_ptr,  # [width]
    keys_ptr,  # [rows, HEAD_DIM], read if HAS_KEYS
    queries_ptr,  # [rows, HEAD_DIM], read if HAS_QUERIES
    width,
    first_distance,  # of the first key from the first query
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
):
    """Return the scores plus their products with keys and queries of distances."""
    # a power of two that holds BLOCK_M + BLOCK_N - 1 distances
    BAND: tl.constexpr = 2 * max(BLOCK_M, BLOCK_N)
    LAST: tl.constexpr = BLOCK_M - 1
    distance = first_distance - LAST + tl.arange(0, BAND)
    row = tl.load(rows_ptr + tl.minimum(tl.maximum(distance + width // 2, 0), width - 1))
    if HAS_KEYS:
        table = load_distances(keys_ptr, row, STRIDE, HEAD_DIM, BLOCK_D)
        products = tl.dot(q, tl.trans(table), input_precision="tf32x3")
        place = LAST + tl.arange(0, BLOCK_N)[None, :] - tl.arange(0, BLOCK_M)[:, None]
        scores += tl.gather(products, place, axis=1)
    if HAS_QUERIES:
        table = load_distances(queries_ptr, row, STRIDE, HEAD_DIM, BLOCK_D)
        products = tl.dot(k, tl.trans(table), input_precision="tf32x3")
        place = LAST + tl.arange(0, BLOCK_N)[:, None] - tl.arange(0, BLOCK_M)[None, :]
        scores += tl.trans(tl.gather(products, place, axis=1))
    return scores


def check_distances(
    distances: Distances | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Check the tables of distances of an attention op, if there are any.

    Raises:
        ValueError: there is no table, one has another shape, dtype or layout, heads share key heads, or head_dim is
            over the limit of the dtype.
    """
    if distances is None:
        return
    rows, keys, queries = distances
    if keys is None and queries is None:
        raise ValueError("distances has no table; allowed: keys, queries or both")
    if num_kv_heads != num_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads}; allowed with distances: {num_heads}")
    limit = _MAX_HEAD_DIM[dtype.itemsize]
    if head_dim > limit:
        raise ValueError(f"head_dim is {head_dim}; allowed with distances in {dtype}: 1 to {limit}")
    if rows.ndim != 1 or len(rows) % 2 == 0 or rows.dtype != torch.int32 or rows.stride(0) != 1:
        raise ValueError(
            f"distances.rows is {list(rows.shape)} {rows.dtype}; it must be [an odd number] torch.int32, contiguous"
        )
    width = num_heads * head_dim
    for name, table in (("keys", keys), ("queries", queries)):
        if table is None:
            continue
        if table.ndim != 2 or table.shape[1] != width or table.dtype != dtype:
            raise ValueError(
                f"distances.{name} is {list(table.shape)} {table.dtype}; it must be [rows, {width}] {dtype}"
            )
        check_contiguous(**{f"distances.{name}": table})
