"""Relative positions: a bias of attention scores by the distance from query to key.

Of T5, where distances share learned biases: near ones have one each, farther ones fall into buckets that grow with the
logarithm. Source: Raffel et al. 2019, arXiv:1910.10683, section 2.1; buckets as in Mesh TensorFlow. And ALiBi, where
the bias is a slope of each head times the distance. Source: Press et al. 2021, arXiv:2108.12409.
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


def alibi_by_distance(num_heads: int, furthest: int) -> Tensor:
    """Return the bias of each head and distance in both directions, `[num_heads, 2 * furthest + 1]` fp32.

    Entry furthest + d belongs to a key d tokens before or after its query.
    """
    import torch

    # powers of two of heads have a geometric series; others take every second slope of the next one
    whole = 2 ** (num_heads.bit_length() - 1)
    slopes = [*_slopes(whole), *_slopes(2 * whole)[::2]][:num_heads]
    distance = torch.arange(-furthest, furthest + 1).abs()
    return -torch.tensor(slopes)[:, None] * distance


def _slopes(heads: int) -> list[float]:
    return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]


def _bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    import torch

    exact = buckets // 2
    # log(0) is never chosen
    part = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = exact + (part.clamp_min(0) * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp_max(buckets - 1))
