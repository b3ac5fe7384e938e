"""Copies of KV blocks: the keys and values of all layers in one launch.

One program owns a part of one block in one layer.
"""

import triton
import triton.language as tl
from torch import Tensor, int32

from varlen_kernels.reference.paged import check_copies
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels

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
    """Copy a part of one block in one layer."""
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
