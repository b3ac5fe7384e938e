"""Pooling, and other choices of rows, in plain torch."""

import torch
from torch import Tensor

from varlen_kernels import Pooling
from varlen_kernels.torch_parts import write_out
from varlen_kernels.vector_ops import NORM_FLOOR


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
    """
    if mode in {"cls", "last"}:
        pooled = _tokens_or_zeros(x, cu_seqlens, of=mode).float()
    else:
        # "unsafe": x may have tokens past those of the last sequence
        lengths = cu_seqlens.diff().long()
        weighted = x.float() * _places(x, cu_seqlens) if mode == "weighted_mean" else x.float()
        reduce = mode if mode in {"mean", "max"} else "sum"
        pooled = torch.segment_reduce(weighted, reduce, lengths=lengths, axis=0, unsafe=True)
        if mode == "mean_sqrt":
            pooled /= lengths[:, None].sqrt()
        elif mode == "weighted_mean":
            pooled /= (lengths * (lengths + 1) / 2)[:, None]
        pooled.masked_fill_((lengths == 0)[:, None], 0.0)
    if normalize is not None:
        norms = torch.linalg.vector_norm(pooled, dim=1, keepdim=True).clamp_min_(NORM_FLOOR)
        pooled /= torch.where(normalize[:, None], norms, 1.0)
    return write_out(pooled, out)


def first_tokens(x: Tensor, cu_seqlens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the first token of each sequence, `[batch, hidden]`; 0 for an empty one."""
    return write_out(_tokens_or_zeros(x, cu_seqlens, of="cls"), out)


def to_fp32(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy of `x` in fp32."""
    # copy_ converts without a temporary tensor
    return x.to(torch.float32, copy=True) if out is None else out.copy_(x)


def _tokens_or_zeros(x: Tensor, cu_seqlens: Tensor, of: Pooling) -> Tensor:
    """Return the first ("cls") or last token of each sequence; 0 for an empty one."""
    if len(x) == 0:
        return x.new_zeros(len(cu_seqlens) - 1, x.shape[1])
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    # the index of an empty sequence is clamped to any token, which is then masked
    index = (starts if of == "cls" else ends - 1).clamp(0, len(x) - 1)
    return x.index_select(0, index).masked_fill_((starts == ends)[:, None], 0.0)


def _places(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the place of each token in its sequence, from 1: `[tokens, 1]` fp32."""
    tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)
    # a token past the last sequence counts from its end
    sequences = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
    return (tokens - cu_seqlens[sequences] + 1)[:, None].float()
