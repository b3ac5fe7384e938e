"""Masked softmax over padded scores, and padded attention: matrix products before and after it.

One program owns ROWS rows of one sequence and holds their scores in registers: a warp owns several short rows, or
several warps own a long one. Rows of more than MAX_HELD keys do not fit; one program then reads one row twice and
keeps a running maximum (online softmax).
The number of keys is not a constant of the compiled kernel, only the number of tiles and the vector width are. So
batches of other lengths reuse the compiled kernel.
Source: Fang et al. 2021, arXiv:2010.05680, section 4.1.2 (several rows per warp); Milakov, Gimelshein 2018,
arXiv:1805.02867 (online softmax).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.attention import Distances, attend_padded
from varlen_kernels.triton.checks import check_heads, check_rows, check_table, row_strides
from varlen_kernels.triton.rows import load_row, row_launches, store_row, sum_row, vector_width
from varlen_kernels.tuning import Launch, pick

# Longest row that one program holds in registers, in keys.
MAX_HELD = 4096
# From this size on, padding is not read. Each load then waits for the length of its sequence, which costs more than
# it saves while the scores are in the cache.
_SKIP_FROM_BYTES = 32 * 1024**2

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _max_row(tiles):
    maximum = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        maximum = tl.maximum(maximum, tiles[i])
    return tl.max(maximum, axis=1, keep_dims=True)


@triton.jit
def _readable_keys(seqlens_ptr, sequence, row, queries, keys, CAUSAL: tl.constexpr):
    """Return the number of keys that each row may read, in the shape of `row`."""
    readable = tl.minimum(tl.load(seqlens_ptr + sequence), keys)
    if CAUSAL:
        readable = tl.minimum(readable, row % queries + 1 + keys - queries)
    return tl.maximum(readable, 0)


@triton.jit(do_not_specialize=["rows", "queries", "key_vectors", "x_vectors", "out_vectors"])
def _masked_softmax_kernel(
    x_ptr,  # [batch, rows, keys]
    seqlens_ptr,  # [batch]
    out_ptr,  # [batch, rows, keys]
    rows,  # rows per sequence: num_heads * queries
    queries,
    key_vectors,  # keys per row in vectors, so that the compiler knows that VECTOR divides it
    x_vectors,  # row stride of x, in vectors
    out_vectors,  # row stride of out, in vectors
    scale,
    CAUSAL: tl.constexpr,
    SKIP_PADDING: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # TILES * BLOCK >= keys
):
    keys = key_vectors * VECTOR
    row_tiles = tl.cdiv(rows, ROWS)
    sequence = tl.program_id(0) // row_tiles
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = row < rows
    # int64: batch * rows * keys may pass 2**31
    batch_row = sequence.to(tl.int64) * rows + row
    readable = _readable_keys(seqlens_ptr, sequence, row, queries, keys, CAUSAL)

    # round up to whole vectors: a mask that ends inside a vector would split its load
    loaded = tl.cdiv(readable, VECTOR) * VECTOR if SKIP_PADDING else keys
    x = load_row(x_ptr + batch_row * (x_vectors * VECTOR), row_mask, loaded, ROWS, BLOCK, TILES)
    scores = tl.tuple(())
    for i in tl.static_range(TILES):
        unmasked = i * BLOCK + tl.arange(0, BLOCK)[None, :] < readable
        # base 2: the GPU has an instruction for exp2 only
        scores += (tl.where(unmasked, x[i] * (scale * _LOG2_E), float("-inf")),)
    maximum = _max_row(scores)
    weights = tl.tuple(())
    for i in tl.static_range(TILES):
        weights += (tl.exp2(scores[i] - maximum),)
    inverse = 1.0 / sum_row(weights)

    result = tl.tuple(())
    for i in tl.static_range(TILES):
        # masked again: a row without a readable key is NaN so far
        unmasked = i * BLOCK + tl.arange(0, BLOCK)[None, :] < readable
        result += (tl.where(unmasked, weights[i] * inverse, 0.0),)
    store_row(out_ptr + batch_row * (out_vectors * VECTOR), result, row_mask, keys, BLOCK)


@triton.jit(do_not_specialize=["rows", "queries", "key_vectors", "x_vectors", "out_vectors"])
def _wide_softmax_kernel(
    x_ptr,  # [batch, rows, keys]
    seqlens_ptr,  # [batch]
    out_ptr,  # [batch, rows, keys]
    rows,  # rows per sequence: num_heads * queries
    queries,
    key_vectors,  # keys per row in vectors, so that the compiler knows that VECTOR divides it
    x_vectors,  # row stride of x, in vectors
    out_vectors,  # row stride of out, in vectors
    scale,
    CAUSAL: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    keys = key_vectors * VECTOR
    sequence = tl.program_id(0) // rows
    row = tl.program_id(0) % rows
    # int64: batch * rows * keys may pass 2**31
    batch_row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + batch_row * (x_vectors * VECTOR)
    out_row_ptr = out_ptr + batch_row * (out_vectors * VECTOR)
    readable = _readable_keys(seqlens_ptr, sequence, row, queries, keys, CAUSAL)
    # round up to whole vectors: a mask that ends inside a vector would split its load
    loaded = tl.cdiv(readable, VECTOR) * VECTOR
    factor = scale * _LOG2_E

    maximum = float("-inf")
    # [BLOCK] partial sums, relative to the row's maximum
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, readable, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_row_ptr + col, mask=col < loaded, other=0.0).to(tl.float32)
        score = tl.where(col < readable, x * factor, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, axis=0))
        # -inf - -inf would be NaN and stay in the sum
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp2(maximum - shift) + tl.exp2(score - shift)
        maximum = new_maximum
    inverse = 1.0 / tl.sum(total, axis=0)

    for start in tl.range(0, keys, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_row_ptr + col, mask=col < loaded, other=0.0).to(tl.float32)
        weight = tl.exp2(x * factor - maximum) * inverse
        tl.store(out_row_ptr + col, tl.where(col < readable, weight, 0.0), mask=col < keys)


def masked_softmax(
    x: Tensor, seqlens: Tensor, *, scale: float, causal: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return softmax(x · scale) over the readable keys, see `reference.masked_softmax`.

    Raises:
        ValueError: a shape, dtype or layout is wrong.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    check_rows(x, out=out)
    if x.ndim != 4:
        raise ValueError(f"x is {list(x.shape)}; it must be [batch, num_heads, queries, keys]")
    batch, num_heads, queries, keys = x.shape
    check_table((batch,), torch.int32, seqlens=seqlens)
    if x.numel() == 0:
        return out
    x_stride, out_stride = row_strides(x=x, out=out)
    vector = vector_width(x.dtype, keys, x_stride, out_stride)
    key = (triton.next_power_of_2(keys), vector, x.dtype)
    launch = pick("masked_softmax", key, candidate_launches)
    rows = num_heads * queries
    vectors = (keys // vector, x_stride // vector, out_stride // vector)
    args = (x, seqlens, out, rows, queries, *vectors, scale)
    if keys > MAX_HELD:
        _wide_softmax_kernel[(batch * rows,)](*args, CAUSAL=causal, VECTOR=vector, **launch)
    else:
        _masked_softmax_kernel[(batch * triton.cdiv(rows, launch["ROWS"]),)](
            *args,
            CAUSAL=causal,
            SKIP_PADDING=x.nbytes >= _SKIP_FROM_BYTES,
            VECTOR=vector,
            TILES=triton.cdiv(keys, launch["BLOCK"]),
            **launch,
        )
    return out


def attention_padded(
    qkv: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    distances: Distances | None = None,
    key_lengths: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float,
    causal: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(q kᵀ · scale + bias) v inside padded sequences, see `reference.attention_padded`.

    Both products are of torch.

    Raises:
        ValueError: a shape, dtype or layout is wrong, or there are `distances` and a `soft_cap`.
    """
    kv_heads = num_kv_heads or num_heads
    check_heads(qkv, num_heads, kv_heads)
    return attend_padded(
        masked_softmax,
        (qkv, cu_seqlens, bias, distances, key_lengths),
        num_heads=num_heads,
        kv_heads=kv_heads,
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        out=out,
    )


def candidate_launches(bucket: int, vector: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for rows of this bucket; the first is the default.

    Args:
        bucket: number of keys, rounded up to a power of two.
    """
    if bucket > MAX_HELD:
        # a BLOCK of 8192 with 8 warps spills under Triton 3.6
        sizes = ((4096, 8), (8192, 16), (2048, 4))
        return [{"BLOCK": block, "num_warps": warps} for block, warps in sizes]
    return row_launches(bucket, dtype, vector)
