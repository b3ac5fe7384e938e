"""Products of tokens with the keys and queries of distances, for the attention kernel.

The distances between a tile of queries and a block of keys are consecutive, so the products with them are two small
matrices, [queries, distances] and [keys, distances]. A score takes one element of its row of each.
Source: He et al. 2020, arXiv:2006.03654, section 3.1.
"""

import torch
import triton
import triton.language as tl

from varlen_kernels.reference.attention import Distances

# Largest heads whose tiles fit the registers, by bytes per element.
_MAX_HEAD_DIM = {2: 128, 4: 64}


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
        if not table.is_contiguous():
            raise ValueError(
                f"distances.{name} has strides {table.stride()}; it must be contiguous"
            )
