"""How much comes: rates over the last seconds, and how long those who came would have waited for their turn."""

from __future__ import annotations

import math
from collections import deque

# What is this old counts for 1 / e. Shorter, and the pressure near saturation is mostly noise.
_MEMORY_SECONDS = 8.0
# A rate is not known before this much time has passed.
_LEAST_SECONDS = 0.05
# Nearer to saturation than this, a measured share says nothing.
_MOST_BUSY = 0.99
# Waits kept, and the share of them that is shorter than the usual one.
_WAITS = 500
_QUANTILE = 0.98


class LoadMeter:
    """Measures arrivals. `now` never goes back."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._at = 0.0
        # of what came, the older the less
        self._requests = 0.0
        self._seconds = 0.0
        self._waits: deque[float] = deque(maxlen=_WAITS)

    def arrived(self, now: float, *, seconds: float, backlog_seconds: float) -> None:
        """Count a request.

        Args:
            seconds: its share of full batches.
            backlog_seconds: of all the work that it found.
        """
        if self._began is None:
            self._began = self._at = now
        self._fade(now)
        self._requests += 1
        self._seconds += seconds
        self._waits.append(backlog_seconds + seconds)

    def pressure(self, now: float, backlog_seconds: float) -> float:
        """Return how many requests to come are kept waiting by a second of work more.

        It keeps those waiting that come until the backlog is gone, and those that they keep waiting in turn.
        """
        if self._began is None:
            return 0.0
        self._fade(now)
        remembered = _MEMORY_SECONDS * -math.expm1((self._began - now) / _MEMORY_SECONDS)
        remembered = max(remembered, _LEAST_SECONDS)
        busy = min(self._seconds / remembered, _MOST_BUSY)
        return self._requests / remembered * backlog_seconds / (1 - busy)

    def usual_wait(self) -> float:
        """Return the seconds that few would have waited for longer of late, were all served in order."""
        if not self._waits:
            return 0.0
        return sorted(self._waits)[int(_QUANTILE * (len(self._waits) - 1))]

    def _fade(self, now: float) -> None:
        faded = math.exp((self._at - now) / _MEMORY_SECONDS)
        self._requests *= faded
        self._seconds *= faded
        self._at = now
