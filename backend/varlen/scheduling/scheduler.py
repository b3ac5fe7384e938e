"""What runs next, and when: the queue, a policy, a trigger and the costs put together.

One thread owns it, save for `forecast`, which any may call.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import CostModel
from varlen.request import Ticket, Waiting
from varlen.scheduling.admission import Forecast
from varlen.scheduling.load import LoadMeter
from varlen.scheduling.policy import Batch, InOrder, LeastCost, Policy
from varlen.scheduling.queue import WaitingQueue

_MILLISECOND = 1e-3
# Of `max_wait_ms`: what one step of priority counts as having waited already.
_WAITED_PER_PRIORITY = 0.1
# Batches of late whose median says how slow the machine is now; at first, some that came as expected.
_RECENT = 15
_AS_EXPECTED = 7
_MOST_SLOW = 100.0
# Batches between two looks at what the table has learned.
_BATCHES_PER_FORECAST = 64


class Scheduler:
    """Queues sequences and cuts them into batches."""

    def __init__(self, config: EngineConfig, costs: CostModel, max_batch_tokens: int) -> None:
        """Make a scheduler with nothing in it.

        Args:
            config: names the policy and the trigger.
            costs: of batches as they are executed; refined here.
            max_batch_tokens: of one batch, as far as the arena allows; the longest sequence has no more.
        """
        self._queue = WaitingQueue()
        self._load = LoadMeter()
        self._costs = costs
        self._max_wait = config.max_wait_ms * _MILLISECOND
        self._max_delay = config.max_delay_ms * _MILLISECOND if config.trigger == "lazy" else 0.0
        self._limits = _limits(config, max_batch_tokens)
        self._policy: Policy
        if config.policy == "dp":
            self._policy = LeastCost(self._limits, costs, self._load, self._max_wait)
        else:
            self._policy = InOrder(self._limits, costs)
        self._ran = 0
        # what batches take now of what the table says: other work on the machine slows all of them down at once
        # it moves forecasts and the load, but no cost that plans compare
        self._recent = deque([1.0] * _AS_EXPECTED, maxlen=_RECENT)
        self._slowness = self._slow_moments = 1.0
        self._full_batches = _full_batches(costs, self._limits)

    def forecast(self, lengths: Sequence[int]) -> Forecast:
        """Return what sequences of these lengths take at most, as far as it is known. From any thread."""
        full_batches = self._full_batches
        seconds = sum(full_batches[length][0] for length in lengths)
        slowness = self._slow_moments
        return Forecast(slowness * seconds, slowness * full_batches[max(lengths)][1])

    def add(self, ticket: Ticket, now: float) -> None:
        """Queue the sequences of a request."""
        request = ticket.request
        since = ticket.arrival - request.options.priority * _WAITED_PER_PRIORITY * self._max_wait
        due = min(since + self._max_wait, ticket.deadline)
        total = 0.0
        for row, sequence in enumerate(request.prompts):
            seconds = self._slowness * self._full_batches[sequence.num_tokens][0]
            total += seconds
            self._queue.add(Waiting(ticket, row, sequence.num_tokens, seconds, since, due))
        self._load.arrived(now, seconds=total)

    def start_at(self, now: float) -> float | None:
        """Return when the next batch is to start; None while nothing waits."""
        if not self._queue:
            return None
        if not self._max_delay or self._is_full():
            return now
        shape = BatchShape.of([waiting.num_tokens for waiting in self._queue])
        oldest = min(waiting.since for waiting in self._queue)
        first_deadline = min(waiting.ticket.deadline for waiting in self._queue)
        start = min(oldest + self._max_delay, first_deadline - self._costs.seconds(shape))
        return max(start, now)

    def take(self, now: float) -> Batch:
        """Return the next batch, which waits no longer; something must wait."""
        batch = self._policy.choose(self._queue, now)
        self._queue.remove(batch.sequences)
        return replace(batch, seconds=self._slowness * batch.seconds)

    def without_closed(self, batch: Batch) -> Batch | None:
        """Return a batch less the sequences of requests that have been answered; None if nothing is left."""
        left = [waiting for waiting in batch.sequences if not waiting.ticket.closed]
        if len(left) == len(batch.sequences):
            return batch
        if not left:
            return None
        shape = BatchShape.of([waiting.num_tokens for waiting in left])
        return Batch(left, shape, self._slowness * self._costs.seconds(shape), batch.why)

    def padding(self, shape: BatchShape) -> int:
        """Return the tokens that a batch is filled up with."""
        if self._limits.execution == "packed":
            return 0
        return shape.sequences * shape.longest - shape.tokens

    def ran(self, batch: Batch, seconds: float) -> None:
        """Learn what a batch took."""
        ratio = self._slowness * seconds / batch.seconds
        self._recent.append(min(max(ratio, 1 / _MOST_SLOW), _MOST_SLOW))
        self._slowness = statistics.median(self._recent)
        # what is promised has to hold where the speed changes; one outlier tells nothing
        self._slow_moments = sorted(self._recent)[-2]
        # the table learns in what this batch differs from others of late
        self._costs.refine(batch.shape, seconds / self._slowness)
        self._ran += 1
        if self._ran % _BATCHES_PER_FORECAST == 0:
            self._full_batches = _full_batches(self._costs, self._limits)

    def clear(self) -> None:
        """Forget all that waits."""
        self._queue.clear()

    def _is_full(self) -> bool:
        waiting = self._queue.first(self._limits.max_sequences + 1)
        tokens = sum(each.num_tokens for each in waiting)
        longest = max(each.num_tokens for each in waiting)
        return not self._limits.allow(len(waiting) + 1, tokens + 1, longest)


def _limits(config: EngineConfig, max_tokens: int) -> BatchLimits:
    by_policy = {"none": 1, "token_budget": max_tokens}
    sequences = by_policy.get(config.policy, config.max_batch_sequences)
    return BatchLimits(min(sequences, max_tokens), max_tokens, config.execution)


def _full_batches(costs: CostModel, limits: BatchLimits) -> list[tuple[float, float]]:
    """Return, by length in tokens, a sequence's share of a batch full of its like, and the batch's seconds."""
    lengths = np.arange(1, limits.max_tokens + 1, dtype=float)
    counts = np.minimum(limits.max_tokens // lengths, limits.max_sequences)
    tokens = counts * lengths
    seconds = costs.seconds_of(counts, tokens, tokens * lengths, lengths)
    shares = (seconds / counts).tolist()
    return [(math.nan, math.nan), *zip(shares, seconds.tolist(), strict=True)]
