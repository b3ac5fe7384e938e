"""Sampling by temperature, top-k, top-p and min-p, in at most four passes over a row.

Several programs own a row, each one part of it; a kernel is one pass.

1. The best token of each part. Weights are exp((logit - best) / temperature), whole numbers of units of 2**-40: sums of
   them are exact in any order.
2. The weight of each part, and a histogram by the distance to the best token: 8 buckets a nat, over 32 nats. The last
   program of a row finds where the limits end: top-k in one bucket, by its count; top-p in a few, since the counts of
   buckets bound the weight behind them.
3. A list of the tokens in these buckets, and the sums of the weights outside of them. The last program finds the last
   kept token in the list, by its order: a higher logit, or the same logit and a lower token.
4. The part in which the random number falls finds its token.

Rows without limits need no histogram, and greedy rows only the first pass. If the list has no room for its tokens,
such as many equal ones, the search reads the row instead.
Source: radix selection as in Zhang et al. 2023, "Parallel Top-K Algorithms on GPU" (AIR top-k); the pivots of
FlashInfer (Ye et al. 2025, arXiv:2501.01005), here evenly spaced.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.sampling import check_sampling
from varlen_kernels.triton.beam_keys import NO_INDEX, NO_KEY, key_of, value_of, without_nan
from varlen_kernels.triton.checks import check_row_layout, check_vector
from varlen_kernels.triton.dependent_launch import dependent_launch, wait_for_kernels
from varlen_kernels.tuning import Launch, pick

_LOG2_E = tl.constexpr(math.log2(math.e))
# Orders below and above the orders of all tokens.
_LOWEST = tl.constexpr(-(2**63))
_HIGHEST = tl.constexpr(2**63 - 1)
# The smallest normal number: a temperature of 0 would divide 0 by 0.
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
# The weight of the best token.
_UNIT = tl.constexpr(2.0**40)
# Buckets of distances. The tokens of the last one have no weight: half a unit is exp(-28.4).
_BUCKETS = tl.constexpr(256)
_PER_NAT = tl.constexpr(8.0)
# Bounds of sums are wider by this part, for rounded distances and weights.
_SLACK = tl.constexpr(1e-3)
# Parts into which a step of a search divides a range of orders.
_RANGES = tl.constexpr(8)
_LONGEST_LIST = 1 << 14
# Tokens that a search reads at once; most lists have fewer.
_LIST_BLOCK = 2048

# State of a row, int64: programs that have ended the second and the third pass, tokens of the list, bucket of top-k,
# tokens that it keeps there, first and last bucket of top-p, and the order of the last kept token.
_STATE = tl.constexpr(8)
_COUNTED = tl.constexpr(0)
_COLLECTED = tl.constexpr(1)
_LISTED = tl.constexpr(2)
_BUCKET_OF_K = tl.constexpr(3)
_KEPT_OF_K = tl.constexpr(4)
_FIRST_OF_P = tl.constexpr(5)
_LAST_OF_P = tl.constexpr(6)
_LAST_KEPT = tl.constexpr(7)
# Sums of a part: weights above all buckets of limits that min-p keeps, the same without min-p, and weights between the
# buckets of top-p and of top-k. The second pass stores all weights in the second one.
_SUMS = tl.constexpr(3)


@triton.jit
def _best_of_parts_kernel(
    logits_ptr,  # [rows, VOCABULARY]
    best_ptr,  # [rows, PARTS] int64
    state_ptr,  # [rows, _STATE] int64
    STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    # int64: rows * STRIDE may pass 2**31
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    order = _load_orders(logits_ptr + row * STRIDE, part * BLOCK + tl.arange(0, BLOCK), VOCABULARY)
    tl.store(best_ptr + row * PARTS + part, tl.max(order, axis=0))
    if part == 0:
        at = tl.arange(0, _STATE)
        # without limits
        state = tl.where(at < _BUCKET_OF_K, 0, _BUCKETS).to(tl.int64)
        tl.store(state_ptr + row * _STATE + at, tl.where(at == _LAST_KEPT, _LOWEST, state))


@triton.jit
def _count_parts_kernel(
    logits_ptr,  # [rows, VOCABULARY]
    temperature_ptr,  # [rows]
    top_k_ptr,  # [rows] int32
    top_p_ptr,  # [rows]
    best_ptr,  # [rows, PARTS] int64
    counts_ptr,  # [rows, PARTS, _BUCKETS] int32
    sums_ptr,  # [rows, PARTS, _SUMS] int64
    state_ptr,  # [rows, _STATE] int64
    STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # power of two >= PARTS
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < VOCABULARY)
    if (temperature == 0.0) | ((not has_top_k) & (top_p >= 1.0)):
        return
    peak, _ = _best_token(best_ptr + row * PARTS, PARTS, BLOCK_PARTS)
    order = _load_orders(logits_ptr + row * STRIDE, part * BLOCK + tl.arange(0, BLOCK), VOCABULARY)
    bucket, weight = _measure(order, peak, temperature)
    sums_ptr += row * (PARTS * _SUMS) + 1
    tl.store(sums_ptr + part * _SUMS, tl.sum(weight, axis=0))
    counts = tl.histogram(bucket, _BUCKETS, mask=bucket < _BUCKETS - 1)
    counts_ptr += row * (PARTS * _BUCKETS) + tl.arange(0, _BUCKETS)
    tl.store(counts_ptr + part * _BUCKETS, counts)
    state_ptr += row * _STATE
    # the stores of all threads come before the arrival, see `attention_paged`
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + _COUNTED, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        total = tl.zeros([_BUCKETS], tl.int32)
        for other in tl.static_range(PARTS):
            total += tl.load(counts_ptr + other * _BUCKETS, cache_modifier=".cg")
        other = tl.arange(0, BLOCK_PARTS)
        weights = tl.load(
            sums_ptr + other * _SUMS, mask=other < PARTS, other=0, cache_modifier=".cg"
        )
        weight_of_row = tl.sum(weights, axis=0).to(tl.float32) / _UNIT
        _find_buckets(state_ptr, total, weight_of_row, has_top_k, top_k, top_p)


@triton.jit
def _find_buckets(
    state_ptr,  # [_STATE] int64
    counts,  # [_BUCKETS]
    weight,  # of all tokens
    has_top_k,
    top_k,
    top_p,
):
    """Write the bucket where top-k ends, and those where top-p may end."""
    bucket = tl.arange(0, _BUCKETS)
    sums = tl.cumsum(counts, axis=0)
    kept = counts
    # the tokens of the last bucket have no weight, so whether top-k keeps them does not matter
    if has_top_k & (top_k <= tl.max(sums, axis=0)):
        last = tl.min(tl.where(sums >= top_k, bucket, _BUCKETS), axis=0)
        kept_of_last = top_k - tl.sum(tl.where(bucket < last, counts, 0), axis=0)
        tl.store(state_ptr + _BUCKET_OF_K, last)
        tl.store(state_ptr + _KEPT_OF_K, kept_of_last)
        kept = tl.where(bucket < last, counts, tl.where(bucket == last, kept_of_last, 0))
    if top_p < 1.0:
        # a token weighs at most as much as the near end of its bucket, and more than the far end
        near = tl.exp2(bucket.to(tl.float32) * (-_LOG2_E / _PER_NAT))
        most = 1.0 + _SLACK
        least = (1.0 - _SLACK) * tl.exp2(-_LOG2_E / _PER_NAT)
        dropped = tl.sum((counts - kept).to(tl.float32) * near, axis=0)
        # the weight from a bucket on, of tokens that top-k keeps
        tails = tl.cumsum(kept.to(tl.float32) * near, axis=0, reverse=True)
        all_kept = tl.max(tails, axis=0)
        at_least = tl.maximum(weight - most * dropped, least * all_kept)
        at_most = tl.minimum(weight - least * dropped, most * all_kept)
        # top-p drops at most 1 - top_p of it
        first = tl.sum((least * tails > (1.0 - top_p) * at_most).to(tl.int32), axis=0) - 1
        last = tl.sum((most * tails > (1.0 - top_p) * at_least).to(tl.int32), axis=0) - 1
        first = tl.maximum(first, 0)
        tl.store(state_ptr + _FIRST_OF_P, first)
        tl.store(state_ptr + _LAST_OF_P, tl.maximum(first, last))


@triton.jit
def _collect_parts_kernel(
    logits_ptr,  # [rows, VOCABULARY]
    temperature_ptr,  # [rows]
    top_p_ptr,  # [rows]
    min_p_ptr,  # [rows]
    best_ptr,  # [rows, PARTS] int64
    list_ptr,  # [rows, LIST] int32
    sums_ptr,  # [rows, PARTS, _SUMS] int64
    state_ptr,  # [rows, _STATE] int64
    STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # power of two >= PARTS
    LIST: tl.constexpr,
    LIST_BLOCK: tl.constexpr,  # tokens of the list that are read at once
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        return
    logits_ptr += row * STRIDE
    list_ptr += row * LIST
    sums_ptr += row * (PARTS * _SUMS)
    state_ptr += row * _STATE
    token = part * BLOCK + tl.arange(0, BLOCK)
    peak, _ = _best_token(best_ptr + row * PARTS, PARTS, BLOCK_PARTS)
    bucket, weight = _measure(_load_orders(logits_ptr, token, VOCABULARY), peak, temperature)
    buckets = _load_buckets(state_ptr)
    bucket_of_k, first_of_p, last_of_p = buckets
    weight_above = tl.where(bucket < tl.minimum(first_of_p, bucket_of_k), weight, 0)
    drawn = tl.where(weight >= _min_weight(tl.load(min_p_ptr + row)), weight_above, 0)
    tl.store(sums_ptr + part * _SUMS, tl.sum(drawn, axis=0))
    if (bucket_of_k == _BUCKETS) & (first_of_p == _BUCKETS):
        # no limit
        return
    weight_between = tl.where((bucket > last_of_p) & (bucket < bucket_of_k), weight, 0)
    tl.store(sums_ptr + part * _SUMS + 1, tl.sum(weight_above, axis=0))
    tl.store(sums_ptr + part * _SUMS + 2, tl.sum(weight_between, axis=0))
    listed = _is_listed(bucket, buckets).to(tl.int32)
    count = tl.sum(listed, axis=0)
    if count > 0:
        begin = tl.atomic_add(state_ptr + _LISTED, count, sem="relaxed", scope="gpu")
        place = begin + tl.cumsum(listed, axis=0) - 1
        tl.store(list_ptr + place, token, mask=(listed > 0) & (place < LIST))
    # as above
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + _COLLECTED, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        other = tl.arange(0, BLOCK_PARTS)
        sums_at = sums_ptr + other * _SUMS
        above = tl.load(sums_at + 1, mask=other < PARTS, other=0, cache_modifier=".cg")
        between = tl.load(sums_at + 2, mask=other < PARTS, other=0, cache_modifier=".cg")
        _find_last_kept(
            logits_ptr,
            list_ptr,
            state_ptr,
            tl.sum(above, axis=0),
            tl.sum(between, axis=0),
            tl.load(top_p_ptr + row),
            peak,
            temperature,
            VOCABULARY,
            LIST,
            LIST_BLOCK,
        )


@triton.jit
def _find_last_kept(
    logits_ptr,  # [VOCABULARY]
    list_ptr,  # [LIST] int32
    state_ptr,  # [_STATE] int64
    above,  # weight above the buckets of the limits
    between,  # weight between the buckets of top-p and of top-k
    top_p,
    peak,
    temperature,
    VOCABULARY: tl.constexpr,
    LIST: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    buckets = _load_buckets(state_ptr)
    length, listed = _length(state_ptr, VOCABULARY, LIST)
    last_kept = tl.full([], _LOWEST, tl.int64)
    if buckets[0] < _BUCKETS:
        last_kept = _search(
            logits_ptr,
            list_ptr,
            buckets,
            buckets[0],
            buckets[0],
            last_kept,
            tl.load(state_ptr + _KEPT_OF_K),
            length,
            listed,
            peak,
            temperature,
            True,
            VOCABULARY,
            LIST_BLOCK,
        )
    if top_p < 1.0:
        total = above + between
        for start in range(0, length, LIST_BLOCK):
            _token, order = _load_listed(
                logits_ptr, list_ptr, start, listed, VOCABULARY, LIST_BLOCK
            )
            weight = _kept_weight(order, buckets, last_kept, peak, temperature)
            total += tl.sum(weight, axis=0)
        needed = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        last_kept = _search(
            logits_ptr,
            list_ptr,
            buckets,
            buckets[1],
            buckets[2],
            last_kept,
            tl.minimum(tl.maximum(needed, 1), total) - above,
            length,
            listed,
            peak,
            temperature,
            False,
            VOCABULARY,
            LIST_BLOCK,
        )
    tl.store(state_ptr + _LAST_KEPT, last_kept)


@triton.jit
def _search(
    logits_ptr,  # [VOCABULARY]
    list_ptr,  # [LIST] int32
    buckets,
    first_bucket,
    last_bucket,
    last_kept,
    needed,
    length,
    listed,
    peak,
    temperature,
    COUNTED: tl.constexpr,  # weigh tokens by 1
    VOCABULARY: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """Return the order of the token at which a sum of weights reaches `needed`."""
    low = tl.full([], _LOWEST, tl.int64)
    high = tl.full([], _HIGHEST, tl.int64)
    is_wide = low < high
    while is_wide:
        # shrink the range to its tokens
        lowest = tl.full([], _HIGHEST, tl.int64)
        highest = tl.full([], _LOWEST, tl.int64)
        for start in range(0, length, LIST_BLOCK):
            _token, order = _load_listed(
                logits_ptr, list_ptr, start, listed, VOCABULARY, LIST_BLOCK
            )
            bucket, weight = _measure(order, peak, temperature)
            inside = (bucket >= first_bucket) & (bucket <= last_bucket) & (order >= last_kept)
            inside = inside & _is_listed(bucket, buckets) & (order >= low) & (order <= high)
            lowest = tl.minimum(lowest, tl.min(tl.where(inside, order, _HIGHEST), axis=0))
            highest = tl.maximum(highest, tl.max(tl.where(inside, order, _LOWEST), axis=0))
        low, high = lowest, highest
        is_wide = low < high
        if is_wide:
            # high - low may pass 2**63
            step = (high >> 3) - (low >> 3) + 1
            sums = tl.tuple(())
            for _ in tl.static_range(_RANGES - 1):
                sums += (tl.zeros([], tl.int64),)
            for start in range(0, length, LIST_BLOCK):
                _token, order = _load_listed(
                    logits_ptr, list_ptr, start, listed, VOCABULARY, LIST_BLOCK
                )
                bucket, weight = _measure(order, peak, temperature)
                if COUNTED:
                    weight = tl.full([LIST_BLOCK], 1, tl.int64)
                inside = (bucket >= first_bucket) & (bucket <= last_bucket) & (order >= last_kept)
                weight = tl.where(inside & _is_listed(bucket, buckets), weight, 0)
                more = tl.tuple(())
                for i in tl.static_range(_RANGES - 1):
                    from_pivot = tl.where(order >= low + (i + 1) * step, weight, 0)
                    more += (sums[i] + tl.sum(from_pivot, axis=0),)
                sums = more
            # pivots from which on tokens weigh enough
            enough = 0
            for i in tl.static_range(_RANGES - 1):
                enough += (sums[i] >= needed).to(tl.int32)
            low += enough * step
            high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def _draw_kernel(
    logits_ptr,  # [rows, VOCABULARY]
    temperature_ptr,  # [rows]
    min_p_ptr,  # [rows]
    uniform_ptr,  # [rows] fp64
    best_ptr,  # [rows, PARTS] int64
    list_ptr,  # [rows, LIST] int32
    sums_ptr,  # [rows, PARTS, _SUMS] int64
    state_ptr,  # [rows, _STATE] int64
    out_ptr,  # [rows] int32
    STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # power of two >= PARTS
    LIST: tl.constexpr,
    LIST_BLOCK: tl.constexpr,  # tokens of the list that are read at once
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_kernels(DEPENDENT)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    peak, best = _best_token(best_ptr + row * PARTS, PARTS, BLOCK_PARTS)
    temperature = tl.load(temperature_ptr + row)
    out_ptr += row
    if temperature == 0.0:
        if part == 0:
            tl.store(out_ptr, best)
        return
    logits_ptr += row * STRIDE
    state_ptr += row * _STATE
    min_weight = _min_weight(tl.load(min_p_ptr + row))
    other = tl.arange(0, BLOCK_PARTS)
    sums = tl.load(sums_ptr + (row * PARTS + other) * _SUMS, mask=other < PARTS, other=0)
    total = tl.sum(sums, axis=0)
    before = tl.sum(tl.where(other < part, sums, 0), axis=0)
    here = tl.sum(tl.where(other == part, sums, 0), axis=0)
    buckets = _load_buckets(state_ptr)
    last_kept = tl.load(state_ptr + _LAST_KEPT)
    length, listed = _length(state_ptr, VOCABULARY, LIST)
    for start in range(0, length, LIST_BLOCK):
        token, order = _load_listed(
            logits_ptr, list_ptr + row * LIST, start, listed, VOCABULARY, LIST_BLOCK
        )
        weight = _kept_weight(order, buckets, last_kept, peak, temperature)
        weight = tl.where(weight >= min_weight, weight, 0)
        total += tl.sum(weight, axis=0)
        before += tl.sum(tl.where(token // BLOCK < part, weight, 0), axis=0)
        here += tl.sum(tl.where(token // BLOCK == part, weight, 0), axis=0)

    if total == 0:
        # all logits are -inf
        if part == 0:
            tl.store(out_ptr, best)
        return
    target = (tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1) - before
    if (target >= 0) & (target < here):
        token = part * BLOCK + tl.arange(0, BLOCK)
        order = _load_orders(logits_ptr, token, VOCABULARY)
        _, weight = _measure(order, peak, temperature)
        kept = (order >= last_kept) & (weight >= min_weight)
        sums_to = tl.cumsum(tl.where(kept, weight, 0), axis=0)
        tl.store(out_ptr, tl.min(tl.where(sums_to > target, token, NO_INDEX), axis=0))


@triton.jit
def _load_orders(logits_ptr, token, VOCABULARY: tl.constexpr):
    """Return the orders of tokens: better tokens have greater numbers.

    A better token has a higher logit, or the same logit and a lower id. Past the vocabulary an order has NO_KEY.
    """
    inside = token < VOCABULARY
    x = tl.load(logits_ptr + token, mask=inside, other=0.0)
    key = tl.where(inside, key_of(without_nan(x)), NO_KEY)
    return (key.to(tl.int64) << 32) + (NO_INDEX - token)


@triton.jit
def _best_token(best_ptr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """Return the largest logit of a row and its first token; 0 for only -inf."""
    part = tl.arange(0, BLOCK_PARTS)
    best = tl.load(best_ptr + part, mask=part < PARTS, other=_LOWEST)
    best = tl.max(best, axis=0)
    peak = value_of((best >> 32).to(tl.int32))
    token = NO_INDEX - (best & 0xFFFFFFFF).to(tl.int32)
    return tl.where(peak > float("-inf"), peak, 0.0), token


@triton.jit
def _measure(order, peak, temperature):
    """Return the buckets of tokens, and their weights in int64; the last bucket for NO_KEY."""
    logit = value_of((order >> 32).to(tl.int32))
    distance = (peak - logit) / tl.maximum(temperature, _SMALLEST)
    bucket = tl.minimum(distance * _PER_NAT, _BUCKETS - 1.0).to(tl.int32)
    return bucket, (tl.exp2(distance * -_LOG2_E) * _UNIT + 0.5).to(tl.int64)


@triton.jit
def _min_weight(min_p):
    """Return the least weight of drawn tokens, at least 1."""
    return tl.maximum(tl.ceil(min_p.to(tl.float64) * _UNIT), 1.0).to(tl.int64)


@triton.jit
def _load_buckets(state_ptr):
    """Return the bucket of top-k, and the first and last one of top-p.

    They are _BUCKETS without a limit.
    """
    bucket_of_k = tl.load(state_ptr + _BUCKET_OF_K).to(tl.int32)
    first_of_p = tl.load(state_ptr + _FIRST_OF_P).to(tl.int32)
    return bucket_of_k, first_of_p, tl.load(state_ptr + _LAST_OF_P).to(tl.int32)


@triton.jit
def _is_listed(bucket, buckets):
    bucket_of_k, first_of_p, last_of_p = buckets
    in_p = (bucket >= first_of_p) & (bucket <= last_of_p) & (bucket < bucket_of_k)
    return (bucket == bucket_of_k) | (in_p & (bucket < _BUCKETS - 1))


@triton.jit
def _length(state_ptr, VOCABULARY: tl.constexpr, LIST: tl.constexpr):
    """Return the numbers of tokens to search and to read from the list.

    The second one is 0 if the list has no room for all.
    """
    listed = tl.load(state_ptr + _LISTED, cache_modifier=".cg").to(tl.int32)
    has_room = listed <= LIST
    return tl.where(has_room, listed, VOCABULARY), tl.where(has_room, listed, 0)


@triton.jit
def _load_listed(
    logits_ptr,
    list_ptr,
    start,
    listed,
    VOCABULARY: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """Return tokens and orders of the list; of the row if `listed` is 0."""
    at = start + tl.arange(0, LIST_BLOCK)
    token = tl.load(list_ptr + at, mask=at < listed, other=VOCABULARY, cache_modifier=".cg")
    token = tl.where(listed == 0, at, token)
    return token, _load_orders(logits_ptr, token, VOCABULARY)


@triton.jit
def _kept_weight(order, buckets, last_kept, peak, temperature):
    """Return the weights of listed tokens, 0 after the last kept one."""
    bucket, weight = _measure(order, peak, temperature)
    return tl.where(_is_listed(bucket, buckets) & (order >= last_kept), weight, 0)


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
    """Return one token of each row, drawn by its probabilities, see `reference.sample_tokens`.

    Raises:
        ValueError: as `reference.sample_tokens`; or rows of logits, or another tensor, are not contiguous.
    """
    check_sampling(logits, temperature, top_k, top_p, min_p, uniform, out)
    rows, vocabulary = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    check_row_layout(logits=logits)
    check_vector(
        rows,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        uniform=uniform,
        out=out,
    )
    if rows == 0:
        return out
    launch = pick("sample_tokens", (vocabulary,), candidate_launches)
    parts = triton.cdiv(vocabulary, launch["BLOCK"])
    longest = min(vocabulary, _LONGEST_LIST)

    def scratch(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows * columns, dtype=dtype, device=logits.device)

    best, state = scratch(parts, torch.int64), scratch(_STATE.value, torch.int64)
    sums, listed = scratch(parts * _SUMS.value, torch.int64), scratch(longest, torch.int32)
    counts = scratch(parts * _BUCKETS.value, torch.int32)
    settings = {
        "STRIDE": logits.stride(0),
        "VOCABULARY": vocabulary,
        "PARTS": parts,
        **launch,
        **dependent_launch(),
    }
    grid = (rows * parts,)
    _best_of_parts_kernel[grid](logits, best, state, **settings)
    settings["BLOCK_PARTS"] = triton.next_power_of_2(parts)
    _count_parts_kernel[grid](
        logits, temperature, top_k, top_p, best, counts, sums, state, **settings
    )
    settings |= {"LIST": longest, "LIST_BLOCK": min(launch["BLOCK"], _LIST_BLOCK)}
    _collect_parts_kernel[grid](
        logits, temperature, top_p, min_p, best, listed, sums, state, **settings
    )
    _draw_kernel[grid](
        logits, temperature, min_p, uniform, best, listed, sums, state, out, **settings
    )
    return out


def candidate_launches(vocabulary: int) -> list[Launch]:
    """Return the candidate launches for this vocabulary; the first is the default."""
    shapes = [(8192, 16), (4096, 8), (4096, 16), (8192, 8)]
    largest = max(triton.next_power_of_2(vocabulary), 4096)
    return [{"BLOCK": block, "num_warps": warps} for block, warps in shapes if block <= largest]
