"""Sampling in one kernel: one token of each row, by temperature, top-k, top-p and min-p.

One program owns a row and reads it several times, mostly from the L2 cache. Top-k and top-p each end at a threshold:
tokens with a higher logit are kept, and of those with this logit the first few. A search finds the threshold among all
fp32 numbers, as sort keys. Each pass over the row divides the range by eight, so 11 passes leave one number, and the
result is exact. Nothing is sorted or written.
Source: the pivots of FlashInfer (Ye et al. 2025, arXiv:2501.01005) and Qrita (arXiv:2602.01518), here evenly spaced.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from varlen_kernels.reference.sampling import check_sampling
from varlen_kernels.triton.beam_keys import NO_INDEX, NO_KEY, key_of, value_of, without_nan
from varlen_kernels.triton.checks import check_row_layout, check_vector
from varlen_kernels.tuning import Launch, pick

_LOG2_E = tl.constexpr(math.log2(math.e))
# The key of -inf, the lowest of a token.
_LOWEST_KEY = tl.constexpr(-2139095041)
# The smallest normal number: a temperature or a weight of 0 would divide 0 by 0.
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
# Keys that a pass tests; they divide a range into one part more.
_PIVOTS = tl.constexpr(7)


@triton.jit
def _sample_tokens_kernel(
    logits_ptr,  # [rows, VOCABULARY]
    temperature_ptr,  # [rows]
    top_k_ptr,  # [rows] int32
    top_p_ptr,  # [rows]
    min_p_ptr,  # [rows]
    uniform_ptr,  # [rows] fp64
    out_ptr,  # [rows] int32
    STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sample the token of one row."""
    # int64: rows * STRIDE may pass 2**31
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * STRIDE
    out_ptr += row
    temperature = tl.load(temperature_ptr + row)
    peak_key, best = _best_token(logits_ptr, VOCABULARY, BLOCK)
    if temperature == 0.0:
        tl.store(out_ptr, best)
        return
    temperature = tl.maximum(temperature, _SMALLEST)
    peak = value_of(peak_key)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)

    # tokens above the threshold are kept, and `ties` of those that equal it
    threshold = _LOWEST_KEY
    ties = VOCABULARY
    if (top_k > 0) & (top_k < VOCABULARY):
        threshold, above = _search(
            logits_ptr,
            threshold,
            peak_key,
            top_k.to(tl.float32),
            peak,
            temperature,
            True,
            VOCABULARY,
            BLOCK,
        )
        ties = top_k - above.to(tl.int32)
    if top_p < 1.0:
        total = _total(logits_ptr, threshold, ties, 0.0, peak, temperature, VOCABULARY, BLOCK).to(
            tl.float32
        )
        needed = tl.maximum(top_p * total, _SMALLEST)
        lower = threshold
        threshold, above = _search(
            logits_ptr, threshold, peak_key, needed, peak, temperature, False, VOCABULARY, BLOCK
        )
        weight = _weight(value_of(threshold), peak, temperature)
        count = tl.ceil((needed - above) / tl.maximum(weight, _SMALLEST))
        count = tl.minimum(count, VOCABULARY * 1.0).to(tl.int32)
        ties = tl.where(threshold == lower, tl.minimum(ties, count), count)
    total = _total(logits_ptr, threshold, ties, min_p, peak, temperature, VOCABULARY, BLOCK)
    target = tl.load(uniform_ptr + row) * total
    token = _draw(logits_ptr, threshold, ties, min_p, target, peak, temperature, VOCABULARY, BLOCK)
    # no token has a weight if all logits are -inf
    tl.store(out_ptr, tl.where(token == NO_INDEX, best, token))


@triton.jit
def _load_keys(logits_ptr, at, VOCABULARY: tl.constexpr):
    """Return the sort keys of logits; NO_KEY past the vocabulary."""
    inside = at < VOCABULARY
    x = tl.load(logits_ptr + at, mask=inside, other=0.0)
    return tl.where(inside, key_of(without_nan(x)), NO_KEY)


@triton.jit
def _weight(logit, peak, temperature):
    """Return exp((logit - peak) / temperature), the probability relative to the best token."""
    return tl.exp2((logit - peak) / temperature * _LOG2_E)


@triton.jit
def _best_token(logits_ptr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key and the first token that has it."""
    best_keys = tl.full([BLOCK], NO_KEY, tl.int32)
    best_tokens = tl.full([BLOCK], NO_INDEX, tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = _load_keys(logits_ptr, at, VOCABULARY)
        best_tokens = tl.where(key > best_keys, at, best_tokens)
        best_keys = tl.maximum(key, best_keys)
    best = tl.max(best_keys, axis=0)
    return best, tl.min(tl.where(best_keys == best, best_tokens, NO_INDEX), axis=0)


@triton.jit
def _search(
    logits_ptr,
    lowest,
    highest,
    needed,
    peak,
    temperature,
    COUNTED: tl.constexpr,  # weigh tokens by 1
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the lowest key above which tokens weigh less than `needed`, and their weight."""
    # int64: a range of keys may pass 2**31
    low = lowest.to(tl.int64)
    high = highest.to(tl.int64)
    above = 0.0
    while low < high:
        step = (high - low) // (_PIVOTS + 1) + 1
        sums = tl.tuple(())
        for _ in tl.static_range(_PIVOTS):
            sums += (tl.zeros([BLOCK], tl.float32),)
        for start in range(0, VOCABULARY, BLOCK):
            key = _load_keys(logits_ptr, start + tl.arange(0, BLOCK), VOCABULARY)
            weight = 1.0 if COUNTED else _weight(value_of(key), peak, temperature)
            more = tl.tuple(())
            for i in tl.static_range(_PIVOTS):
                pivot = (low + (i + 1) * step - 1).to(tl.int32)
                more += (sums[i] + tl.where(key > pivot, weight, 0.0),)
            sums = more
        # the range from one pivot, where tokens weigh enough, to the next one, where they do not
        enough = 0
        largest = above
        for i in tl.static_range(_PIVOTS):
            total = tl.sum(sums[i], axis=0)
            enough += (total >= needed).to(tl.int32)
            largest = tl.maximum(largest, tl.where(total < needed, total, 0.0))
        above = largest
        low += enough * step
        high = tl.minimum(high, low + step - 1)
    return high.to(tl.int32), above


@triton.jit
def _kept_weight(
    logits_ptr,
    at,  # [BLOCK]
    equal_before,
    threshold,
    ties,
    min_p,
    peak,
    temperature,
    VOCABULARY: tl.constexpr,
):
    """Return weights, 0 if not kept, and the tokens so far that equal the threshold."""
    key = _load_keys(logits_ptr, at, VOCABULARY)
    weight = _weight(value_of(key), peak, temperature)
    equal = (key == threshold).to(tl.int32)
    rank = equal_before + tl.cumsum(equal, axis=0) - equal
    kept = (key > threshold) | ((equal == 1) & (rank < ties))
    return tl.where(kept & (weight >= min_p), weight, 0.0), equal_before + tl.sum(equal, axis=0)


@triton.jit
def _total(
    logits_ptr,
    threshold,
    ties,
    min_p,
    peak,
    temperature,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the sum of the kept weights, fp64."""
    total = tl.zeros([], tl.float64)
    equal = 0
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight, equal = _kept_weight(
            logits_ptr, at, equal, threshold, ties, min_p, peak, temperature, VOCABULARY
        )
        total += tl.sum(weight, axis=0).to(tl.float64)
    return total


@triton.jit
def _draw(
    logits_ptr,
    threshold,
    ties,
    min_p,
    target,
    peak,
    temperature,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first token at which the sum of weights exceeds `target`, or NO_INDEX."""
    before = tl.zeros([], tl.float64)
    equal = 0
    token = NO_INDEX
    start = 0
    while (token == NO_INDEX) & (start < VOCABULARY):
        at = start + tl.arange(0, BLOCK)
        weight, equal = _kept_weight(
            logits_ptr, at, equal, threshold, ties, min_p, peak, temperature, VOCABULARY
        )
        after = before + tl.sum(weight, axis=0).to(tl.float64)
        if after > target:
            # the sums round differently, so the last one may not exceed the target
            exceeds = tl.cumsum(weight, axis=0) > (target - before).to(tl.float32)
            last = tl.max(tl.where(weight > 0.0, at, 0), axis=0)
            token = tl.min(tl.where(exceeds & (weight > 0.0), at, last), axis=0)
        before = after
        start += BLOCK
    return token


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
    _sample_tokens_kernel[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniform,
        out,
        STRIDE=logits.stride(0),
        VOCABULARY=vocabulary,
        **pick("sample_tokens", (vocabulary,), candidate_launches),
    )
    return out


def candidate_launches(vocabulary: int) -> list[Launch]:
    """Return the candidate launches for this vocabulary; the first is the default."""
    # a search holds seven sums for each element that a thread loads at once
    shapes = [(2048, 16), (1024, 8), (2048, 8), (1024, 4)]
    largest = max(triton.next_power_of_2(vocabulary), 1024)
    return [{"BLOCK": block, "num_warps": warps} for block, warps in shapes if block <= largest]
