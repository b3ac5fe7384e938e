"""Autoscaling: the number of replicas that scraped load and queues ask for.

The rule is Kubernetes' horizontal autoscaler with the sum of a metric over its target per replica.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# Share of their time in which the workers of a replica should run batches.
TARGET_LOAD = 0.7


@dataclass(frozen=True, slots=True)
class AutoscaleOptions:
    """Limits and delays of autoscaling.

    Attributes:
        least, most: numbers of replicas.
        queued_seconds: seconds of waiting work that each replica should have at most.
        scrape_seconds, decision_seconds: seconds between scrapes, and between decisions.
        startup_seconds: seconds from a decision until a new replica takes requests.
        down_seconds: seconds in which no decision asked for more replicas before some are stopped.
    """

    least: int
    most: int
    queued_seconds: float = 1.0
    scrape_seconds: float = 15.0
    decision_seconds: float = 15.0
    startup_seconds: float = 30.0
    down_seconds: float = 300.0

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metrics summed over all replicas.

    Attributes:
        load: number of replicas that were busy since the scrape before; fractions count.
        queued_seconds: `varlen_queued_seconds` of all replicas.
    """

    load: float
    queued_seconds: float


class Autoscaler:
    """Decides how many replicas run."""

    def __init__(self, options: AutoscaleOptions, now: float, replicas: int) -> None:
        """Start with a number of replicas."""
        self._options = options
        # time and number of replicas of recent decisions
        self._recent = deque([(now, replicas)])

    def decide(self, now: float, scrape: Scrape) -> int:
        """Return the number of replicas that should run."""
        options = self._options
        signal = max(scrape.load / TARGET_LOAD, scrape.queued_seconds / options.queued_seconds)
        # 2.1 / 0.7 is a little more than 3
        needed = math.ceil(round(signal, 6))
        wanted = min(options.most, max(options.least, needed))
        self._recent.append((now, wanted))
        while self._recent[0][0] < now - options.down_seconds:
            self._recent.popleft()
        return max(replicas for _, replicas in self._recent)
