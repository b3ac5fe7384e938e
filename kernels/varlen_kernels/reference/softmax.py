"""Softmax over padded scores in plain torch."""

import torch
from torch import Tensor

from varlen_kernels.reference.torch_parts import at_least_fp32, slices_of

__all__ = ["masked_softmax"]


def masked_softmax(
    x: Tensor, seqlens: Tensor, *, scale: float, causal: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return softmax(x · scale) over the keys that each query may read, 0 elsewhere.

    A query without a readable key gets a row of zeros.

    Args:
        x: `[batch, num_heads, queries, keys]`.
        seqlens: `[batch]` int32, the number of keys of each sequence; later keys are padding.
        causal: whether query i reads only keys 0 to i + keys - queries.
    """
    queries, keys = x.shape[-2:]
    key = torch.arange(keys, device=x.device)
    hidden = (key >= seqlens[:, None])[:, None, None, :]
    if causal:
        last = torch.arange(queries, device=x.device)[:, None] + (keys - queries)
        hidden = hidden | (key > last)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part in slices_of(x):
        scores = (at_least_fp32(x[part]) * scale).masked_fill_(hidden[part], -torch.inf)
        # a row that is -inf throughout gives NaN, and becomes zeros
        out[part] = scores.softmax(dim=-1).masked_fill_(hidden[part], 0.0)
    return out
