"""Append of the keys and values of new tokens to their KV blocks.

One program owns some keys, and the values of the same tokens and heads. A token without a slot is not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.triton.attention_checks import check_heads
from varlen_kernels.triton.attention_tiles import block_d
from varlen_kernels.triton.checks import check_vector
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.triton.kv_blocks import check_caches
from varlen_kernels.tuning import Launch, pick

# Elements of keys per program.
_TILES = (2048, 4096, 1024)


@triton.jit(do_not_specialize=["rows"])
def _append_kv_kernel(
    qkv_ptr,  # [tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    slots_ptr,  # [tokens] int64
    key_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    rows,  # tokens * NUM_KV_HEADS
    QKV_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= HEAD_DIM
    DEPENDENT: tl.constexpr,
):
    """Copy the keys and values of ROWS pairs of a token and a key head."""
    wait_for_kernels(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    slot = tl.load(slots_ptr + token, mask=row < rows, other=-1)
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = (slot >= 0)[:, None] & (col < HEAD_DIM)

    # int64: tokens * QKV_STRIDE and the elements of a cache may pass 2**31
    keys_at = token.to(tl.int64) * QKV_STRIDE + (NUM_HEADS + head) * HEAD_DIM
    keys_ptr = qkv_ptr + keys_at[:, None] + col
    keys = tl.load(keys_ptr, mask=inside, other=0.0)
    values = tl.load(keys_ptr + NUM_KV_HEADS * HEAD_DIM, mask=inside, other=0.0)

    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    cache_row = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + place
    at = cache_row[:, None] * HEAD_DIM + col
    tl.store(key_cache_ptr + at, keys, mask=inside)
    tl.store(value_cache_ptr + at, values, mask=inside)


def append_kv(
    qkv: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Write the keys and values of each token into its slot, see `reference.append_kv`.

    Raises:
        ValueError: shapes disagree, `qkv` or a cache is not contiguous or of an unsupported dtype, block_size is
            not a multiple of 16, or `slots` is not int64.
    """
    tokens = len(qkv)
    head_dim = check_heads(qkv, num_heads, num_kv_heads)
    check_caches(key_cache, value_cache, num_kv_heads, head_dim)
    check_vector(tokens, slots=slots)
    if slots.dtype != torch.int64:
        raise ValueError(f"slots is {slots.dtype}; it must be torch.int64")
    if tokens == 0:
        return
    rows = tokens * num_kv_heads
    launch = pick("append_kv", (head_dim, qkv.dtype), candidate_launches)
    _append_kv_kernel[(triton.cdiv(rows, launch["ROWS"]),)](
        qkv,
        slots,
        key_cache,
        value_cache,
        rows,
        QKV_STRIDE=qkv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
        BLOCK_D=block_d(head_dim),
        **launch,
        **dependent_launch(),
    )


def candidate_launches(head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """Return the candidate launches for heads of this size; the first is the default.

    Args:
        head_dim: elements of a key.
        dtype: dtype of `qkv`; part of the key only.
    """
    del dtype
    rows = [tile // block_d(head_dim) for tile in _TILES]
    return [{"ROWS": count, "num_warps": 4} for count in rows]
