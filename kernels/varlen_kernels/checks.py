"""What launchers check before a kernel reads memory: shapes, dtypes and layout, in the caller's words."""

import torch
from torch import Tensor

from varlen_kernels.rows import MAX_ROW

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ID_DTYPES = (torch.int32, torch.int64)


def check_rows(x: Tensor, **others: Tensor | None) -> None:
    """Check that `x` and the others have one shape and dtype, and rows that are contiguous inside.

    Raises:
        ValueError: one is not so; the message names it.
    """
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
    """Check that `out` can take a result whose shape is not that of an input.

    Raises:
        ValueError: it has another shape or dtype, or rows that are not contiguous inside.
    """
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}; it must be {list(shape)} {dtype}")
    check_row_layout(out=out)


def check_row_layout(**tensors: Tensor) -> None:
    """Check that the rows of each are contiguous inside, if they lie apart in two dimensions or more.

    Raises:
        ValueError: one is not so; the message names it.
    """
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have rows")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last must be 1")


def check_dtype(**tensors: Tensor) -> None:
    """Check that kernels have a form for each tensor's dtype.

    Raises:
        ValueError: one is not in DTYPES; the message names it.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, DTYPES))}")


def check_width(width: int) -> None:
    """Check that one program can hold a row.

    Raises:
        ValueError: it cannot.
    """
    if not 0 < width <= MAX_ROW:
        raise ValueError(f"x has rows of {width}; allowed: 1 to {MAX_ROW}")


def check_vector(width: int, **vectors: Tensor | None) -> None:
    """Check that each is a contiguous vector of `width` elements.

    Raises:
        ValueError: one is not so; the message names it.
    """
    for name, vector in vectors.items():
        if vector is not None and (vector.shape != (width,) or not vector.is_contiguous()):
            raise ValueError(
                f"{name} has shape {list(vector.shape)} and strides {vector.stride()}; it must be [{width}], contiguous"
            )


def check_ids(count: int, **vectors: Tensor) -> None:
    """Check that each is a contiguous vector of `count` int32 or int64.

    Raises:
        ValueError: one is not so; the message names it.
    """
    check_vector(count, **vectors)
    for name, vector in vectors.items():
        if vector.dtype not in ID_DTYPES:
            allowed = ", ".join(map(str, ID_DTYPES))
            raise ValueError(f"{name} is {vector.dtype}; allowed: {allowed}")


def check_seqlens(batch: int, seqlens: Tensor) -> None:
    """Check that there is one int32 for each sequence.

    Raises:
        ValueError: it is not so.
    """
    if seqlens.shape != (batch,) or seqlens.dtype != torch.int32 or not seqlens.is_contiguous():
        raise ValueError(
            f"seqlens is {list(seqlens.shape)} {seqlens.dtype}, strides {seqlens.stride()};"
            f" it must be [{batch}] torch.int32, contiguous"
        )


def check_cu_seqlens(cu_seqlens: Tensor, batch: int | None = None) -> None:
    """Check that there is one int32 for each sequence's start, and one for the end of the last.

    Raises:
        ValueError: it is not so, or there are not `batch` sequences where that is given.
    """
    wanted = "batch + 1" if batch is None else str(batch + 1)
    fits = len(cu_seqlens) > 0 if batch is None else len(cu_seqlens) == batch + 1
    if (
        cu_seqlens.ndim != 1
        or not fits
        or cu_seqlens.dtype != torch.int32
        or not cu_seqlens.is_contiguous()
    ):
        raise ValueError(
            f"cu_seqlens is {list(cu_seqlens.shape)} {cu_seqlens.dtype}, strides {cu_seqlens.stride()};"
            f" it must be [{wanted}] torch.int32, contiguous"
        )


def row_strides(**tensors: Tensor) -> tuple[int, ...]:
    """Return how far apart the rows of each lie, which must be the same from each row to the next.

    Raises:
        ValueError: it is not; the message names the tensor.
    """
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
