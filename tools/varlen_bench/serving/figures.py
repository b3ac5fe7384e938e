"""From the fate of single requests to the figures of one point of load."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from varlen_bench.serving.generator import Offering, Sent


@dataclass(frozen=True, slots=True)
class Point:
    """What one load made of a system.

    Every request is counted, `sent = ok + refused + failed + lost`; the other figures are of the measured seconds,
    which the warm-up is no part of. Latency is from the moment a request was due to its answer, of those that were
    answered well; None where there are none.

    Attributes:
        offered: requests/s that were due; None in a closed loop, where an answer makes the next one due.
        seconds: that were measured.
        warmup: of the requests that were sent, those before them.
        sent, ok, refused, failed: requests.
        lost: never answered.
        not_sent: were due while as many as allowed waited, or after the offering was given up.
        served: good answers/s.
        share: good answers over requests that were due.
        mean_ms, p50_ms, p99_ms: latency.
        lateness_p99_ms: from due to sent.
        refused_p99_ms: from sent to refused.
        kept_deadline: share of good answers that came in time, counted from when they were sent.
    """

    offered: float | None
    seconds: float
    warmup: int
    sent: int
    ok: int
    refused: int
    failed: int
    lost: int
    not_sent: int
    served: float
    share: float
    mean_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    lateness_p99_ms: float | None
    refused_p99_ms: float | None
    kept_deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """What a load has to keep to count as sustained."""

    p99_ms: float = 500.0
    share: float = 0.98

    def is_met(self, point: Point) -> bool:
        """Return whether it does."""
        return (
            point.lost == 0
            and point.share >= self.share
            and point.p99_ms is not None
            and point.p99_ms <= self.p99_ms
        )


GOAL = Goal()


def point_of(
    offering: Offering,
    *,
    rate: float | None,
    warmup: float,
    end: float,
    deadline: float | None = None,
) -> Point:
    """Return the figures of an offering.

    Args:
        offering: whose arrivals went on until `end`, unless it was given up before.
        rate: requests/s that were due, if it was said.
        warmup: seconds that are not measured.
        end: seconds from the beginning.
        deadline: seconds that each request was given, if it was.
    """
    outcomes = Counter(one.outcome for one in offering.sent)
    if offering.is_given_up:
        end = max(warmup, offering.end)
    measured = [one for one in offering.sent if one.due >= warmup]
    good = [one for one in measured if one.outcome == "ok"]
    latencies = [_passed(one, one.due) for one in good]
    due = len(measured) + sum(moment >= warmup for moment in offering.not_sent)
    return Point(
        offered=rate,
        seconds=end - warmup,
        warmup=len(offering.sent) - len(measured),
        sent=len(offering.sent),
        ok=outcomes["ok"],
        refused=outcomes["refused"],
        failed=outcomes["failed"],
        lost=outcomes["unanswered"],
        not_sent=len(offering.not_sent),
        served=served_per_second(offering.sent, warmup, end),
        share=len(good) / due if due else 0.0,
        mean_ms=_ms(statistics.fmean(latencies)) if latencies else None,
        p50_ms=_ms(percentile(latencies, 50)),
        p99_ms=_ms(percentile(latencies, 99)),
        lateness_p99_ms=_ms(percentile([one.sent - one.due for one in measured], 99)),
        refused_p99_ms=_ms(percentile(_times_to_refusal(measured), 99)),
        kept_deadline=_kept(good, deadline),
    )


def served_per_second(sent: Sequence[Sent], begin: float, end: float) -> float:
    """Return the good answers/s that came between two moments, whenever they were asked for."""
    if end <= begin:
        return 0.0
    done = [one.done for one in sent if one.outcome == "ok" and one.done is not None]
    return sum(begin <= moment < end for moment in done) / (end - begin)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the least value that so many percent of them do not exceed; None of none."""
    if not values:
        return None
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]


def _times_to_refusal(sent: Sequence[Sent]) -> list[float]:
    return [_passed(one, one.sent) for one in sent if one.outcome == "refused"]


def _kept(good: Sequence[Sent], deadline: float | None) -> float | None:
    if deadline is None or not good:
        return None
    return sum(_passed(one, one.sent) <= deadline for one in good) / len(good)


def _passed(one: Sent, since: float) -> float:
    assert one.done is not None, "answered"
    return one.done - since


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
