"""T5's relative positions: a bias of attention scores by the distance from query to key.

Distances share learned biases: near ones have one each, farther ones fall into buckets that grow with the logarithm.
Source: Raffel et al. 2019, arXiv:1910.10683, section 2.1; buckets as in Mesh TensorFlow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def bias_by_distance(table: Tensor, *, max_distance: int, is_causal: bool) -> Tensor:
    """Return the bias of each head and distance, `[num_heads, 2 * max_distance + 1]` fp32.

    Entry max_distance + d belongs to a key d tokens after its query.

    Args:
        table: `[buckets, num_heads]`, the bias of each bucket.
        max_distance: first distance of the last bucket.
        is_causal: whether queries read no later keys, so that earlier ones have all buckets.
    """
    import torch

    buckets = len(table)
    later = torch.arange(-max_distance, max_distance + 1)
    if is_causal:
        bucket = _bucket((-later).clamp_min(0), buckets, max_distance)
    else:
        half = buckets // 2
        bucket = _bucket(later.abs(), half, max_distance) + half * (later > 0)
    return table.float()[bucket.to(table.device)].t().contiguous()


def _bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, which is not below 0."""
    import torch

    exact = buckets // 2
    # log(0) is never chosen
    part = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = exact + (part.clamp_min(0) * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp_max(buckets - 1))
