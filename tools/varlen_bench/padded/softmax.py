"""Masked softmax over padded scores: what attention without packing does between its two products.

One program owns ROWS queries of a sequence, their scores in registers: several short rows to a warp, or several
warps to a long one. Beyond MAX_HELD keys it owns one row and goes over it twice, keeping a running maximum.
How many keys there are is no part of a compiled kernel, only the tiles they take and the vectors they allow:
batches of another length run what was compiled before.
Source: Fang et al. 2021, arXiv:2010.05680, section 4.1.2 (rows together); Milakov, Gimelshein 2018,
arXiv:1805.02867 (running maximum).
"""

# ruff: noqa: N803  # constants of a kernel are in capitals
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.checks import check_rows, row_strides
from varlen_kernels.rows import load_row, row_launches, store_row, sum_row, vector_width
from varlen_kernels.tuning import Launch, pick

# Most keys of a row held in registers.
MAX_HELD = 4096
# Scores that fill a GPU's caches are worth waiting for the lengths, which say what need not be read.
_SKIP_FROM_BYTES = 32 * 1024**2

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _max_row(tiles):
    """Return the maximum of each row, [ROWS, 1]."""
    peak = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        peak = tl.maximum(peak, tiles[i])
    return tl.max(peak, axis=1, keep_dims=True)


@triton.jit
def _readable_keys(seqlens_ptr, sequence, row, queries, keys, CAUSAL: tl.constexpr):
    """Return how many keys each row may read."""
    readable = tl.minimum(tl.load(seqlens_ptr + sequence), keys)
    if CAUSAL:
        readable = tl.minimum(readable, row % queries + 1 + keys - queries)
    return tl.maximum(readable, 0)


@triton.jit(do_not_specialize=["rows", "queries", "key_vectors", "x_vectors", "out_vectors"])
def _masked_softmax_kernel(
    x_ptr,  # [batch, rows, keys]
    seqlens_ptr,  # [batch]
    out_ptr,  # [batch, rows, keys]
    rows,  # of a sequence: num_heads * queries
    queries,
    key_vectors,  # keys and strides of a row count vectors, so that the compiler knows what divides them
    x_vectors,
    out_vectors,
    scale,
    CAUSAL: tl.constexpr,
    SKIP_PADDING: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # TILES * BLOCK >= keys
):
    """Normalise ROWS rows of the sequence that program_id(0) falls in."""
    keys = key_vectors * VECTOR
    programs = tl.cdiv(rows, ROWS)
    sequence = tl.program_id(0) // programs
    row = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)[:, None]
    here = row < rows
    # int64: all rows' elements may pass 2**31
    at = sequence.to(tl.int64) * rows + row
    readable = _readable_keys(seqlens_ptr, sequence, row, queries, keys, CAUSAL)

    # whole vectors: a mask that cuts through one would split its load
    loaded = tl.cdiv(readable, VECTOR) * VECTOR if SKIP_PADDING else keys
    x = load_row(x_ptr + at * (x_vectors * VECTOR), here, loaded, ROWS, BLOCK, TILES)
    scores = tl.tuple(())
    for i in tl.static_range(TILES):
        unmasked = i * BLOCK + tl.arange(0, BLOCK)[None, :] < readable
        # base 2: the exponential that a GPU has
        scores += (tl.where(unmasked, x[i] * (scale * _LOG2_E), float("-inf")),)
    top = _max_row(scores)
    weights = tl.tuple(())
    for i in tl.static_range(TILES):
        weights += (tl.exp2(scores[i] - top),)
    inverse = 1.0 / sum_row(weights)

    result = tl.tuple(())
    for i in tl.static_range(TILES):
        # where no key may be read, all is NaN so far
        unmasked = i * BLOCK + tl.arange(0, BLOCK)[None, :] < readable
        result += (tl.where(unmasked, weights[i] * inverse, 0.0),)
    store_row(out_ptr + at * (out_vectors * VECTOR), result, here, keys, BLOCK)


@triton.jit(do_not_specialize=["rows", "queries", "key_vectors", "x_vectors", "out_vectors"])
def _wide_softmax_kernel(
    x_ptr,  # [batch, rows, keys]
    seqlens_ptr,  # [batch]
    out_ptr,  # [batch, rows, keys]
    rows,  # of a sequence: num_heads * queries
    queries,
    key_vectors,  # keys and strides of a row count vectors, so that the compiler knows what divides them
    x_vectors,
    out_vectors,
    scale,
    CAUSAL: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise row `program_id(0)` of all sequences' rows."""
    keys = key_vectors * VECTOR
    sequence = tl.program_id(0) // rows
    row = tl.program_id(0) % rows
    # int64: all rows' elements may pass 2**31
    at = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + at * (x_vectors * VECTOR)
    out_row_ptr = out_ptr + at * (out_vectors * VECTOR)
    readable = _readable_keys(seqlens_ptr, sequence, row, queries, keys, CAUSAL)
    # whole vectors: a mask that cuts through one would split its load
    loaded = tl.cdiv(readable, VECTOR) * VECTOR
    factor = scale * _LOG2_E

    top = float("-inf")
    # [BLOCK] each lane's own sum, relative to the row's maximum
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, readable, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_row_ptr + col, mask=col < loaded, other=0.0).to(tl.float32)
        score = tl.where(col < readable, x * factor, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        # -inf less -inf would be NaN, which no later maximum mends
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - shift) + tl.exp2(score - shift)
        top = new_top
    inverse = 1.0 / tl.sum(total, axis=0)

    for start in tl.range(0, keys, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_row_ptr + col, mask=col < loaded, other=0.0).to(tl.float32)
        weight = tl.exp2(x * factor - top) * inverse
        tl.store(out_row_ptr + col, tl.where(col < readable, weight, 0.0), mask=col < keys)


def masked_softmax(
    x: Tensor, seqlens: Tensor, *, scale: float, causal: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return softmax(x · scale) over the keys that each query may read, as `reference.masked_softmax` does.

    Raises:
        ValueError: shapes or dtypes disagree, or rows do not lie one stride apart, contiguous inside.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    check_rows(x, out=out)
    if x.ndim != 4:
        raise ValueError(f"x is {list(x.shape)}; it must be [batch, num_heads, queries, keys]")
    batch, num_heads, queries, keys = x.shape
    _check_seqlens(batch, seqlens)
    if x.numel() == 0:
        return out
    x_stride, out_stride = row_strides(x=x, out=out)
    vector = vector_width(x.dtype, keys, x_stride, out_stride)
    key = (triton.next_power_of_2(keys), vector, x.dtype)
    launch = pick("masked_softmax", key, candidates)
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


def candidates(bucket: int, vector: int, dtype: torch.dtype) -> list[Launch]:  # noqa: ARG001  # of the key
    """Return launches for rows of up to `bucket` keys, the first for a GPU on which none was measured.

    Args:
        bucket: the least power of two that is at least the number of keys.
        vector: elements of one load.
        dtype: of the scores.
    """
    if bucket > MAX_HELD:
        # 8192 by 8 warps spills under Triton 3.6
        tiles = ((4096, 8), (8192, 16), (2048, 4))
        return [{"BLOCK": block, "num_warps": warps} for block, warps in tiles]
    return row_launches(bucket, vector)


def _check_seqlens(batch: int, seqlens: Tensor) -> None:
    """Check that `seqlens` is `[batch]` int32, contiguous.

    Raises:
        ValueError: it is not.
    """
    if seqlens.shape != (batch,) or seqlens.dtype != torch.int32 or not seqlens.is_contiguous():
        raise ValueError(
            f"seqlens is {list(seqlens.shape)} {seqlens.dtype}, strides {seqlens.stride()};"
            f" it must be [{batch}] torch.int32, contiguous"
        )
