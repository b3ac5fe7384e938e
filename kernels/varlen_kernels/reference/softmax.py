"""Softmax over padded scores in plain torch."""

import torch
from torch import Tensor

from varlen_kernels.reference.torch_parts import at_least_fp32, write_out

__all__ = ["masked_softmax"]


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
    return write_out(result, out)
