"""The padded ops in plain torch: the specification of their kernels, and the form that a CPU runs.

Each op computes in fp32, writes into `out` if it is given, and returns the tensor it wrote.
"""

import torch
from torch import Tensor


def masked_softmax(
    x: Tensor, seqlens: Tensor, *, scale: float, causal: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return softmax(x · scale) over the keys that each query may read, 0 on the others.

    A query that may read no key gets a row of zeros.

    Args:
        x: `[batch, num_heads, queries, keys]`.
        seqlens: `[batch]` int32; a sequence's keys from this one on are padding.
        scale: multiplies the scores.
        causal: query i reads keys 0 to i + keys - queries alone.
    """
    queries, keys = x.shape[-2:]
    key = torch.arange(keys, device=x.device)
    readable = (key < seqlens[:, None])[:, None, None, :]
    if causal:
        last = torch.arange(queries, device=x.device)[:, None] + (keys - queries)
        readable = readable & (key <= last)
    scores = (x.float() * scale).masked_fill(~readable, -torch.inf)
    # a row of -inf alone gives NaN, and becomes zeros
    result = scores.softmax(dim=-1).masked_fill(~readable, 0.0).to(x.dtype)
    return result if out is None else out.copy_(result)


def unpack(x: Tensor, cu_seqlens: Tensor, *, max_seqlen: int, out: Tensor | None = None) -> Tensor:
    """Return the padded form of packed tokens, `[batch, max_seqlen, hidden]`, 0 past each sequence's end.

    Args:
        x: `[tokens, hidden]`.
        cu_seqlens: `[batch + 1]` int32, ascending from 0 to tokens.
        max_seqlen: the width of the result, at least the longest sequence.
    """
    if out is None:
        out = x.new_empty(len(cu_seqlens) - 1, max_seqlen, x.shape[1])
    out[~_inside(cu_seqlens, max_seqlen)] = 0
    out[_inside(cu_seqlens, max_seqlen)] = x
    return out


def pack(x: Tensor, cu_seqlens: Tensor, *, tokens: int, out: Tensor | None = None) -> Tensor:
    """Return the packed form of padded sequences, `[tokens, hidden]`.

    Args:
        x: `[batch, max_seqlen, hidden]`.
        cu_seqlens: `[batch + 1]` int32, ascending from 0 to tokens.
        tokens: the last of `cu_seqlens`, which the host knows.
    """
    if out is None:
        out = x.new_empty(tokens, x.shape[2])
    return out.copy_(x[_inside(cu_seqlens, x.shape[1])])


def _inside(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return which places of the padded form hold a token, `[batch, max_seqlen]` bool."""
    return torch.arange(max_seqlen, device=cu_seqlens.device) < cu_seqlens.diff()[:, None]
