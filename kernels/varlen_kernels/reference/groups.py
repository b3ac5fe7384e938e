"""Ops of rows that are sorted by group, in plain torch.

A group is what its rows share: an expert of a model, or an adapter. One product serves all groups. Rows of a group are
neighbours, and groups follow each other in the order of their numbers; `cu_groups` holds the first row of each group
and the end of the last.
Source: Shazeer et al. 2017, arXiv:1701.06538 (experts); Gale et al. 2022, arXiv:2211.15841 (one product without
padding); Chen et al. 2023, arXiv:2310.18547 (one op for a batch of many adapters).
"""

from itertools import pairwise

import torch
from torch import Tensor

from varlen_kernels.reference.torch_parts import at_least_fp32, row_slices

__all__ = ["add_adapters", "linear_groups", "route_tokens", "sum_experts"]


def linear_groups(
    x: Tensor,
    weight: Tensor,
    cu_groups: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x @ weight[group]ᵀ + bias[group] of the group of each row, `[rows, features]`.

    Rows from `cu_groups[-1]` on belong to no group; their results are 0. A GPU reads the bounds on the device, so its
    time depends on the number of rows and groups, not on the bounds.

    Args:
        x: `[rows, hidden]`, sorted by group.
        weight: `[groups, features, hidden]`, contiguous.
        cu_groups: `[groups + 1]` int32, not descending: 0, the end of the first group, and so on. Groups may be empty.
        bias: `[groups, features]`.
    """
    out = x.new_empty(len(x), weight.shape[1]) if out is None else out
    bounds = cu_groups.tolist()
    for group, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        if bias is None:
            torch.mm(x[begin:end], weight[group].t(), out=out[begin:end])
        else:
            torch.addmm(bias[group], x[begin:end], weight[group].t(), out=out[begin:end])
    out[bounds[-1] :] = 0
    return out


def add_adapters(
    y: Tensor,
    x: Tensor,
    rows: Tensor,
    cu_groups: Tensor,
    first: Tensor,
    second: Tensor | None,
    spans: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return `y` with what low-rank adapters add to some of its rows, `[tokens, features]`.

    A linear layer may have several layers side by side, its parts. An adapter adds to the features of a part the
    product of `x` with its ranks of the first factor, and of that with the same ranks of the second one.

    Args:
        y: `[tokens, features]`, what the layer gives.
        x: `[tokens, hidden]`, what it reads.
        rows: `[rows]` int32, different rows of `x` and `y`, sorted by adapter.
        cu_groups: `[groups + 1]` int32, the bounds of the rows of each adapter; see `linear_groups`.
        first: `[groups, hidden, ranks]`, contiguous; `ranks` is a multiple of 16.
        second: `[groups, ranks, width]`, contiguous; row `r` is of the features of the part of rank `r`; `width` is a
            multiple of 64. None if `first` has a rank for each feature of its part, and is all there is.
        spans: `[groups, parts, 4]` int32: of each part the first rank, which is a multiple of 16, and the last one,
            the first feature and the last one. A last one is exclusive.
        bias: `[groups, features]`, added too.
    """
    total = y.clone() if out is None else out if out is y else out.copy_(y)
    for group, (begin, end) in enumerate(pairwise(cu_groups.tolist())):
        if begin == end:
            continue
        chosen = rows[begin:end].long()
        inner = at_least_fp32(x[chosen]) @ first[group].to(at_least_fp32(x).dtype)
        sums = at_least_fp32(total[chosen])
        for rank, last_rank, feature, last_feature in spans[group].tolist():
            added = inner[:, rank:last_rank]
            if second is not None:
                factor = second[group, rank:last_rank, : last_feature - feature]
                added = added @ factor.to(added.dtype)
            sums[:, feature:last_feature] += added
        if bias is not None:
            sums += bias[group]
        total[chosen] = sums.to(total.dtype)
    return total


def route_tokens(
    logits: Tensor,
    *,
    count: int,
    normalize: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the experts of each token, and all choices sorted by expert.

    A token chooses the experts with the largest logits, of equal ones the first. The choices of all tokens are rows,
    sorted by expert, then by token.

    Args:
        logits: `[tokens, experts]` fp32.
        count: experts of a token, from 1 to all.
        normalize: 1 if the weights of a token add up to 1; 0 if each is its part of the softmax over all experts.

    Returns:
        * `[tokens, count]` fp32, the weight of each choice.
        * `[tokens, count]` int32, the row of each choice.
        * `[tokens · count]` int32, the token of each row.
        * `[experts + 1]` int32, the bounds of the rows of each expert.
    """
    tokens, experts = logits.shape
    # a stable sort: where logits are equal, devices choose the same experts
    order = logits.sort(dim=1, descending=True, stable=True)[1]
    chosen = order[:, :count]
    weights = logits.softmax(dim=1).gather(1, chosen)
    if normalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    by_expert, choices = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts + 1, device=logits.device)
    cu_groups = torch.searchsorted(by_expert, numbers, out_int32=True)
    rows = torch.arange(tokens * count, dtype=torch.int32, device=logits.device)
    places = torch.empty_like(rows).scatter_(0, choices, rows)
    results = weights, places.view(tokens, count), (choices // count).int(), cu_groups
    if out is None:
        return results
    for given, result in zip(out, results, strict=True):
        given.copy_(result)
    return out


def sum_experts(
    x: Tensor,
    weights: Tensor,
    places: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of what the experts of each token give, `[tokens, features]`.

    It is summed in fp32, in the order of the choices of the token; then the bias is added.

    Args:
        x: `[rows, features]`, the rows of `route_tokens`.
        weights, places: `[tokens, count]` fp32 and int32, of `route_tokens`.
        bias: `[features]`.
    """
    if out is None:
        out = x.new_empty(len(places), x.shape[1])
    for rows in row_slices(len(places)):
        total = at_least_fp32(x.new_zeros(len(places[rows]), x.shape[1]))
        for number in range(places.shape[1]):
            chosen = x.index_select(0, places[rows, number])
            total.addcmul_(chosen.to(total.dtype), weights[rows, number, None].to(total.dtype))
        out[rows] = total if bias is None else total.add_(bias)
    return out
