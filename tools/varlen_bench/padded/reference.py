"""The padded ops in plain torch: specification of the kernels, and CPU form.

Each op writes its result into `out` if given, and returns it. Softmax is computed in fp32.
"""

import torch
from torch import Tensor

from varlen_kernels.reference.torch_parts import at_least_fp32


def masked_softmax(
    x: Tensor, seqlens: Tensor, *, scale: float, causal: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return softmax(x · scale) over the keys that each query may read, 0 elsewhere.

    A query without a readable key gets a row of zeros.

    Args:
        x: `[batch, num_heads, queries, keys]`.
        seqlens: `[batch]` int32, the number of keys of each sequence; later keys are padding.
        scale: factor of the scores.
        causal: whether query i reads only keys 0 to i + keys - queries.
    """
    queries, keys = x.shape[-2:]
    key = torch.arange(keys, device=x.device)
    readable = (key < seqlens[:, None])[:, None, None, :]
    if causal:
        last = torch.arange(queries, device=x.device)[:, None] + (keys - queries)
        readable = readable & (key <= last)
    scores = (at_least_fp32(x) * scale).masked_fill(~readable, -torch.inf)
    # a row that is -inf throughout gives NaN, and becomes zeros
    result = scores.softmax(dim=-1).masked_fill(~readable, 0.0).to(x.dtype)
    return result if out is None else out.copy_(result)


def unpack(x: Tensor, cu_seqlens: Tensor, *, max_seqlen: int, out: Tensor | None = None) -> Tensor:
    """Return packed tokens as padded sequences, `[batch, max_seqlen, hidden]`, with zeros as padding.

    Args:
        x: `[tokens, hidden]`.
        cu_seqlens: `[batch + 1]` int32, ascending from 0 to tokens.
        max_seqlen: tokens per padded sequence, at least the longest length.
    """
    if out is None:
        out = x.new_empty(len(cu_seqlens) - 1, max_seqlen, x.shape[1])
    is_token = _token_mask(cu_seqlens, max_seqlen)
    out[~is_token] = 0
    out[is_token] = x
    return out


def pack(x: Tensor, cu_seqlens: Tensor, *, tokens: int, out: Tensor | None = None) -> Tensor:
    """Return padded sequences as packed tokens, `[tokens, hidden]`.

    Args:
        x: `[batch, max_seqlen, hidden]`.
        cu_seqlens: `[batch + 1]` int32, ascending from 0 to tokens.
        tokens: the last value of `cu_seqlens`; the host knows it without a copy from the device.
    """
    if out is None:
        out = x.new_empty(tokens, x.shape[2])
    return out.copy_(x[_token_mask(cu_seqlens, x.shape[1])])


def _token_mask(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return which positions of the padded sequences hold a token, `[batch, max_seqlen]` bool."""
    return torch.arange(max_seqlen, device=cu_seqlens.device) < cu_seqlens.diff()[:, None]
