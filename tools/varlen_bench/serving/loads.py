"""One load on a server: requests at fixed times, or a closed loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from varlen_tools.workloads import Mix, poisson_times, token_ids

Kind: TypeAlias = Literal[
    "closed", "load", "most", "paired", "overload", "lone", "perf_analyzer", "result", "failed"
]
# Seconds at the beginning of a load that are not measured.
WARMUP_SECONDS = 1.0
# Requests in flight of a closed loop, and the number of different ones.
IN_FLIGHT, _CLOSED_REQUESTS = 8, 1024
# Lengths of requests that are sent one by one, in tokens.
_LONE_TOKENS = (3, 16, 128, 512)
# Share of late requests that ends a load which may be given up.
_LATE_SHARE = 0.01
# Requests that may wait, in seconds of what a system serves: six times the latency that is allowed.
_BACKLOG_SECONDS, _MIN_WAITING = 3.0, 16
# A p99 of fewer requests is their maximum.
_ENOUGH_REQUESTS, _LONGEST = 100, 1.5


@dataclass(frozen=True, slots=True)
class Load:
    """Requests for one model.

    Attributes:
        seconds: measured seconds, after the warm-up.
        seed: seed of arrivals, lengths and token ids.
        rate: requests/s at fixed times; None: a closed loop.
        max_waiting: limit on requests without an answer; a closed loop always has this number.
        may_give_up: whether the load ends once too many requests are late.
        deadline_ms: deadline of each request.
    """

    kind: Kind
    mix: Mix
    seconds: float
    seed: int
    rate: float | None = None
    max_waiting: int = IN_FLIGHT
    may_give_up: bool = False
    deadline_ms: int | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Load:
        """Return the load whose `asdict` went through JSON."""
        return cls(**{**fields, "mix": Mix(**fields["mix"])})

    @property
    def end(self) -> float:
        """Seconds from the beginning to the end."""
        return WARMUP_SECONDS + self.seconds

    @property
    def max_late(self) -> int | None:
        """Late requests after which the load is given up; None: never."""
        # one more than the share: the last value of a percentile is chance
        return int(_LATE_SHARE * len(self.due_times())) + 1 if self.may_give_up else None

    def due_times(self) -> list[float]:
        """Return when requests are due, in seconds from the beginning; none in a closed loop."""
        return [] if self.rate is None else poisson_times(self.rate, self.end, self.seed)

    def token_ids(self, vocabulary: int) -> list[list[int]]:
        """Return the token ids of each request."""
        count = _CLOSED_REQUESTS if self.rate is None else len(self.due_times())
        return token_ids(self.mix.take(count, self.seed), vocabulary, self.seed)


def lone_mixes(limit: int) -> list[Mix]:
    """Return the lengths of requests that are sent one by one."""
    lengths = dict.fromkeys(min(tokens, limit) for tokens in _LONE_TOKENS)
    return [Mix(f"lone_{tokens}", f"lone {tokens}", (tokens,)) for tokens in lengths]


def max_waiting(capacity: float) -> int:
    """Return how many requests may wait for a system of `capacity` requests/s."""
    return max(_MIN_WAITING, math.ceil(_BACKLOG_SECONDS * capacity))


def seconds_at(rate: float, seconds: float) -> float:
    """Return the measured seconds at `rate`: up to 50 % more, to see 100 requests."""
    return min(max(seconds, _ENOUGH_REQUESTS / rate), _LONGEST * seconds)
