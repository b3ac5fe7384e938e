"""The server's /metrics page, as far as `varlen status` needs it.

Two samples, some seconds apart, give rates. The page is Prometheus text; only the varlen_ series of
one model are read.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

_SERIES = re.compile(r"^(varlen_\w+)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """The counters and gauges of one model, summed over its versions and instances, at one moment."""

    at: float
    """time.monotonic(), seconds."""
    queued_requests: float
    queued_tokens: float
    requests: Mapping[str, float]
    """Requests since the server started, by outcome."""
    sequences: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened per second between two samples."""

    requests: float
    sequences: float
    tokens: float


def fetch_metrics(url: str, *, timeout: float) -> str | None:
    """Return the metrics page; None when nothing answers there, as with metrics off."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            page: bytes = answer.read()
    except (OSError, ValueError):
        return None
    return page.decode(errors="replace")


def read_metrics(page: str, model: str) -> MetricsSample | None:
    """Return the sample of `model`, None when the page has no varlen series of it."""
    totals: dict[str, float] = {}
    outcomes: dict[str, float] = {}
    for line in page.splitlines():
        series = _SERIES.match(line)
        if series is None:
            continue
        labels = dict(_LABEL.findall(series[2] or ""))
        if labels.get("model") != model:
            continue
        totals[series[1]] = totals.get(series[1], 0.0) + float(series[3])
        if series[1] == "varlen_requests_total":
            outcome = labels.get("outcome", "unknown")
            outcomes[outcome] = outcomes.get(outcome, 0.0) + float(series[3])
    if not totals:
        return None
    return MetricsSample(
        at=time.monotonic(),
        queued_requests=totals.get("varlen_queued_requests", 0.0),
        queued_tokens=totals.get("varlen_queued_tokens", 0.0),
        requests=outcomes,
        sequences=totals.get("varlen_sequences_total", 0.0),
        tokens=totals.get("varlen_tokens_total", 0.0),
    )


def rates(before: MetricsSample, after: MetricsSample) -> Rates:
    """Return the rates between two samples; a counter that went back counts from zero."""
    seconds = max(after.at - before.at, 1e-9)

    def per_second(old: float, new: float) -> float:
        return (new - old if new >= old else new) / seconds

    return Rates(
        requests=per_second(sum(before.requests.values()), sum(after.requests.values())),
        sequences=per_second(before.sequences, after.sequences),
        tokens=per_second(before.tokens, after.tokens),
    )
