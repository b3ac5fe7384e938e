"""The best way to cut sequences into consecutive batches: dynamic programming over measured cost.

It minimizes the sum over batches of

    seconds(batch) * (requests that wait when it starts + pressure)

for batches that run one after the other. With a pressure of infinity that is the least total time, the objective of
TurboTransformers (Fang et al. 2020, arXiv:2010.05680); with none it is the least total waiting. In between, the
pressure is the number of future requests that a second of work delays.

For sequences sorted by length, consecutive batches reach the least total time, if longer sequences never make a
batch cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from varlen.costs.batch_shape import BatchLimits, FloatArray
from varlen.costs.model import CostModel


def partition(
    lengths: Sequence[int],
    costs: CostModel,
    limits: BatchLimits,
    *,
    pressure: float,
    ends: Sequence[int] | None = None,
) -> tuple[list[int], list[float]]:
    """Return the sizes of the best consecutive batches, and their seconds.

    Args:
        lengths: in tokens, at least one, and each within the limits; ascending where batches are padded.
        costs: of any batch.
        limits: of a batch.
        pressure: requests that wait beyond those given, at least 0; infinity for the least total time.
        ends: by sequence, whether it is the last of its request, 1 or 0; None if each is a request of its own.
    """
    seconds = _seconds(np.asarray(lengths, dtype=float), costs, limits)
    count, most = seconds.shape
    waiting = np.ones(count)
    if not math.isinf(pressure):
        waiting = np.cumsum((waiting if ends is None else np.asarray(ends))[::-1])[::-1] + pressure
    weighted = seconds * waiting[:, None]
    # least objective of the sequences from i on; the zeros past the end are added to infinite costs only
    least = np.zeros(count + most)
    totals = np.empty(most)
    size = [0] * count
    for first in range(count - 1, -1, -1):
        np.add(weighted[first], least[first + 1 : first + 1 + most], out=totals)
        best = totals.argmin()
        size[first] = int(best) + 1
        least[first] = totals[best]
    sizes, times, first = [], [], 0
    while first < count:
        sizes.append(size[first])
        times.append(float(seconds[first, size[first] - 1]))
        first += size[first]
    return sizes, times


def cut_in_order(lengths: Sequence[int], limits: BatchLimits) -> list[int]:
    """Return the sizes of batches that are filled in order, up to the limits."""
    sizes = [0]
    longest = tokens = 0
    for length in lengths:
        longest, tokens = max(longest, length), tokens + length
        if sizes[-1] and not limits.allow(sizes[-1] + 1, tokens, longest):
            sizes.append(0)
            longest = tokens = length
        sizes[-1] += 1
    return sizes


def seconds_of_batches(batches: Sequence[Sequence[int]], costs: CostModel) -> list[float]:
    """Return the seconds of batches of sequences of these lengths."""
    counts = np.array([float(len(batch)) for batch in batches])
    tokens = np.array([float(sum(batch)) for batch in batches])
    squares = np.array([float(sum(n * n for n in batch)) for batch in batches])
    longest = np.array([float(max(batch)) for batch in batches])
    return [float(value) for value in costs.seconds_of(counts, tokens, squares, longest)]


def _seconds(lengths: FloatArray, costs: CostModel, limits: BatchLimits) -> FloatArray:
    """Return the seconds of all consecutive batches, `[count, most]`; infinite where not allowed.

    Row i, column j is the batch of j + 1 sequences from i on.
    """
    count = len(lengths)
    most = min(count, limits.max_sequences)
    first = np.arange(count)[:, None]
    sizes = np.arange(1, most + 1)[None, :]
    # past the end are sequences of no tokens; batches with them are not allowed
    padded = np.concatenate([lengths, np.zeros(most)])[first + sizes - 1]
    tokens = np.cumsum(padded, axis=1)
    longest = np.maximum.accumulate(padded, axis=1)
    sequences = np.broadcast_to(sizes.astype(float), tokens.shape)
    allowed = limits.computed_tokens(sequences, tokens, longest) <= limits.max_tokens
    allowed &= first + sizes <= count
    seconds = costs.seconds_of(sequences, tokens, np.cumsum(padded * padded, axis=1), longest)
    return np.where(allowed, seconds, np.inf)
