"""Sampling in plain torch: one token of each row, by temperature, top-k, top-p and min-p.

No vocabulary is sorted. The best tokens of a row are in its best groups, those with the largest maxima, so a small
top-k sorts a list of candidates. For any other row, a histogram of the probabilities tells where the kept tokens end,
and only the bucket in which they end is sorted.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from varlen_kernels.reference.beam import without_nan

__all__ = ["sample_tokens"]

# Elements of a temporary tensor: with this few it stays in a core's cache.
_STEP = 1 << 18
# Adjacent logits per group.
_GROUP_SIZE = 64
# Lengths of lists of candidates: a row with a top-k up to the last takes the shortest that holds its top-k.
_LIST_LENGTHS = (1, 64, 256)
# Buckets of the histogram, and buckets per unit of logit / temperature. The last bucket holds the rest.
_BUCKETS = 2048
_BUCKETS_PER_NAT = 64.0

_BELOW_ONE = 1 - 2.0**-53
_SMALLEST = torch.finfo(torch.float64).tiny
# Keys that order (logit, index) pairs: the upper half orders logits, the lower half prefers the lower index.
_LOWER_HALF = 0xFFFF_FFFF
_NO_KEY = -(2**63)


class _Rows(NamedTuple):
    """The arguments of some rows, `[rows, 1]` each.

    Without a limit, top-k is the vocabulary; for a greedy row it is 1.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def at(self, row: Tensor) -> "_Rows":
        return _Rows(*(tensor[row] for tensor in self))


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return one token of each row, drawn by its probabilities: `[rows]` int32.

    The probabilities are softmax(logits / temperature). Three limits are applied in this order. Each keeps the best
    token at least, and the next one sees the probabilities of the tokens that are left, which sum to 1:

    1. top-k keeps the `top_k` best tokens.
    2. top-p keeps a token if all better ones together have less than `top_p`.
    3. min-p keeps a token with at least `min_p` times the probability of the best.

    A better token has a higher logit, or the same logit and a lower id, so the kept tokens are always the same ones.
    The draw adds up the probabilities of the kept tokens by ascending id, and returns the first token whose sum exceeds
    `uniform`. NaN counts as -inf, and +inf as the largest finite number. A row of only -inf gives token 0.

    Args:
        logits: `[rows, vocabulary]` fp32; the row stride may exceed the vocabulary.
        temperature: `[rows]` fp32, at least 0. With 0 the best token is returned, and the limits have no effect.
        top_k: `[rows]` int32; 0 is no limit.
        top_p: `[rows]` fp32, up to 1; 1 is no limit.
        min_p: `[rows]` fp32, from 0 to 1; 0 is no limit.
        uniform: `[rows]` fp64 random numbers from 0 to below 1.

    Raises:
        ValueError: a shape or dtype is not as above, or the vocabulary is empty or too large for int32.

    Source: Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2019, arXiv:1904.09751 (top-p); Nguyen et al.
        2024, arXiv:2407.01082 (min-p). Order of the limits as in transformers.
    """
    check_sampling(logits, temperature, top_k, top_p, min_p, uniform, out)
    vocabulary = logits.shape[1]
    if out is None:
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    greedy = temperature == 0
    top_k = top_k.where(top_k > 0, vocabulary).clamp_max(vocabulary).masked_fill(greedy, 1)
    rows = _Rows(
        temperature=temperature.masked_fill(greedy, 1.0)[:, None],
        top_k=top_k[:, None],
        top_p=top_p[:, None],
        min_p=min_p[:, None],
        uniform=uniform[:, None],
    )
    maxima = _of_groups(torch.amax, logits)
    # NaN is not below infinity
    if not bool((maxima < torch.inf).all()):
        logits = without_nan(logits)
        maxima = _of_groups(torch.amax, logits)

    shorter = 0
    for length in _LIST_LENGTHS:
        row = ((top_k > shorter) & (top_k <= length)).nonzero().squeeze(1)
        if len(row):
            logit, token = _best_of_rows(logits, maxima, row, length)
            out[row] = _sample_lists(logit, token, rows.at(row)).int()
        shorter = length
    long = (top_k > shorter).nonzero().squeeze(1)
    for row in torch.split(long, max(1, _STEP // vocabulary)):
        out[row] = _sample_rows(logits[row], maxima[row], rows.at(row)).int()
    return out


def check_sampling(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    out: Tensor | None,
) -> None:
    """Check the arguments of `sample_tokens`, fused or reference.

    Raises:
        ValueError: an argument has a wrong shape or dtype; the message names it.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"logits is {list(logits.shape)} {logits.dtype}; it must be [rows, vocabulary] float32"
        )
    rows, vocabulary = logits.shape
    if not 1 <= vocabulary < 2**31:
        raise ValueError(f"logits has a vocabulary of {vocabulary}; allowed: 1 to 2**31 - 1")
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("uniform", uniform, torch.float64),
        ("out", out, torch.int32),
    ):
        if tensor is not None and (tensor.shape != (rows,) or tensor.dtype != dtype):
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}; it must be [{rows}] {dtype}"
            )


def _sample_lists(logit: Tensor, token: Tensor, rows: _Rows) -> Tensor:
    """Return one token of each row, of its best tokens, which are sorted."""
    weight = ((logit - _peak(logit[:, :1])) / rows.temperature).double().exp_()
    rank = torch.arange(weight.shape[1], device=weight.device)
    weight.masked_fill_(rank >= rows.top_k, 0.0)
    sums = weight.cumsum(1)
    needed = _needed(rows.top_p, sums[:, -1:])
    weight.masked_fill_((sums - weight >= needed) | (weight < rows.min_p), 0.0)
    token, order = token.sort(1)
    place, _ = _draw(weight.gather(1, order), rows.uniform)
    return token.gather(1, place).squeeze(1)


def _sample_rows(logits: Tensor, maxima: Tensor, rows: _Rows) -> Tensor:
    """Return one token of each row, of its whole vocabulary."""
    distance = (_peak(maxima.amax(1, keepdim=True)) - logits).div_(rows.temperature)
    weight = distance.neg().exp_()
    has_top_k = bool((rows.top_k < logits.shape[1]).any())
    has_top_p = bool((rows.top_p < 1).any())
    if has_top_k or has_top_p:
        bucket = (distance * _BUCKETS_PER_NAT).clamp_max_(_BUCKETS - 1).long()
    if has_top_k:
        _keep_best(weight, logits, bucket, torch.ones_like(weight), rows.top_k.double())
    if has_top_p:
        total = _of_groups(torch.sum, weight).double().sum(1, keepdim=True)
        _keep_best(weight, logits, bucket, weight, _needed(rows.top_p, total))
    weight.masked_fill_(weight < rows.min_p, 0.0)
    return _draw_by_group(weight, rows.uniform).squeeze(1)


def _peak(maximum: Tensor) -> Tensor:
    """Return the largest logit of each row; 0 for a row of only -inf."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def _best_of_rows(
    logits: Tensor, maxima: Tensor, row: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Return the best logits of some rows and their tokens, best first: `[rows, length]` each.

    The best tokens are in the best groups: each of these has a maximum that is better than any token of another group.
    """
    vocabulary, groups = logits.shape[1], maxima.shape[1]
    group = torch.arange(groups, device=logits.device)
    best = _keys(maxima[row], group).topk(min(length, groups), dim=1, sorted=False).values
    entry = torch.arange(_GROUP_SIZE, device=logits.device)
    token = (_index_of(best)[:, :, None] * _GROUP_SIZE + entry).flatten(1)
    inside = token < vocabulary
    logit = logits[row[:, None], token.where(inside, 0)]
    keys = _keys(logit, token).masked_fill_(~inside, _NO_KEY)
    best = keys.topk(min(length, vocabulary), dim=1).values
    return _value_of(best), _index_of(best)


def _keys(x: Tensor, index: Tensor) -> Tensor:
    """Return int64 keys that order fp32 `x` without NaN, and equal ones by descending index."""
    # -0 becomes 0
    bits = (x + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFF_FFFF)
    return (ordered.long() << 32) | (_LOWER_HALF - index)


def _index_of(keys: Tensor) -> Tensor:
    return _LOWER_HALF - (keys & _LOWER_HALF)


def _value_of(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFF_FFFF)).view(torch.float32)


def _needed(top_p: Tensor, total: Tensor) -> Tensor:
    """Return the weight at which top-p stops: above 0, infinity for no limit."""
    needed = (top_p.double() * total).clamp_min_(_SMALLEST)
    return needed.masked_fill_(top_p >= 1, torch.inf)


def _keep_best(
    weight: Tensor, logit: Tensor, bucket: Tensor, measure: Tensor, needed: Tensor
) -> None:
    """Set a weight to 0 if the measures of all better tokens reach `needed`.

    Args:
        bucket: `[rows, vocabulary]` int64; a better bucket has a lower number.
        needed: `[rows, 1]` fp64.
    """
    rows = torch.arange(len(weight), device=weight.device)[:, None]
    at = (bucket + rows * _BUCKETS).flatten()
    sums = torch.bincount(at, measure.flatten().double(), minlength=len(weight) * _BUCKETS)
    sums = sums.view(-1, _BUCKETS).cumsum(1)
    # the bucket in which `needed` is reached; past the last one if it is not
    last = (sums < needed).sum(1, keepdim=True)

    row, token = (bucket == last).nonzero(as_tuple=True)
    # tokens ascend, so stable sorts put the lower token first among equal logits
    order = logit[row, token].sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]
    row, token = row[order], token[order]
    sums_before = torch.cat([sums.new_zeros(len(sums), 1), sums], dim=1).gather(1, last)
    measured = measure[row, token].double()
    before = measured.cumsum(0) - measured
    before -= before[torch.searchsorted(row, row)]
    dropped = before + sums_before[row, 0] >= needed[row, 0]
    weight.masked_fill_(bucket > last, 0.0)
    weight[row[dropped], token[dropped]] = 0.0


def _draw(weight: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index that `uniform` falls on, and its place inside: `[rows, 1]` each.

    The place is from 0 to below 1. The index is 0 if all weights are.

    Args:
        weight: `[rows, n]` fp64.
        uniform: `[rows, 1]` fp64, from 0 to below 1.
    """
    sums = weight.cumsum(1)
    target = uniform * sums[:, -1:]
    index = (sums <= target).sum(1, keepdim=True)
    index.masked_fill_(sums[:, -1:] == 0, 0)
    drawn = weight.gather(1, index)
    inside = (target - (sums.gather(1, index) - drawn)) / drawn
    return index, inside.clamp_(0.0, _BELOW_ONE)


def _draw_by_group(weight: Tensor, uniform: Tensor) -> Tensor:
    """Return the index that `uniform` falls on, `[rows, 1]`, by way of its group."""
    sums = _of_groups(torch.sum, weight).double()
    group, inside = _draw(sums, uniform)
    index = group * _GROUP_SIZE + torch.arange(_GROUP_SIZE, device=weight.device)
    is_token = index < weight.shape[1]
    in_group = weight.gather(1, index.where(is_token, 0)).double().masked_fill_(~is_token, 0.0)
    place, _ = _draw(in_group, inside)
    return index.gather(1, place)


def _of_groups(reduce: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return the maximum or the sum of each group of adjacent elements, `[rows, groups]`."""
    groups, rest = divmod(x.shape[1], _GROUP_SIZE)
    whole = reduce(x[:, : groups * _GROUP_SIZE].view(len(x), groups, _GROUP_SIZE), dim=2)
    if rest == 0:
        return whole
    return torch.cat([whole, reduce(x[:, -rest:], dim=1, keepdim=True)], dim=1)
