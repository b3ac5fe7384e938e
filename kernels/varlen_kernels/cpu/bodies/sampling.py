"""One token of each row of logits on a CPU, compiled by numba.

A row is read a few times and never sorted. The last token that a limit keeps is found digit by digit: each of four
passes adds up the tokens by one byte of their place in the order of logits, and finds the byte where the limit falls.
Source: the specification is `reference.sampling`.
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
