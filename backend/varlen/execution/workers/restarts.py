"""How often a worker may be started again."""

import time
from collections import deque
from collections.abc import Callable


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

    def allow(self) -> bool:
        """Count a restart and return True, unless there were too many."""
        now = self._clock()
        while self._times and self._times[0] <= now - self._seconds:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
