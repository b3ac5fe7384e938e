"""The scheduler of models that run a sequence once: queue, admission, policy and costs together.

The engine's thread owns it, except for `admit`, which any thread may call.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from itertools import compress
from typing import cast

from varlen.config import EngineConfig
from varlen.costs.model import BatchLimits, BatchShape, CostModel
from varlen.errors import EngineError
from varlen.request.request import Float32Array, Request
from varlen.scheduling.admission import Admission, Work
from varlen.scheduling.batch import (
    OUT_OF_MEMORY,
    Batch,
    BatchResult,
    Event,
    Forecast,
    RequestState,
    SequenceFailure,
    SequenceOutput,
    SequenceState,
)
from varlen.scheduling.one_shot.partition import DpPartition, FullBatches, Policy
from varlen.scheduling.one_shot.queue import RequestQueue

_log = logging.getLogger(__name__)

# Recent batches whose median tells the machine's speed. Half of them begin as expected, so that a first slow batch,
# which compiles or touches memory, moves nothing.
_RECENT = 15
# The same for batches that ran alone, on all cores; of each size, as small ones gain little.
_RECENT_ALONE = 7
_MILLISECOND = 1e-3
_BATCH_FAILED = "the model failed on the batch that held this request; the server's log says why"


class OneShotScheduler:
    """Queues requests and forms batches. A sequence is finished once it has run."""

    def __init__(
        self, config: EngineConfig, costs: CostModel, admission: Admission, max_batch_tokens: int
    ) -> None:
        """Start with an empty queue.

        Args:
            config: names the policy, the trigger and the limits of a batch.
            costs: predicts the run time of batches; refined here.
            max_batch_tokens: largest batch of several sequences; a longer sequence runs by itself.
        """
        is_by_cost = config.policy == "dp"
        self._queue = RequestQueue("tokens" if is_by_cost else "sequences")
        self._admission = admission
        self._costs = costs
        self._max_delay = config.max_delay_ms * _MILLISECOND if config.trigger == "lazy" else 0.0
        self._limits = _limits(config, max_batch_tokens)
        self._forecaster = Forecaster(costs, self._limits)
        self._policy: Policy
        if is_by_cost:
            pressure = math.inf if config.dp_pressure == "infinite" else float(config.dp_pressure)
            self._policy = DpPartition(self._limits, costs, admission.slots, pressure)
        else:
            self._policy = FullBatches(self._limits, costs)
        # parts of batches that ran out of memory; they run first
        self._split: deque[Batch] = deque()

    def admit(self, request: Request, now: float) -> Forecast:
        """Count a request as waiting and return its expected run time. From any thread.

        Raises:
            RequestError, QueueFullError, DeadlineError: it is refused; see `Admission.enter`.
        """
        forecast = self._forecaster.forecast([prompt.num_tokens for prompt in request.prompts])
        self._admission.enter(request, forecast, now)
        return forecast

    def withdraw(self, request: Request, forecast: Forecast) -> None:
        self._admission.leave(Work(1, request.num_tokens, forecast.seconds))

    def add(self, request: RequestState) -> None:
        forecast = request.forecast
        # when its time comes, a batch may just have started, and its own runs after that
        self._queue.add(request, request.deadline - forecast.seconds - 2 * forecast.batch_seconds)

    def wake_at(self, now: float) -> float | None:
        if self._split:
            return now
        return self._starts_at(now) if self._queue else None

    def schedule(self, now: float) -> Batch | None:
        while self._split:
            part = self.trim(self._split.popleft(), now)
            if part is not None:
                return self._start(part, now)
        if not self._queue.promote(now):
            return None
        if self._starts_at(now) > now:
            return None
        batch = self._policy.choose(self._queue, self._forecaster.slowdown)
        for sequence in batch.sequences:
            sequence.status = "running"
        left = _work_of(batch.sequences, requests=self._queue.remove(batch.sequences))
        if not self._queue and self._admission.is_idle:
            seconds = batch.seconds * self._forecaster.alone(batch.shape)
            batch = Batch(batch.sequences, batch.shape, seconds, batch.reason)
        self._admission.mark_running(batch, until=now + batch.seconds, left=left)
        return batch

    def trim(self, batch: Batch, now: float) -> Batch | None:
        left = [sequence for sequence in batch.sequences if sequence.status == "running"]
        if len(left) == len(batch.sequences):
            return batch
        self._admission.mark_ended(batch)
        return self._start(self._part(left, batch.reason), now) if left else None

    def update(self, batch: Batch, result: BatchResult) -> list[Event]:
        self._admission.mark_ended(batch)
        if result.failure == "memory" and len(batch.sequences) > 1:
            self._split_in_two(batch)
            return []
        if result.failure == "adapter":
            return self._fail_named(batch, result)
        running = [sequence.status == "running" for sequence in batch.sequences]
        if result.failure is not None:
            error = EngineError(OUT_OF_MEMORY if result.failure == "memory" else _BATCH_FAILED)
            return [SequenceFailure(s, error) for s in compress(batch.sequences, running)]
        if result.cores == "one":
            self._forecaster.learn(batch.shape, result.seconds)
        elif result.cores == "all":
            self._forecaster.learn_alone(batch.shape, result.seconds)
        outputs = zip(batch.sequences, cast(list[Float32Array], result.outputs), strict=True)
        events = [SequenceOutput(*output) for output in compress(outputs, running)]
        for event in events:
            event.sequence.finish()
        return [*events]

    def remove(self, request: RequestState) -> None:
        self._queue.discard(request)
        waiting = [sequence for sequence in request.sequences if sequence.status == "waiting"]
        if waiting:
            self._admission.leave(_work_of(waiting, requests=1))
        for sequence in request.sequences:
            sequence.finish()

    def drain(self) -> None:
        self._max_delay = 0.0

    def _start(self, batch: Batch, now: float) -> Batch:
        self._admission.mark_running(batch, until=now + batch.seconds)
        return batch

    def _split_in_two(self, batch: Batch) -> None:
        _log.warning("too little memory for a batch of %d sequences", len(batch.sequences))
        half = len(batch.sequences) // 2
        for part in (batch.sequences[half:], batch.sequences[:half]):
            self._split.appendleft(self._part(part, "split after running out of memory"))

    def _fail_named(self, batch: Batch, result: BatchResult) -> list[Event]:
        """Return the failures of sequences whose adapter cannot be read; the others run again."""
        named, error = result.named(batch.sequences), EngineError(result.reason)
        others = [sequence for sequence in batch.sequences if sequence not in named]
        if others:
            self._split.append(self._part(others, "others have an adapter that cannot be read"))
        return [SequenceFailure(each, error) for each in named if each.status == "running"]

    def _part(self, sequences: Sequence[SequenceState], reason: str) -> Batch:
        shape = BatchShape.of([sequence.num_tokens for sequence in sequences])
        seconds = self._forecaster.slowdown * self._costs.seconds(shape)
        return Batch(tuple(sequences), shape, seconds, reason)

    def _starts_at(self, now: float) -> float:
        """Return when the next batch of a queue that is not empty starts."""
        if not self._max_delay or self._queue.is_urgent or self._is_full():
            return now
        oldest = min(request.arrival for request in self._queue.requests)
        return max(now, min(oldest + self._max_delay, self._queue.next_promotion))

    def _is_full(self) -> bool:
        waiting = self._queue.first(self._limits.max_sequences + 1)
        tokens = sum(sequence.num_tokens for sequence in waiting)
        longest = max(sequence.num_tokens for sequence in waiting)
        return not self._limits.allow(len(waiting) + 1, tokens + 1, longest)


def _limits(config: EngineConfig, max_tokens: int) -> BatchLimits:
    by_policy = {"none": 1, "token_budget": max_tokens}
    sequences = by_policy.get(config.policy, config.max_batch_sequences)
    return BatchLimits(min(sequences, max_tokens), max_tokens, config.execution)


def _work_of(sequences: Sequence[SequenceState], *, requests: int) -> Work:
    tokens = sum([sequence.num_tokens for sequence in sequences])
    seconds = sum([each.num_tokens * each.request.seconds_per_token for each in sequences])
    return Work(requests, tokens, seconds)


class Forecaster:
    """Predicts requests, from any thread, and learns from batches, in one.

    Other work on the machine slows all batches down at once. That changes what is promised to clients, but no decision
    between two plans, so the correction is kept apart from the cost model.
    """

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
        limits, seconds = self._limits, dict[int, float]()
        parts = 0.0
        for length, rows in Counter(lengths).items():
            # full batches of sequences of one length
            count = max(1, min(limits.max_tokens // length, limits.max_sequences))
            tokens = count * length
            shape = BatchShape(count, tokens, tokens * length, length)
            seconds[length] = self._worst_slowdown * self._costs.seconds(shape)
            parts += rows * seconds[length] / count
        return Forecast(parts, seconds[max(lengths)])

    def alone(self, shape: BatchShape) -> float:
        """Return the time of a batch that runs alone, over its time beside others."""
        ratios = self._alone.get(shape.tokens.bit_length())
        return statistics.median(ratios) if ratios else 1.0

    def learn_alone(self, shape: BatchShape, seconds: float) -> None:
        """Learn from the seconds of a batch that ran alone, on all cores."""
        ratios = self._alone.setdefault(shape.tokens.bit_length(), deque(maxlen=_RECENT_ALONE))
        ratios.append(seconds / (self.slowdown * self._costs.seconds(shape)))

    def learn(self, shape: BatchShape, seconds: float) -> None:
        # not from what was predicted when it started: other batches have changed the slowdown meanwhile
        self._ratios.append(seconds / self._costs.seconds(shape))
        self.slowdown = statistics.median(self._ratios)
        # a promise has to hold where the speed changes; the one worst batch may be an outlier
        self._worst_slowdown = sorted(self._ratios)[-2]
        # the cost model learns how this batch differs from other recent ones
        self._costs.refine(shape, seconds / self.slowdown)
