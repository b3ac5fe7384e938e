"""Edits of single logits, and one token of each row of logits, compiled by numba.

A row is read a few times and never sorted. The last token that a limit keeps is found digit by digit: each of four
passes adds up the tokens by one byte of their place in the order of logits, and finds the byte where the limit falls.
"""

import math
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import types

from varlen_kernels.cpu.native.native import (
    aligned,
    fp64_vector,
    free_memory,
    inlined,
    inlined_body,
    int64_vector,
    new_memory,
    uint32_vector,
)
from varlen_kernels.functions import NO_TOKEN
from varlen_kernels.reference.logit_edits import KEPT, NO_BIAS, NO_SLOT, UNSEEN

_LOWEST, _NO_BIAS = np.float32(-np.inf), np.float32(NO_BIAS)


@inlined
def _edited(logit, count, bias, penalties):
    """Return a logit with its bias and its penalties."""
    biased = logit + bias
    if count == UNSEEN:
        return biased
    penalized = biased / penalties[0] if biased > 0 else biased * penalties[0]
    penalized -= penalties[2] * np.float32(count)
    return penalized - penalties[1] * np.float32(count > 0)


@inlined_body
def edit_logits(
    first,
    last,
    token_ids,  # [tokens]
    logit_rows,  # [logit rows]
    rows,  # [edited rows, EDIT_COLUMNS]
    penalties,  # [edited rows, 3]
    begun_tokens,  # [entries of the host], and so on
    begun_counts,
    begun_biases,
    logits,  # [logit rows, vocabulary]
    tokens,  # [slots, entries], and so on
    counts,
    biases,
    sizes,  # [slots]
):
    """Edit the logits of some sequences."""
    for edited in range(first, last):
        row, slot, num_banned = rows[edited, 0], rows[edited, 1], rows[edited, 3]
        begin, end, own = rows[edited, 4], rows[edited, 5], penalties[edited]
        added = token_ids[logit_rows[row]] if rows[edited, 2] else np.int32(NO_TOKEN)
        size = sizes[slot] if end == KEPT else end - begin
        is_listed = False
        for entry in range(size):
            if end == KEPT:
                token, count, bias = (
                    tokens[slot, entry],
                    counts[slot, entry],
                    biases[slot, entry],
                )
            else:
                at = begin + entry
                token, count, bias = begun_tokens[at], begun_counts[at], begun_biases[at]
            if token == added:
                count, is_listed = np.int32(max(count, 0) + 1), True
            if slot != NO_SLOT:
                tokens[slot, entry], counts[slot, entry] = token, count
                biases[slot, entry] = bias
            is_banned = entry < num_banned
            logits[row, token] = (
                _LOWEST if is_banned else _edited(logits[row, token], count, bias, own)
            )
        if added != NO_TOKEN and not is_listed:
            if slot != NO_SLOT:
                tokens[slot, size], counts[slot, size], biases[slot, size] = added, 1, _NO_BIAS
            logits[row, added] = _edited(logits[row, added], np.int32(1), _NO_BIAS, own)
            size += 1
        if slot != NO_SLOT:
            sizes[slot] = size
    return 0


_LARGEST = np.float32(np.finfo(np.float32).max)
_TOP_BIT = np.uint32(1 << 31)


@inlined
def _order(logits, bits_of, keys):
    """Write integers in the order of the logits; return the first place of the largest."""
    largest = np.uint32(0)
    for i in range(len(logits)):
        bits = bits_of[i]
        # negative numbers are ordered backwards; 0 and -0 are equal; NaN is the lowest
        key = ~bits if bits & _TOP_BIT else bits | _TOP_BIT
        key = _TOP_BIT if logits[i] == 0 else key
        keys[i] = np.uint32(0) if math.isnan(logits[i]) else key
        largest = max(largest, keys[i])
    best = 0
    while keys[best] < largest:
        best += 1
    return best


# A number that is added to this one is rounded to a whole one, in the lowest bits.
_ROUNDS = 1.5 * 2.0**52
# ln 2 as two numbers; products of the first are exact.
_LN2 = 0.6931471803691238, 1.9082149292705877e-10
# 1 / n!, for a power to an ulp
_FACTORS = tuple(1 / math.factorial(n) for n in range(13, 0, -1))


@numba.extending.intrinsic
def _power_of_two(_context, _rounded):
    """Return 2 ** k of k + _ROUNDS."""

    def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        size = ir.IntType(64)
        exponent = builder.add(builder.bitcast(values[0], size), size(1023))
        return builder.bitcast(builder.shl(exponent, size(52)), ir.DoubleType())

    return types.float64(types.float64), generate


@inlined
def _weigh(logits, best, temperature, weights):
    """Write exp((logit - best) / temperature); 0 for NaN, and +inf counts as the largest number.

    The loop has no call, so several tokens are taken at a time.
    """
    for i in range(len(logits)):
        x = (np.float64(min(logits[i], _LARGEST)) - best) / temperature
        rounded = x * math.log2(math.e) + _ROUNDS
        whole = rounded - _ROUNDS
        rest = x - whole * _LN2[0] - whole * _LN2[1]
        power = 0.0
        for factor in numba.literal_unroll(_FACTORS):
            power = (power + factor) * rest
        weight = (power + 1.0) * _power_of_two(rounded)
        # smaller ones are subnormal
        weights[i] = weight if x > -708.0 else 0.0


@inlined
def _total(weights):
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
    return total


@inlined
def _last_kept(keys, weights, sizes, counts, limit, by_number):
    """Return the key of the last token that is kept, and its limit.

    Args:
        sizes, counts: [256], overwritten.
        limit: number of tokens to keep, if `by_number`; else a token is kept if all better ones together weigh less.
    """
    prefix = np.uint32(0)
    for shift in (24, 16, 8, 0):
        for digit in range(256):
            sizes[digit], counts[digit] = 0.0, 0
        for i in range(len(keys)):
            # the digits before this one equal the prefix; two shifts, since 32 at once are too many
            if keys[i] >> shift >> 8 == prefix >> shift >> 8:
                digit = (keys[i] >> shift) & 255
                counts[digit] += 1
                sizes[digit] += 1.0 if by_number else weights[i]
        last = 0
        for digit in range(255, -1, -1):
            if counts[digit]:
                last = digit
                if sizes[digit] >= limit:
                    break
                limit -= sizes[digit]
        else:
            # rounding: the sum is below the limit, so all are kept
            limit += sizes[last]
        prefix = np.uint32(prefix | np.uint32(last << shift))
    return prefix, limit


@inlined
def _keep_best(keys, weights, sizes, counts, limit, by_number):
    """Set the weights past a limit to 0; see `_last_kept`."""
    prefix, limit = _last_kept(keys, weights, sizes, counts, limit, by_number)
    # of equal tokens, those with the lower ids are better; the first is always kept
    kept = False
    for i in range(len(keys)):
        if keys[i] < prefix:
            weights[i] = 0.0
        elif keys[i] == prefix:
            if limit <= 0.0 and kept:
                weights[i] = 0.0
            else:
                limit -= 1.0 if by_number else weights[i]
            kept = True


@inlined_body
def sample(
    first,
    last,
    logits,  # [rows, vocabulary]
    bits,  # the same memory
    temperature,  # [rows], as are the others
    top_k,
    top_p,
    min_p,
    uniform,
    out,
):
    """Write the tokens of some rows; return whether memory ran out."""
    size = logits.shape[1]
    key_bytes, weight_bytes = aligned(4 * size), aligned(8 * size)
    memory = new_memory(key_bytes + weight_bytes + 2 * 8 * 256)
    if memory == 0:
        return 1
    keys, weights = uint32_vector(memory, size), fp64_vector(memory + key_bytes, size)
    place = memory + key_bytes + weight_bytes
    sizes, counts = fp64_vector(place, 256), int64_vector(place + 8 * 256, 256)
    for row in range(first, last):
        best = _order(logits[row], bits[row], keys)
        highest = np.float64(min(logits[row, best], _LARGEST))
        out[row] = best
        if temperature[row] == 0.0 or not highest > -np.inf:
            continue
        _weigh(logits[row], highest, np.float64(temperature[row]), weights)
        if 0 < top_k[row] < size:
            _keep_best(keys, weights, sizes, counts, np.float64(top_k[row]), True)
        if top_p[row] < 1.0:
            _keep_best(
                keys, weights, sizes, counts, np.float64(top_p[row]) * _total(weights), False
            )
        for i in range(size):
            if weights[i] < min_p[row]:
                weights[i] = 0.0
        target, done = uniform[row] * _total(weights), 0.0
        for i in range(size):
            done += weights[i]
            if weights[i] > 0.0:
                # the last one, if rounding leaves the sum below the target
                out[row] = i
                if done > target:
                    break
    free_memory(memory)
    return 0
