"""Admission: counts waiting work, and refuses requests that exceed a limit.

Threads that submit requests and the engine's thread share these counters; a lock guards them.
"""

from __future__ import annotations

import math
from threading import Lock
from typing import NamedTuple

from varlen.errors import DeadlineError, QueueFullError, RequestError
from varlen.request.request import MAX_PROBE_TOKENS, Request, reserve
from varlen.scheduling.batch import Batch
from varlen.scheduling.sequence import Forecast


class Work(NamedTuple):
    """Work that waits no longer.

    Attributes:
        requests: number of requests that have no waiting sequence left.
        tokens, seconds: tokens and expected seconds of the sequences that leave.
    """

    requests: int
    tokens: int
    seconds: float


_NO_WORK = Work(0, 0, 0.0)


class Admission:
    """Counts waiting work, and refuses requests beyond a limit or too late."""

    def __init__(self, max_requests: int, max_tokens: int, *, slots: int = 1) -> None:
        """Start with an empty queue.

        Args:
            max_requests, max_tokens: limits of waiting work.
        """
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.slots = slots
        self._requests = 0
        self._tokens = 0
        self._seconds = 0.0
        # expected end of each batch in flight
        self._ends: dict[Batch, float] = {}
        self._lock = Lock()

    @property
    def depth(self) -> tuple[int, int]:
        with self._lock:
            return self._requests, self._tokens

    @property
    def queued_seconds(self) -> float:
        """Predicted seconds until what waits now has run, if nothing else comes."""
        with self._lock:
            return self._seconds / self.slots

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._ends

    def enter(self, request: Request, forecast: Forecast, now: float) -> None:
        """Count a request that begins to wait.

        Raises:
            RequestError: it is larger than the whole queue.
            QueueFullError: a cap would be passed.
            DeadlineError: its answer is not expected before its deadline. In all three cases nothing is counted.
        """
        tokens = request.num_tokens
        if tokens > self._max_tokens:
            raise RequestError(
                f"the request has {tokens} tokens; this model queues at most {self._max_tokens}:"
                " send fewer rows at once"
            )
        options = request.options
        with self._lock:
            if self._requests >= self._max_requests + reserve(options, 1):
                raise QueueFullError(
                    f"the queue is full: {self._requests} requests wait, at most {self._max_requests} may;"
                    " try again later"
                )
            if self._tokens + tokens > self._max_tokens + reserve(options, MAX_PROBE_TOKENS):
                raise QueueFullError(
                    f"the queue is full: {self._tokens} tokens wait, the request has {tokens},"
                    f" at most {self._max_tokens} may wait; try again later"
                )
            self._check_deadline(request.deadline(now) - now, forecast, now)
            self._requests += 1
            self._tokens += tokens
            self._seconds += forecast.seconds

    def leave(self, left: Work) -> None:
        with self._lock:
            self._subtract(left)

    def mark_running(self, batch: Batch, until: float, left: Work = _NO_WORK) -> None:
        """Count a batch that is expected to run until then; subtract what waits no longer."""
        with self._lock:
            self._ends[batch] = until
            self._subtract(left)

    def mark_ended(self, batch: Batch) -> None:
        with self._lock:
            self._ends.pop(batch, None)

    def _subtract(self, left: Work) -> None:
        self._requests -= left.requests
        self._tokens -= left.tokens
        self._seconds -= left.seconds
        # sums of floats do not return to zero by themselves
        self._seconds = max(0.0, self._seconds) if self._requests else 0.0

    def _wait_seconds(self, now: float, part_before: float = 1.0) -> float:
        in_flight = sum(max(0.0, end - now) for end in self._ends.values())
        return (in_flight + part_before * self._seconds) / self.slots

    def _check_deadline(self, allowed: float, forecast: Forecast, now: float) -> None:
        if allowed == math.inf:
            return
        wait = self._wait_seconds(now, forecast.part_before)
        # later requests may fill up its batch
        alone = max(forecast.seconds + min(wait, forecast.batch_seconds), forecast.least_seconds)
        expected = wait + alone
        if expected > allowed:
            raise DeadlineError(
                f"the answer is expected in about {1000 * expected:.0f} ms, the deadline is in"
                f" {1000 * max(0.0, allowed):.0f} ms"
            )
