"""Pooling, and other choices of rows, in plain torch."""

import torch
from torch import Tensor

from varlen_kernels import Pooling
from varlen_kernels.reference.torch_parts import at_least_fp32, write_out
from varlen_kernels.vector_ops import normalize_rows

__all__ = ["first_tokens", "pool", "select_rows", "to_fp32", "window_rows"]


def select_rows(x: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the rows of `x` with these indices, `[rows, hidden]`.

    Args:
        x: `[tokens, hidden]`.
        rows: `[rows]` int32.
    """
    return torch.index_select(x, 0, rows, out=out)


def pool(
    x: Tensor,
    cu_seqlens: Tensor,
    normalize: Tensor | None = None,
    unpooled_lengths: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    mode: Pooling,
    out: Tensor | None = None,
) -> Tensor:
    """Return one fp32 vector per sequence, `[batch, hidden]`.

    By `mode`, it is the first or last token, or the maximum, the sum or a mean of all tokens. It is 0 for an empty
    sequence.

    Args:
        x: `[tokens, hidden]`.
        cu_seqlens: `[batch + 1]` int32.
        normalize: `[batch]` bool: vectors to divide by their Euclidean norm. None: no vector.
        unpooled_lengths: `[batch]` int32: tokens at the start of each sequence that are not pooled. Weights of a mean
            count them. If no token is left, "cls" is the first of all, the maximum -inf, and all else 0. None: 0.
        rows: `[rows]` int32: the rows of `x` that are pooled, one sequence's after another's; a row may be in several.
            None, or no rows: all of `x`.
    """
    if rows is not None and len(rows):
        x = x.index_select(0, rows)
    lengths = counts = cu_seqlens.diff().long()
    if unpooled_lengths is not None:
        counts = (lengths - unpooled_lengths).clamp_min_(0)
    if mode == "cls":
        rows = torch.where(counts > 0, cu_seqlens[1:] - counts, cu_seqlens[:-1])
        pooled = at_least_fp32(_rows_or_zeros(x, rows, lengths == 0))
    elif mode == "last":
        pooled = at_least_fp32(_rows_or_zeros(x, cu_seqlens[1:] - 1, counts == 0))
    else:
        parts = counts
        if unpooled_lengths is not None:
            # two of each sequence: the tokens that are not pooled, and the others
            parts = torch.stack([lengths - counts, counts], dim=1).flatten()
        weighted = at_least_fp32(x)
        if mode == "weighted_mean":
            weighted = weighted * _places(x, cu_seqlens)
        reduce = mode if mode in {"mean", "max"} else "sum"
        # "unsafe": x may have tokens past the end of the last sequence
        pooled = torch.segment_reduce(weighted, reduce, lengths=parts, axis=0, unsafe=True)
        if unpooled_lengths is not None:
            pooled = pooled[1::2]
        if mode == "mean_sqrt":
            pooled /= counts[:, None].sqrt()
        elif mode == "weighted_mean":
            # the sum of the places of the last `counts` tokens
            pooled /= (counts * (2 * lengths - counts + 1) / 2)[:, None]
        is_zero = (lengths if mode == "max" else counts) == 0
        pooled.masked_fill_(is_zero[:, None], 0.0)
    if normalize is not None:
        normalize_rows(pooled, normalize, out=pooled)
    return write_out(pooled, out)


def first_tokens(x: Tensor, cu_seqlens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the first token of each sequence, `[batch, hidden]`; 0 for an empty one."""
    is_empty = cu_seqlens[:-1] == cu_seqlens[1:]
    return write_out(_rows_or_zeros(x, cu_seqlens[:-1], is_empty), out)


def window_rows(x: Tensor, cu_seqlens: Tensor, *, size: int, out: Tensor | None = None) -> Tensor:
    """Return each row with its neighbours in its sequence side by side, `[tokens, size · hidden]`.

    Past the ends of a sequence neighbours are zeros: so a linear layer of the result is a convolution.

    Args:
        x: `[tokens, hidden]`.
        cu_seqlens: `[batch + 1]` int32.
        size: rows of a window, an odd number; the middle one is the token's own.
    """
    if out is None:
        out = x.new_empty(len(x), size * x.shape[1])
    tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)
    # a token past the last sequence is in none
    sequences = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    ends = cu_seqlens[1:][sequences.clamp(max=len(cu_seqlens) - 2)]
    for place, columns in enumerate(torch.split(out, x.shape[1], dim=1)):
        rows = tokens + (place - size // 2)
        columns.copy_(_rows_or_zeros(x, rows, (rows < cu_seqlens[sequences]) | (rows >= ends)))
    return out


def to_fp32(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of `x` in fp32."""
    # copy_ converts without a temporary tensor
    return x.to(torch.float32, copy=True) if out is None else out.copy_(x)


def _rows_or_zeros(x: Tensor, rows: Tensor, is_zero: Tensor) -> Tensor:
    """Return rows of `x`, or zeros where `is_zero`; there the index may be any."""
    if len(x) == 0:
        return x.new_zeros(len(rows), x.shape[1])
    return x.index_select(0, rows.clamp(0, len(x) - 1)).masked_fill_(is_zero[:, None], 0.0)


def _places(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the place of each token in its sequence, from 1: `[tokens, 1]` fp32."""
    tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)
    # a token past the last sequence counts from its end
    sequences = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    return (tokens - cu_seqlens[sequences] + 1)[:, None].float()
