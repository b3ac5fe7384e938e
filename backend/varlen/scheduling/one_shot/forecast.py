"""Expected run times: the cost model, corrected by how fast the machine is now.

Other work on the machine slows all batches down at once. That changes what is promised to clients, but no decision
between two plans, so the correction is kept apart from the model.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import CostModel
from varlen.scheduling.sequence import Forecast

# Recent batches whose median tells the machine's speed. Half of them begin as expected, so that a first slow batch,
# which compiles or touches memory, moves nothing.
_RECENT = 15
# The same for batches that ran alone, on all cores; of each size, as small ones gain little.
_RECENT_ALONE = 7


class Forecaster:
    """Predicts requests, from any thread, and learns from batches, in one."""

    def __init__(self, costs: CostModel, limits: BatchLimits) -> None:
        self._costs = costs
        self._limits = limits
        self._ratios = deque([1.0] * (_RECENT // 2), maxlen=_RECENT)
        self.slowdown = 1.0
        self._worst_slowdown = 1.0
        # by the bits of the number of tokens
        self._alone: dict[int, deque[float]] = {}

    def forecast(self, lengths: Sequence[int]) -> Forecast:
        """Return the expected time of sequences of these lengths, in slow moments of the machine."""
        limits, sizes = self._limits, np.array(lengths, dtype=float)
        # full batches of sequences of one length
        counts = np.minimum(limits.max_tokens // sizes, limits.max_sequences).clip(min=1.0)
        tokens = counts * sizes
        batches = self._costs.seconds_of(counts, tokens, tokens * sizes, sizes)
        parts = float((batches / counts).sum())
        longest = float(batches[sizes.argmax()])
        return Forecast(self._worst_slowdown * parts, self._worst_slowdown * longest)

    def alone(self, shape: BatchShape) -> float:
        """Return the time of a batch that runs alone, over its time beside others."""
        ratios = self._alone.get(shape.tokens.bit_length())
        return statistics.median(ratios) if ratios else 1.0

    def learn_alone(self, shape: BatchShape, seconds: float) -> None:
        """Learn from the seconds of a batch that ran alone, on all cores."""
        ratios = self._alone.setdefault(shape.tokens.bit_length(), deque(maxlen=_RECENT_ALONE))
        ratios.append(seconds / (self.slowdown * self._costs.seconds(shape)))

    def learn(self, shape: BatchShape, seconds: float) -> None:
        """Learn from the seconds that a batch took."""
        # not from what was predicted when it started: other batches have changed the slowdown meanwhile
        self._ratios.append(seconds / self._costs.seconds(shape))
        self.slowdown = statistics.median(self._ratios)
        # a promise has to hold where the speed changes; the one worst batch may be an outlier
        self._worst_slowdown = sorted(self._ratios)[-2]
        # the cost model learns how this batch differs from other recent ones
        self._costs.refine(shape, seconds / self.slowdown)
