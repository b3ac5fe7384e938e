"""The padded ops in plain torch: specification of the kernels, and CPU form.

Each op writes its result into `out` if given, and returns it.
"""

import torch
from torch import Tensor


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
