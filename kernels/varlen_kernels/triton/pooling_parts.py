"""Pooling of long sequences in parts.

One kernel pools parts of each sequence, and a second one merges them. Each read of ROWS tokens waits for memory, so one
program would take long for a long sequence. The parts of a sequence depend only on its length, but whether there are
parts depends on its batch, and with it the last bits of a mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels import Pooling
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.pooled_tokens import (
    candidate_launches,
    finish_pooling,
    load_unpooled,
    max_tokens,
    sum_tokens,
)
from varlen_kernels.tuning import pick
from varlen_kernels.vector_ops import NORM_FLOOR

# Parts of a sequence at most, and tokens of a part at least.
_PARTS = 8
_MIN_PART = 32


@triton.jit
def part_length(length, PARTS: tl.constexpr, MIN_PART: tl.constexpr):
    """Return the number of tokens of each part but the last."""
    return tl.maximum(tl.cdiv(length, PARTS), MIN_PART)


@triton.jit
def _pool_parts_kernel(
    x_ptr,  # [tokens, HIDDEN]
    cu_seqlens_ptr,  # [batch + 1]
    unpooled_lengths_ptr,  # [batch], read if HAS_UNPOOLED
    parts_ptr,  # [batch, PARTS, HIDDEN]; parts without tokens are not written
    X_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    MODE: tl.constexpr,
    HAS_UNPOOLED: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum, or find the maximum of, BLOCK features of one part of a sequence."""
    wait_for_kernels(DEPENDENT)
    TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // (PARTS * TILES)
    part = tl.program_id(0) // TILES % PARTS
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    unpooled = load_unpooled(unpooled_lengths_ptr, sequence, HAS_UNPOOLED)
    begin = tl.load(cu_seqlens_ptr + sequence) + unpooled
    length = tl.load(cu_seqlens_ptr + sequence + 1) - begin
    size = part_length(length, PARTS, MIN_PART)
    tokens = tl.minimum(length - part * size, size)
    if tokens <= 0:
        return

    # int64: tokens * X_STRIDE may pass 2**31
    tokens_ptr = x_ptr + (begin + part * size).to(tl.int64) * X_STRIDE
    if MODE == "max":
        pooled = max_tokens(tokens_ptr, col, tokens, HIDDEN, X_STRIDE, ROWS)
    else:
        pooled = sum_tokens(
            tokens_ptr,
            col,
            tokens,
            part * size + (unpooled + 1),
            HIDDEN,
            X_STRIDE,
            ROWS,
            MODE == "weighted_mean",
        )
    row = sequence.to(tl.int64) * PARTS + part
    tl.store(parts_ptr + row * HIDDEN + col, pooled, mask=col < HIDDEN)


@triton.jit
def _merge_parts_kernel(
    parts_ptr,  # [batch, PARTS, HIDDEN]
    cu_seqlens_ptr,  # [batch + 1]
    unpooled_lengths_ptr,  # [batch], read if HAS_UNPOOLED
    normalize_ptr,  # [batch], read if NORMALIZE
    out_ptr,  # [batch, HIDDEN]
    norm_floor,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    MODE: tl.constexpr,
    HAS_UNPOOLED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HIDDEN if NORMALIZE
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    TILES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // TILES
    col = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)[None, :]
    length = tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)
    unpooled = load_unpooled(unpooled_lengths_ptr, sequence, HAS_UNPOOLED)
    parts = tl.cdiv(length - unpooled, part_length(length - unpooled, PARTS, MIN_PART))
    # int64: batch * PARTS * HIDDEN may pass 2**31
    parts_ptr += sequence.to(tl.int64) * (PARTS * HIDDEN)
    if MODE == "max":
        pooled = max_tokens(parts_ptr, col, parts, HIDDEN, HIDDEN, ROWS)
    else:
        pooled = sum_tokens(parts_ptr, col, parts, 1, HIDDEN, HIDDEN, ROWS, False)
    pooled = finish_pooling(
        pooled, length, unpooled, sequence, col, normalize_ptr, norm_floor, HIDDEN, MODE, NORMALIZE
    )
    tl.store(out_ptr + sequence.to(tl.int64) * OUT_STRIDE + col, pooled, mask=col < HIDDEN)


def pool_parts(
    x: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    form: tuple[Pooling, bool, bool],
    out: Tensor,
) -> None:
    """Write the pooled vectors into `out` by two kernels.

    Args:
        x: `[tokens, hidden]`.
        tables: cu_seqlens, unpooled lengths and flags of normalization.
        form: the mode, whether there are unpooled tokens, and whether vectors are normalized.
        out: `[batch, hidden]`.
    """
    batch, hidden = out.shape
    mode, has_unpooled, normalized = form
    cu_seqlens, unpooled_lengths, _ = tables
    parts = torch.empty((batch, _PARTS, hidden), dtype=torch.float32, device=x.device)
    launch = pick("pool_parts", (hidden, x.dtype, mode, False), candidate_launches)
    tiles = triton.cdiv(hidden, launch["BLOCK"])
    _pool_parts_kernel[(batch * _PARTS * tiles,)](
        x,
        cu_seqlens,
        unpooled_lengths,
        parts,
        X_STRIDE=x.stride(0),
        HIDDEN=hidden,
        MODE=mode,
        HAS_UNPOOLED=has_unpooled,
        PARTS=_PARTS,
        MIN_PART=_MIN_PART,
        **launch,
        **dependent_launch(),
    )
    launch = pick("merge_parts", (hidden, parts.dtype, mode, normalized), candidate_launches)
    _merge_parts_kernel[(batch * triton.cdiv(hidden, launch["BLOCK"]),)](
        parts,
        *tables,
        out,
        NORM_FLOOR,
        OUT_STRIDE=out.stride(0),
        HIDDEN=hidden,
        MODE=mode,
        HAS_UNPOOLED=has_unpooled,
        NORMALIZE=normalized,
        PARTS=_PARTS,
        MIN_PART=_MIN_PART,
        **launch,
        **dependent_launch(),
    )
