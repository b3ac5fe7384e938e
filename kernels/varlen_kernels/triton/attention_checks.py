"""Checks that the attention ops share, made by launchers before a kernel reads memory."""

import torch
from torch import Tensor

from varlen_kernels.triton.checks import check_dtype, check_row_layout

MAX_HEAD_DIM = 256


def check_heads(qkv: Tensor, num_heads: int, num_kv_heads: int, cached_dim: int = 0) -> int:
    """Return the head_dim of `qkv`, whose layout is checked.

    Args:
        cached_dim: head_dim of the caches, if `qkv` may hold only queries.

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
            + (f", or {num_heads * cached_dim} for only queries" if cached_dim else "")
        )
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; allowed: 1 to {MAX_HEAD_DIM}")
    return head_dim


def check_scores(scale: float, window: int, soft_cap: float) -> None:
    """Check the scale and the limit of the scores, and the length of the window.

    Raises:
        ValueError: `scale` is not above 0, or `window` or `soft_cap` is below 0.
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}; allowed: above 0")
    if window < 0:
        raise ValueError(f"window is {window}; allowed: 0 (all tokens) and above")
    if soft_cap < 0:
        raise ValueError(f"soft_cap is {soft_cap}; allowed: 0 (no limit) and above")


def check_key_lengths(key_lengths: Tensor | None, cu_seqlens: Tensor) -> None:
    """Check the numbers of keys of an attention op, if they are given.

    Raises:
        ValueError: they are not `[batch]` int32, contiguous.
    """
    if key_lengths is None:
        return
    shape = (len(cu_seqlens) - 1,)
    if key_lengths.shape != shape or key_lengths.dtype != torch.int32:
        raise ValueError(
            f"key_lengths is {list(key_lengths.shape)} {key_lengths.dtype}; it must be {list(shape)} torch.int32"
        )
    if not key_lengths.is_contiguous():
        raise ValueError(f"key_lengths has strides {key_lengths.stride()}; it must be contiguous")


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
