"""The CSV row of a load, and its figures from the records of its requests."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from varlen_bench.harness.generator import LATE_SECONDS, LoadRecord, RequestRecord
from varlen_bench.harness.summary import percentile_ms, ratio
from varlen_bench.serving.loads import IN_FLIGHT, WARMUP_SECONDS, Kind, Load

# A sustained load has at most this p99, and at least this share of good answers.
GOAL_P99_MS = 1000 * LATE_SECONDS
_GOAL_SHARE = 0.98


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the CSV; docs/benchmarks/serving.md explains its columns."""

    lengths: str
    system: str
    kind: Kind
    offered: float | None = None
    seconds: float | None = None
    warmup: int | None = None
    sent: int | None = None
    ok: int | None = None
    refused: int | None = None
    failed: int | None = None
    lost: int | None = None
    not_sent: int | None = None
    served: float | None = None
    share: float | None = None
    mean_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    lateness_p99_ms: float | None = None
    refused_p99_ms: float | None = None
    kept_deadline: float | None = None
    mean_batch: float | None = None
    padding_share: float | None = None
    prediction_error: float | None = None
    rss_mib: float | None = None
    rss_flatness: float | None = None
    machine_gflops: float | None = None
    cosine_min: float | None = None
    sustained: float | None = None
    saturated: float | None = None
    turn: int | None = None
    note: str = ""

    @property
    def is_sustained(self) -> bool:
        """Whether nearly all requests are answered quickly, and every request is answered."""
        if self.lost or self.share is None or self.p99_ms is None:
            return False
        return self.share >= _GOAL_SHARE and self.p99_ms <= GOAL_P99_MS

    @property
    def capacity(self) -> float:
        """Requests/s of a closed loop, also if no answer came in the measured seconds."""
        return self.served or (self.ok or 0) / ((self.seconds or 0.0) + IN_FLIGHT)


def load_row(load: Load, system: str, record: LoadRecord, end: float | None = None) -> Row:
    """Return the row of a load; `end` ends its measured seconds."""
    if end is None:
        end = max(WARMUP_SECONDS, record.end) if record.is_given_up else load.end
    outcomes = Counter(request.outcome for request in record.requests)
    measured = [request for request in record.requests if request.due >= WARMUP_SECONDS]
    good = [request for request in measured if request.outcome == "ok"]
    refused = [request for request in measured if request.outcome == "refused"]
    due = len(measured) + sum(moment >= WARMUP_SECONDS for moment in record.not_sent)
    latencies = [request.latency() for request in good]
    note = ["given up: too many were late"] if record.is_given_up else []
    return Row(
        load.mix.label,
        system,
        load.kind,
        offered=load.rate,
        seconds=end - WARMUP_SECONDS,
        warmup=len(record.requests) - len(measured),
        sent=len(record.requests),
        ok=outcomes["ok"],
        refused=outcomes["refused"],
        failed=outcomes["failed"],
        lost=outcomes["unanswered"],
        not_sent=len(record.not_sent),
        served=_served(record.requests, end),
        share=len(good) / due if due else 0.0,
        mean_ms=1000 * statistics.fmean(latencies) if latencies else None,
        p50_ms=percentile_ms(latencies, 50),
        p99_ms=percentile_ms(latencies, 99),
        lateness_p99_ms=percentile_ms([request.sent - request.due for request in measured], 99),
        refused_p99_ms=percentile_ms([request.latency(since_sent=True) for request in refused], 99),
        kept_deadline=None if load.deadline_ms is None else _kept(good, load.deadline_ms),
        note="; ".join([*note, *record.reasons]),
    )


def _served(requests: Iterable[RequestRecord], end: float) -> float:
    """Return the good answers/s that came in the measured seconds, whenever they were asked for."""
    if end <= WARMUP_SECONDS:
        return 0.0
    done = [request.done or 0.0 for request in requests if request.outcome == "ok"]
    return sum(WARMUP_SECONDS <= moment < end for moment in done) / (end - WARMUP_SECONDS)


def _kept(good: Sequence[RequestRecord], deadline_ms: int) -> float | None:
    kept = (request.latency(since_sent=True) <= deadline_ms / 1000 for request in good)
    return ratio(sum(kept), len(good))
