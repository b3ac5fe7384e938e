"""Checks of shapes, dtypes and layout, made by launchers before a kernel reads memory.

What does not pass raises ValueError; its message names the tensor.
"""

import torch
from torch import Tensor

from varlen_kernels.triton.rows import MAX_ROW

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ID_DTYPES = (torch.int32, torch.int64)


def check_rows(x: Tensor, **others: Tensor | None) -> None:
    """Check that all tensors have the shape and dtype of `x`, and contiguous rows."""
    check_dtype(x=x)
    for name, tensor in {"x": x, **others}.items():
        if tensor is None:
            continue
        if tensor.shape != x.shape or tensor.dtype != x.dtype:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}; x is {list(x.shape)} {x.dtype}"
            )
        check_row_layout(**{name: tensor})


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check the shape, dtype and layout of `out`."""
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}; it must be {list(shape)} {dtype}")
    check_row_layout(out=out)


def check_row_layout(**tensors: Tensor) -> None:
    """Check that each tensor has contiguous rows; the stride between rows is free.

    Raises:
        ValueError: one has fewer than two dimensions or a last stride other than 1.
    """
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have rows")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last must be 1")


def check_dtype(**tensors: Tensor) -> None:
    """Check that kernels support the dtype of each tensor."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, DTYPES))}")


def check_width(width: int) -> None:
    """Check that one program can hold a row of this width."""
    if not 0 < width <= MAX_ROW:
        raise ValueError(f"x has rows of {width}; allowed: 1 to {MAX_ROW}")


def check_vector(width: int, **vectors: Tensor | None) -> None:
    """Check that each tensor is a contiguous vector of `width` elements."""
    for name, vector in vectors.items():
        if vector is not None and (vector.shape != (width,) or not vector.is_contiguous()):
            raise ValueError(
                f"{name} has shape {list(vector.shape)} and strides {vector.stride()}; it must be [{width}], contiguous"
            )


def check_ids(count: int, **vectors: Tensor) -> None:
    """Check that each tensor is a contiguous vector of `count` int32 or int64."""
    check_vector(count, **vectors)
    for name, vector in vectors.items():
        if vector.dtype not in ID_DTYPES:
            allowed = ", ".join(map(str, ID_DTYPES))
            raise ValueError(f"{name} is {vector.dtype}; allowed: {allowed}")


def check_cu_seqlens(cu_seqlens: Tensor, batch: int | None = None) -> None:
    """Check that `cu_seqlens` is `[batch + 1]` int32, contiguous.

    Raises:
        ValueError: it is not, or `batch` is given and differs.
    """
    expected = "batch + 1" if batch is None else str(batch + 1)
    fits = len(cu_seqlens) > 0 if batch is None else len(cu_seqlens) == batch + 1
    if (
        cu_seqlens.ndim != 1
        or not fits
        or cu_seqlens.dtype != torch.int32
        or not cu_seqlens.is_contiguous()
    ):
        raise ValueError(
            f"cu_seqlens is {list(cu_seqlens.shape)} {cu_seqlens.dtype}, strides {cu_seqlens.stride()};"
            f" it must be [{expected}] torch.int32, contiguous"
        )


def row_strides(**tensors: Tensor) -> tuple[int, ...]:
    """Return the stride between the rows of each tensor, in elements."""
    strides = []
    for name, tensor in tensors.items():
        try:
            strides.append(tensor.view(-1, tensor.shape[-1]).stride(0))
        except RuntimeError:
            raise ValueError(
                f"{name} is {list(tensor.shape)} with strides {tensor.stride()};"
                " its rows must lie one stride apart"
            ) from None
    return tuple(strides)


def check_contiguous(**tensors: Tensor | None) -> None:
    """Check that each tensor is contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def check_table(shape: tuple[int, ...], dtype: torch.dtype, **tables: Tensor | None) -> None:
    """Check that each tensor has this shape and dtype, and is contiguous."""
    for name, table in tables.items():
        if table is not None and (
            table.shape != shape or table.dtype != dtype or not table.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {list(table.shape)} {table.dtype}, strides {table.stride()};"
                f" it must be {list(shape)} {dtype}, contiguous"
            )


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
    check_contiguous(key_lengths=key_lengths)


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
    check_contiguous(bias=bias)
