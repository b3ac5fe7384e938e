"""How much time goes where: key systems are searched finely, the others just so far as a curve needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Most requests that wait, in seconds of what a system can serve: six times what a caller is to wait.
_BACKLOG_SECONDS = 3.0
_LEAST_OUTSTANDING = 16
# A p99 of fewer requests is their maximum.
_ENOUGH_REQUESTS = 100
_MOST_LONGER = 1.5
LIGHT = 0.3
PAIRED_LOADS = (0.6, 0.8)
# Times as long as other loads: what they compare is alike.
_PAIRED = 1.25


@dataclass(frozen=True, slots=True)
class Effort:
    """What one system gets on one mix.

    Attributes:
        closed_seconds: of the closed loop that finds its capacity.
        seconds: of a load; slow systems get up to half as much again, to see more requests.
        steps: loads on the way to the largest that is sustained.
        most_seconds: of the load that is too much for all.
    """

    closed_seconds: float
    seconds: float
    steps: int
    most_seconds: float

    def seconds_at(self, rate: float) -> float:
        """Return the seconds of a load of so many requests/s."""
        return min(max(self.seconds, _ENOUGH_REQUESTS / rate), _MOST_LONGER * self.seconds)


@dataclass(frozen=True, slots=True)
class Plan:
    """The efforts of a run.

    Attributes:
        key: of systems that the BENCH line is about.
        other: of all others.
        hopeless: of peers that cannot be the best any more.
        paired_seconds: of each load in the comparison of two policies; 0: none.
        turns: of that comparison.
    """

    key: Effort
    other: Effort
    hopeless: Effort
    paired_seconds: float
    turns: int = 2


def plan(seconds: float, *, quick: bool) -> Plan:
    """Return the plan in which a key load is measured for so many seconds."""
    if quick:
        key = Effort(closed_seconds=2, seconds=seconds, steps=2, most_seconds=2)
        other = Effort(closed_seconds=2, seconds=seconds, steps=0, most_seconds=2)
        return Plan(key, other, other, paired_seconds=seconds, turns=1)
    other_seconds = 0.75 * seconds
    key = Effort(closed_seconds=3, seconds=seconds, steps=4, most_seconds=other_seconds)
    other = Effort(closed_seconds=3, seconds=other_seconds, steps=2, most_seconds=other_seconds)
    hopeless = Effort(closed_seconds=3, seconds=other_seconds, steps=1, most_seconds=other_seconds)
    return Plan(key, other, hopeless, paired_seconds=_PAIRED * seconds)


def most_outstanding(capacity: float) -> int:
    """Return how many requests may wait in a system of so many requests/s."""
    return max(_LEAST_OUTSTANDING, math.ceil(_BACKLOG_SECONDS * capacity))
