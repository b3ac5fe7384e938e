"""RMS norm and rotary positions of query and key heads, before attention.

Both work in place on the row of queries, keys and values of each token. A row here is one head of one token, and one
program owns ROWS of them.
Source: Su et al. 2021, arXiv:2104.09864 (rotary positions).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.torch_parts import copy_unless_same
from varlen_kernels.triton.attention_checks import MAX_HEAD_DIM
from varlen_kernels.triton.checks import (
    check_dtype,
    check_ids,
    check_out,
    check_row_layout,
    check_vector,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.rows import (
    load_row,
    row_launches,
    store_row,
    sum_of_squares,
    tile_launches,
    vector_width,
)
from varlen_kernels.tuning import Launch, pick


@triton.jit(do_not_specialize=["tokens"])
def _norm_heads_kernel(
    qkv_ptr,  # [tokens, QUERIES + 2 * KEYS, HEAD_DIM]; queries and keys are changed in place
    query_weight_ptr,  # [HEAD_DIM]
    key_weight_ptr,  # [HEAD_DIM]
    tokens,
    eps,
    STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # TILES * BLOCK >= HEAD_DIM
    DEPENDENT: tl.constexpr,
):
    """Normalise ROWS heads, from head `program_id(0) * ROWS` of all tokens on."""
    wait_for_kernels(DEPENDENT)
    # int64: tokens * STRIDE may pass 2**31
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // (QUERIES + KEYS)
    head = row % (QUERIES + KEYS)
    row_mask = token < tokens
    row_ptr = qkv_ptr + token * STRIDE + head * HEAD_DIM

    x = load_row(row_ptr, row_mask, HEAD_DIM, ROWS, BLOCK, TILES)
    scale = tl.rsqrt(sum_of_squares(x) / HEAD_DIM + eps)
    query_weight = load_row(query_weight_ptr, True, HEAD_DIM, ROWS, BLOCK, TILES)
    key_weight = load_row(key_weight_ptr, True, HEAD_DIM, ROWS, BLOCK, TILES)
    normed = tl.tuple(())
    for i in tl.static_range(TILES):
        weight = tl.where(head < QUERIES, query_weight[i], key_weight[i])
        normed += (x[i] * scale * weight,)
    store_row(row_ptr, normed, row_mask, HEAD_DIM, BLOCK)


def norm_heads(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return `qkv` with normalised query and key heads, see `reference.norm_heads`.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, or a head has more than MAX_HEAD_DIM features.
    """
    head_dim = _checked_head_dim(qkv, num_heads, num_kv_heads, out)
    check_vector(head_dim, query_weight=query_weight, key_weight=key_weight)
    out = copy_unless_same(qkv, out)
    if len(qkv) == 0:
        return out
    launch = pick("norm_heads", (head_dim, qkv.dtype), candidate_norm_launches)
    heads = len(qkv) * (num_heads + num_kv_heads)
    _norm_heads_kernel[(triton.cdiv(heads, launch["ROWS"]),)](
        out,
        query_weight,
        key_weight,
        len(qkv),
        eps,
        STRIDE=out.stride(0),
        QUERIES=num_heads,
        KEYS=num_kv_heads,
        HEAD_DIM=head_dim,
        TILES=triton.cdiv(head_dim, launch["BLOCK"]),
        **launch,
        **dependent_launch(),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _rotary_kernel(
    qkv_ptr,  # [tokens, HEADS + values, HEAD_DIM]; the first HEADS are changed in place
    position_ids_ptr,  # [tokens]
    cos_sin_ptr,  # [positions, 2 * HALF]
    tokens,
    STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= HALF
    DEPENDENT: tl.constexpr,
):
    """Rotate ROWS heads, from head `program_id(0) * ROWS` of all tokens on."""
    wait_for_kernels(DEPENDENT)
    # int64: tokens * STRIDE may pass 2**31
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    position = tl.load(position_ids_ptr + token, mask=token < tokens, other=0).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (col < HALF)

    angle_ptr = cos_sin_ptr + position[:, None] * TABLE_STRIDE + col
    cos = tl.load(angle_ptr, mask=inside, other=0.0)
    sin = tl.load(angle_ptr + HALF, mask=inside, other=0.0)
    first_ptr = qkv_ptr + (token * STRIDE + row % HEADS * HEAD_DIM)[:, None] + col
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(first_ptr, first * cos - second * sin, mask=inside)
    tl.store(first_ptr + HALF, second * cos + first * sin, mask=inside)


def rotary(
    qkv: Tensor,
    position_ids: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return `qkv` with rotated queries and keys, see `reference.rotary`.

    Every position must be inside the table: the kernel would read memory past it for any other position.

    Raises:
        ValueError: shapes or dtypes disagree, rows are not contiguous, the table is not fp32, or has more columns
            than a head has features; or a head has more than MAX_HEAD_DIM features.
    """
    head_dim = _checked_head_dim(qkv, num_heads, num_kv_heads, out)
    check_ids(len(qkv), position_ids=position_ids)
    check_row_layout(cos_sin=cos_sin)
    rotary_dim = cos_sin.shape[1]
    if cos_sin.dtype != torch.float32 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"cos_sin is {list(cos_sin.shape)} {cos_sin.dtype}; it must be [positions, an even number up to"
            f" {head_dim}] torch.float32"
        )
    out = copy_unless_same(qkv, out)
    if len(qkv) == 0:
        return out
    launch = pick("rotary", (rotary_dim // 2, head_dim, qkv.dtype), candidate_rotary_launches)
    heads = num_heads + num_kv_heads
    _rotary_kernel[(triton.cdiv(len(qkv) * heads, launch["ROWS"]),)](
        out,
        position_ids,
        cos_sin,
        len(qkv),
        STRIDE=out.stride(0),
        TABLE_STRIDE=cos_sin.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        **launch,
        **dependent_launch(),
    )
    return out


def candidate_norm_launches(head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches of `norm_heads`; the first is the default."""
    return row_launches(head_dim, vector_width(dtype, head_dim))


def candidate_rotary_launches(half: int, head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches of `rotary`; the first is the default.

    Args:
        half: half of the rotated features of a head.
    """
    return tile_launches(half, vector_width(dtype, half, head_dim))


def _checked_head_dim(qkv: Tensor, num_heads: int, num_kv_heads: int, out: Tensor | None) -> int:
    """Return the features of a head.

    Raises:
        ValueError: `qkv` is no row of heads, a head is too large, or `out` is not like `qkv`.
    """
    check_dtype(qkv=qkv)
    check_row_layout(qkv=qkv)
    head_dim, rest = divmod(qkv.shape[1], num_heads + 2 * num_kv_heads)
    if rest or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"qkv has {qkv.shape[1]} features for {num_heads} + 2 x {num_kv_heads} heads; allowed: 1 to"
            f" {MAX_HEAD_DIM} for each head"
        )
    if out is not None:
        check_out(out, tuple(qkv.shape), qkv.dtype)
    return head_dim
