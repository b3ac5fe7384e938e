"""One token of each row of logits on a CPU, compiled by numba.

A row is read a few times and never sorted. The last token that a limit keeps is found digit by digit: each of four
passes adds up the tokens by one byte of their place in the order of logits, and finds the byte where the limit falls.
Source: the specification is `reference.sampling`.
"""

import math

import numpy as np
import torch
from torch import Tensor

from varlen_kernels.cpu.stored_code import stored
from varlen_kernels.cpu.threads import run_parts, usable_cores

# Logits below which a second thread costs more than it saves.
_LEAST_SHARED_WORK = 1 << 15
_LARGEST = np.float32(np.finfo(np.float32).max)
_TOP_BIT = np.uint32(1 << 31)


@stored()
def _order(logits, keys):
    """Write integers in the order of the logits; return the first place of the largest."""
    best = 0
    for i in range(len(logits)):
        bits = logits[i : i + 1].view(np.uint32)[0]
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


@stored()
def _weigh(logits, best, temperature, weights):
    """Write exp((logit - best) / temperature); 0 for NaN, and +inf counts as the largest number."""
    for i in range(len(logits)):
        x = (np.float64(min(logits[i], _LARGEST)) - best) / temperature
        # below this the weight is 0; so is the weight of NaN
        weights[i] = math.exp(x) if x > -745.0 else 0.0


@stored()
def _keep_best(keys, weights, sizes, limit, by_number):
    """Set the weights past a limit to 0.

    Args:
        sizes: [256], overwritten.
        limit: number of tokens to keep, if `by_number`; else a token is kept if all better ones together weigh less.
    """
    prefix = np.uint32(0)
    for shift in (24, 16, 8, 0):
        sizes[:] = 0.0
        counts = np.zeros(256, np.int64)
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


@stored()
def _sample_rows(first, last, logits, temperature, top_k, top_p, min_p, uniform, out):
    size = logits.shape[1]
    keys, weights = np.empty(size, np.uint32), np.empty(size, np.float64)
    sizes = np.empty(256, np.float64)
    for row in range(first, last):
        best = _order(logits[row], keys)
        highest = np.float64(min(logits[row, best], _LARGEST))
        out[row] = best
        if temperature[row] == 0.0 or not highest > -np.inf:
            continue
        _weigh(logits[row], highest, np.float64(temperature[row]), weights)
        if 0 < top_k[row] < size:
            _keep_best(keys, weights, sizes, np.float64(top_k[row]), True)
        if top_p[row] < 1.0:
            _keep_best(keys, weights, sizes, np.float64(top_p[row]) * weights.sum(), False)
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


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Return a token of each row, `[rows]` int32, see `reference.sample_tokens`."""
    rows, size = logits.shape
    out = torch.zeros(rows, dtype=torch.int32)
    parts = min(rows, usable_cores()) if rows * size >= _LEAST_SHARED_WORK else 1
    bounds = [rows * part // parts for part in range(parts + 1)] if rows else [0, 0]
    arrays = (logits, temperature, top_k, top_p, min_p, uniform, out)
    run_parts(_sample_rows, bounds, *(array.numpy() for array in arrays))
    return out
