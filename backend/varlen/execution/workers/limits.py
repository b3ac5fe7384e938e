"""Limits of the time and of the restarts of a model's processes."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from varlen.config import EngineConfig

# Ranks of a model wait for each other, so a lost one has to be noticed soon.
_RANK_SECONDS, _RANK_FACTOR = 2.0, 10.0
# Seconds that a stage waits beyond the time of the stages before it: the first that waits in vain reports.
_LATER_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class HungAfter:
    """When a worker counts as hung: it takes longer than both.

    Attributes:
        seconds: seconds for a batch.
        factor: times what is expected.
    """

    seconds: float = 300.0
    factor: float = 20.0


def hung_after(config: EngineConfig) -> HungAfter:
    """Return when a worker of a model counts as hung."""
    if config.num_processes == 1:
        return HungAfter()
    # a process that waits notices which one is late; this limit is for the leader
    before = max(1, config.pipeline_parallel - 1)
    return HungAfter(longest_wait(config, before) + _RANK_SECONDS, _RANK_FACTOR)


def longest_wait(config: EngineConfig, before: int) -> float:
    """Return the longest wait of a stage for a batch, in seconds.

    All stages get a batch at once, so it waits for all `before` stages before it.
    """
    return before * (config.rank_timeout_seconds + _LATER_SECONDS)


class RestartLimit:
    """Allows few restarts in any period."""

    def __init__(
        self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without a restart.

        Args:
            most: number of restarts that are allowed in a period.
            seconds: length of the period.
            clock: returns the time in seconds.
        """
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._times: deque[float] = deque()

    def __str__(self) -> str:
        return f"{self._most} others within {self._seconds:.0f} s"

    def allow(self) -> bool:
        """Count a restart and return True, unless there were too many."""
        now = self._clock()
        while self._times and self._times[0] <= now - self._seconds:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
