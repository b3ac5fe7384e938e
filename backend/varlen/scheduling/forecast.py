"""Expected run times: the cost table, corrected by how fast the machine is now.

Other work on the machine slows all batches down at once. That changes what is promised to clients, but no decision
between two plans, so the correction is kept apart from the table.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import CostModel
from varlen.sequence import Forecast

# Recent batches whose median tells the machine's speed. Half of them begin as expected, so that a first slow batch,
# which compiles or touches memory, moves nothing.
_RECENT = 15
# Batches between two looks at what the table has learned; one look costs a millisecond.
_BATCHES_PER_REFRESH = 64


class Forecaster:
    """Predicts requests, from any thread, and learns from batches, in one."""

    def __init__(self, costs: CostModel, limits: BatchLimits) -> None:
        self._costs = costs
        self._limits = limits
        self._ratios = deque([1.0] * (_RECENT // 2), maxlen=_RECENT)
        self.slowdown = 1.0
        self._worst_slowdown = 1.0
        self._batches = 0
        self._full_batches = self._tabulate()

    def forecast(self, lengths: Sequence[int]) -> Forecast:
        """Return the expected time of sequences of these lengths, in slow moments of the machine."""
        full_batches, slowdown = self._full_batches, self._worst_slowdown
        seconds = sum(full_batches[length][0] for length in lengths)
        return Forecast(slowdown * seconds, slowdown * full_batches[max(lengths)][1])

    def learn(self, shape: BatchShape, *, predicted: float, actual: float) -> None:
        """Learn from the run time of a batch.

        Args:
            shape: of the batch.
            predicted, actual: seconds; the prediction with the slowdown of its time.
        """
        self._ratios.append(actual / (predicted / self.slowdown))
        self.slowdown = statistics.median(self._ratios)
        # a promise has to hold where the speed changes; the one worst batch may be an outlier
        self._worst_slowdown = sorted(self._ratios)[-2]
        # the table learns how this batch differs from other recent ones
        self._costs.refine(shape, actual / self.slowdown)
        self._batches += 1
        if self._batches % _BATCHES_PER_REFRESH == 0:
            self._full_batches = self._tabulate()

    def _tabulate(self) -> list[tuple[float, float]]:
        """Return by length: seconds of a sequence as its part of a full batch, and of the full batch."""
        limits = self._limits
        lengths = np.arange(1, limits.max_tokens + 1, dtype=float)
        counts = np.minimum(limits.max_tokens // lengths, limits.max_sequences)
        tokens = counts * lengths
        seconds = self._costs.seconds_of(counts, tokens, tokens * lengths, lengths)
        parts = (seconds / counts).tolist()
        return [(math.nan, math.nan), *zip(parts, seconds.tolist(), strict=True)]
