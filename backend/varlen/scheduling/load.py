"""How busy the server is: arrivals and work per second, over the last seconds."""

from __future__ import annotations

import math

# An arrival of this age counts 1 / e. With less memory, the pressure near saturation is mostly noise.
_MEMORY_SECONDS = 8.0
# A measured load is never counted as more than this; at 1 the pressure would be infinite.
_HIGHEST_LOAD = 0.99


class LoadMeter:
    """Measures arrivals."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._at = 0.0
        # of past arrivals, the older the less
        self._requests = 0.0
        self._seconds = 0.0

    def arrived(self, now: float, *, seconds: float) -> None:
        """Count a request that is `seconds` of work in full batches."""
        if self._began is None:
            self._began = now
        self._fade(now)
        self._requests += 1
        self._seconds += seconds

    def pressure(self, now: float, backlog_seconds: float) -> float:
        """Return how many future requests one more second of work delays.

        It delays all that arrive until the backlog is gone, and those in turn delay others: the arrivals per second,
        times the backlog in seconds, divided by the share of time that is free.
        """
        if self._began is None or now <= self._began:
            return 0.0
        self._fade(now)
        # less than the memory at first, or a start under load would count as idle
        remembered = _MEMORY_SECONDS * -math.expm1((self._began - now) / _MEMORY_SECONDS)
        load = min(self._seconds / remembered, _HIGHEST_LOAD)
        return self._requests / remembered * backlog_seconds / (1 - load)

    def _fade(self, now: float) -> None:
        faded = math.exp((self._at - now) / _MEMORY_SECONDS)
        self._requests *= faded
        self._seconds *= faded
        self._at = now
