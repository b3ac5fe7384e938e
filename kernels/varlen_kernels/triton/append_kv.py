"""Append of keys and values of new tokens to KV blocks, and copies of blocks.

Norms and rotary positions of queries and keys are part of it. One program owns one head of some tokens. It writes keys
and values straight into their slots, and rotated queries where attention reads them. A token without a slot writes no
key and no value. Copies are of all layers in one launch: one program owns a part of one block in one layer.
Source: Su et al. 2021, arXiv:2104.09864 (rotary positions).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, int32

from varlen_kernels.reference.paged import check_copies
from varlen_kernels.triton.attention_blocks import check_caches, for_cache
from varlen_kernels.triton.attention_tiles import block_d
from varlen_kernels.triton.checks import (
    check_heads,
    check_ids,
    check_out,
    check_row_layout,
    check_vector,
)
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.tuning import Launch, pick

# Elements of a head per program.
_TILES = (2048, 4096, 1024)


@triton.jit
def _copy_heads(
    from_ptr,  # [ROWS, HEAD_DIM]
    to_ptr,  # [ROWS, HEAD_DIM]
    mask,  # [ROWS]
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = mask[:, None] & (col < HEAD_DIM)
    features = tl.load(from_ptr[:, None] + col, mask=inside, other=0.0)
    tl.store(to_ptr[:, None] + col, for_cache(features, to_ptr), mask=inside)


@triton.jit
def _rotate_heads(
    from_ptr,  # [ROWS, HEAD_DIM]
    to_ptr,  # [ROWS, HEAD_DIM]
    mask,  # [ROWS]
    cos_sin_ptr,  # [ROWS, HEAD_DIM]
    weight_ptr,  # [HEAD_DIM], read if HAS_NORMS
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    # [ROWS, BLOCK_D / 2] features of each half
    col = tl.arange(0, BLOCK_D // 2)[None, :]
    inside = mask[:, None] & (col < HALF)
    first = tl.load(from_ptr[:, None] + col, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(from_ptr[:, None] + HALF + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        # a weight for each row, so that loads have the layout of the features
        col_of_row = tl.broadcast_to(col, first.shape)
        is_feature = col_of_row < HALF
        first *= scale * tl.load(weight_ptr + col_of_row, mask=is_feature, other=0.0)
        second *= scale * tl.load(weight_ptr + HALF + col_of_row, mask=is_feature, other=0.0)
    cos = tl.load(cos_sin_ptr[:, None] + col, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr[:, None] + HALF + col, mask=inside, other=0.0)
    to_ptr = to_ptr[:, None] + col
    tl.store(to_ptr, for_cache(first * cos - second * sin, to_ptr), mask=inside)
    tl.store(to_ptr + HALF, for_cache(second * cos + first * sin, to_ptr), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _append_kv_kernel(
    qkv_ptr,  # [tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    slots_ptr,  # [tokens] int64
    key_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    position_ids_ptr,  # [tokens], read if ROTATES, as the next one
    cos_sin_ptr,  # [positions, HEAD_DIM]
    query_weight_ptr,  # [HEAD_DIM], read if HAS_NORMS, as the next one
    key_weight_ptr,  # [HEAD_DIM]
    out_ptr,  # [tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM], gets the queries if ROTATES; may be `qkv`
    tokens,
    eps,
    QKV_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTATES: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    # queries that are not rotated have no program
    FIRST_HEAD: tl.constexpr = 0 if ROTATES else NUM_HEADS
    HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS - FIRST_HEAD
    head = FIRST_HEAD + tl.program_id(0) % HEADS
    token = tl.program_id(0) // HEADS * ROWS + tl.arange(0, ROWS)
    is_token = token < tokens
    # int64: tokens * QKV_STRIDE and the elements of a cache may pass 2**31
    row = token.to(tl.int64)
    head_ptr = qkv_ptr + row * QKV_STRIDE + head * HEAD_DIM
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    cache_row = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    at = cache_row * HEAD_DIM

    if head >= NUM_HEADS + NUM_KV_HEADS:
        _copy_heads(head_ptr, value_cache_ptr + at, slot >= 0, HEAD_DIM, BLOCK_D)
    elif ROTATES:
        position = tl.load(position_ids_ptr + token, mask=is_token, other=0).to(tl.int64)
        angle_ptr = cos_sin_ptr + position * TABLE_STRIDE
        if head >= NUM_HEADS:
            _rotate_heads(
                head_ptr,
                key_cache_ptr + at,
                slot >= 0,
                angle_ptr,
                key_weight_ptr,
                eps,
                HEAD_DIM,
                HAS_NORMS,
                BLOCK_D,
            )
        else:
            _rotate_heads(
                head_ptr,
                out_ptr + row * OUT_STRIDE + head * HEAD_DIM,
                is_token,
                angle_ptr,
                query_weight_ptr,
                eps,
                HEAD_DIM,
                HAS_NORMS,
                BLOCK_D,
            )
    else:
        _copy_heads(head_ptr, key_cache_ptr + at, slot >= 0, HEAD_DIM, BLOCK_D)


def append_kv(
    qkv: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position_ids: Tensor | None = None,
    cos_sin: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Write keys and values into their slots and return the rows with queries, see `reference.append_kv`.

    Norms are not rounded before the rotation. Every position must be inside the table: the kernel would read memory
    past it for any other position.

    Raises:
        ValueError: shapes or dtypes disagree, a tensor is not contiguous or of an unsupported dtype, block_size is not
            a multiple of 16, `slots` is not int64, or only one of two arguments is given that belong together.
    """
    tokens = len(qkv)
    head_dim = check_heads(qkv, num_heads, num_kv_heads)
    check_caches(key_cache, value_cache, num_kv_heads, head_dim)
    check_vector(tokens, slots=slots)
    if slots.dtype != torch.int64:
        raise ValueError(f"slots is {slots.dtype}; it must be torch.int64")
    _check_positions(qkv, position_ids, cos_sin, query_weight, key_weight, head_dim)
    rotates, has_norms = cos_sin is not None, query_weight is not None
    result = qkv
    if rotates:
        result = torch.empty_like(qkv) if out is None else out
        check_out(result, tuple(qkv.shape), qkv.dtype)
    if tokens == 0:
        return result
    launch = pick("append_kv", (head_dim, qkv.dtype), candidate_launches)
    heads = 2 * num_kv_heads + (num_heads if rotates else 0)
    _append_kv_kernel[(triton.cdiv(tokens, launch["ROWS"]) * heads,)](
        qkv,
        slots,
        key_cache,
        value_cache,
        slots if position_ids is None else position_ids,
        qkv if cos_sin is None else cos_sin,
        qkv if query_weight is None else query_weight,
        qkv if key_weight is None else key_weight,
        result,
        tokens,
        eps,
        QKV_STRIDE=qkv.stride(0),
        OUT_STRIDE=result.stride(0),
        TABLE_STRIDE=0 if cos_sin is None else cos_sin.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
        ROTATES=rotates,
        HAS_NORMS=has_norms,
        BLOCK_D=block_d(head_dim),
        **launch,
        **dependent_launch(),
    )
    return result


def candidate_launches(head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for heads of this size; the first is the default.

    Args:
        dtype: dtype of `qkv`; part of the key only.
    """
    del dtype
    rows = [tile // block_d(head_dim) for tile in _TILES]
    return [{"ROWS": count, "num_warps": 4} for count in rows]


def _check_positions(
    qkv: Tensor,
    position_ids: Tensor | None,
    cos_sin: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    head_dim: int,
) -> None:
    check_vector(head_dim, query_weight=query_weight, key_weight=key_weight)
    if (query_weight is None) != (key_weight is None):
        raise ValueError("query_weight and key_weight are given together, or neither is")
    if position_ids is None or cos_sin is None:
        if not (position_ids is None and cos_sin is None and query_weight is None):
            raise ValueError(
                "position_ids and cos_sin are given together, and weights only with them"
            )
        return
    check_ids(len(qkv), position_ids=position_ids)
    check_row_layout(cos_sin=cos_sin)
    if cos_sin.dtype != torch.float32 or cos_sin.shape[1] != head_dim or head_dim % 2:
        raise ValueError(
            f"cos_sin is {list(cos_sin.shape)} {cos_sin.dtype}; it must be [positions, {head_dim}] torch.float32, of"
            " an even number of columns"
        )


# Whole numbers of 4 bytes that a program copies.
_PART = 1024


@triton.jit
def _copy_blocks_kernel(
    memory_ptr,  # [layers, blocks, WORDS] int32
    copies_ptr,  # [copies, 2] int32
    LAYER_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    copies_ptr += 2 * tl.program_id(0)
    source, copy = tl.load(copies_ptr), tl.load(copies_ptr + 1)
    if source == copy:
        return
    word = tl.program_id(2) * PART + tl.arange(0, PART)
    # int64: the elements of all layers may pass 2**31
    memory_ptr += tl.program_id(1).to(tl.int64) * LAYER_STRIDE + word
    words = tl.load(memory_ptr + source.to(tl.int64) * WORDS, mask=word < WORDS)
    tl.store(memory_ptr + copy.to(tl.int64) * WORDS, words, mask=word < WORDS)


def copy_blocks(memory: Tensor, copies: Tensor) -> None:
    """Copy KV blocks of all layers, see `reference.copy_blocks`."""
    check_copies(memory, copies)
    if not len(copies):
        return
    words = memory.flatten(2).view(int32)
    layers, _, size = words.shape
    grid = (len(copies), layers, triton.cdiv(size, _PART))
    _copy_blocks_kernel[grid](
        words,
        copies,
        LAYER_STRIDE=words.stride(0),
        WORDS=size,
        PART=_PART,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(),
    )
