"""The next load on the way to the largest that a system sustains."""

from __future__ import annotations

from dataclasses import dataclass, field

# Of the capacity: the first load, and one that is too much.
_FIRST, _TOO_MUCH = 0.8, 1.15
# Factors while no load is sustained, or every load is.
_DOWN, _UP = 0.6, 1.25


@dataclass(slots=True)
class Search:
    """Bisection between the loads that were sustained and the smallest that was not."""

    # requests/s of a closed loop
    capacity: float
    # number of loads left to try
    steps: int
    _passed: list[float] = field(default_factory=list)
    _failed: list[float] = field(default_factory=list)

    @property
    def sustained(self) -> float:
        """The largest sustained load below every load that was not, or 0."""
        least = min(self._failed, default=float("inf"))
        return max((rate for rate in self._passed if rate < least), default=0.0)

    def next_rate(self) -> float | None:
        """Return the next load; None at the end of the search."""
        if self.steps <= 0 or self.capacity <= 0:
            return None
        first, sustained = _FIRST * self.capacity, self.sustained
        if self._failed:
            least = min(self._failed)
            return (sustained + least) / 2 if sustained else _DOWN * least
        if sustained < first:
            return first
        too_much = _TOO_MUCH * self.capacity
        return (sustained + too_much) / 2 if _UP * sustained < too_much else _UP * sustained

    def record(self, rate: float, *, is_sustained: bool, is_step: bool = True) -> None:
        """Record whether a load was sustained; the light load is not a step."""
        self.steps -= is_step
        (self._passed if is_sustained else self._failed).append(rate)
