"""Edits of single logits, and one token of each row of logits, compiled by numba.

A row is read a few times and never sorted. The last token that a limit keeps is found digit by digit: each of four
passes adds up the tokens by one byte of their place in the order of logits, and finds the byte where the limit falls.
"""

import math

import numpy as np

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
    """Write integers in the order of the logits; return the first place of the largest.

    Args:
        bits_of: the same memory as `logits`.
    """
    best = 0
    for i in range(len(logits)):
        bits = bits_of[i]
        # negative numbers are ordered backwards; 0 and -0 are equal; NaN is the lowest
        if math.isnan(logits[i]):
            keys[i] = 0
        elif logits[i] == 0:
            keys[i] = _TOP_BIT
        elif bits & _TOP_BIT:
            keys[i] = ~bits
        else:
            keys[i] = bits | _TOP_BIT
        if keys[i] > keys[best]:
            best = i
    return best


@inlined
def _weigh(logits, best, temperature, weights):
    """Write exp((logit - best) / temperature); 0 for NaN, and +inf counts as the largest number."""
    for i in range(len(logits)):
        x = (np.float64(min(logits[i], _LARGEST)) - best) / temperature
        # below this the weight is 0; so is the weight of NaN
        weights[i] = math.exp(x) if x > -745.0 else 0.0


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
        total = 0.0
        for i in range(size):
            if weights[i] < min_p[row]:
                weights[i] = 0.0
            total += weights[i]
        target, done = uniform[row] * total, 0.0
        for i in range(size):
            done += weights[i]
            if weights[i] > 0.0:
                # the last one, if rounding leaves the sum below the target
                out[row] = i
                if done > target:
                    break
    free_memory(memory)
    return 0
