"""The server's /metrics page: the series of one model, and rates between two samples.

The page is Prometheus text. It holds the series of this backend (`varlen_*`) and the server's own (`nv_*`); both have
the label `model`.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SERIES = re.compile(r"(\w+)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """Counters and gauges of one model, summed over its versions and instances."""

    seconds: float
    """When the page was read, by time.monotonic()."""
    queued_requests: float
    queued_tokens: float
    requests: Mapping[str, float]
    """Requests since the server started, by outcome."""
    tokens: float
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests and tokens per second between two samples."""

    requests: float
    tokens: float


def fetch_metrics(url: str, *, timeout: float) -> str | None:
    """Return the metrics page; None without a response, as when metrics are off."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            page: bytes = response.read()
    except (OSError, ValueError):
        return None
    return page.decode(errors="replace")


def model_series(page: str, model: str) -> dict[str, float]:
    """Return the value of each metric of `model`, by metric name, without histogram buckets.

    Series of one metric that differ in other labels (version, instance, outcome) are summed. A
    histogram is left with its `_sum` and `_count`.
    """
    totals: dict[str, float] = {}
    for name, labels, value in _of_model(page, model):
        if "le" not in labels:
            totals[name] = totals.get(name, 0.0) + value
    return totals


def read_metrics(page: str, model: str) -> MetricsSample | None:
    """Return the sample of `model`; None when the page has no `varlen_*` series of it."""
    totals = model_series(page, model)
    if not any(name.startswith("varlen_") for name in totals):
        return None
    outcomes: dict[str, float] = {}
    for name, labels, value in _of_model(page, model):
        if name == "varlen_requests_total":
            outcome = labels.get("outcome", "unknown")
            outcomes[outcome] = outcomes.get(outcome, 0.0) + value
    return MetricsSample(
        seconds=time.monotonic(),
        queued_requests=totals.get("varlen_queued_requests", 0.0),
        queued_tokens=totals.get("varlen_queued_tokens", 0.0),
        requests=outcomes,
        tokens=totals.get("varlen_tokens_total", 0.0),
        is_draining=totals.get("varlen_draining", 0.0) > 0,
    )


def rates(before: MetricsSample, after: MetricsSample) -> Rates:
    """Return the rates between two samples; a counter that decreased was reset to 0."""
    seconds = max(after.seconds - before.seconds, 1e-9)

    def per_second(old: float, new: float) -> float:
        return (new - old if new >= old else new) / seconds

    return Rates(
        requests=per_second(sum(before.requests.values()), sum(after.requests.values())),
        tokens=per_second(before.tokens, after.tokens),
    )


def all_series(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield (metric name, labels, value) for each series of any model."""
    for line in page.splitlines():
        if series := _SERIES.match(line):
            yield series[1], dict(_LABEL.findall(series[2])), float(series[3])


def pages_by_model(page: str) -> dict[str, str]:
    """Return the lines of each model, by its name.

    One pass is enough for many models: each is then read from its own lines.
    """
    lines: dict[str, list[str]] = {}
    for line in page.splitlines():
        if series := _SERIES.match(line):
            model = dict(_LABEL.findall(series[2])).get("model", "")
            lines.setdefault(model, []).append(line)
    return {model: "\n".join(found) for model, found in lines.items()}


def _of_model(page: str, model: str) -> Iterator[tuple[str, dict[str, str], float]]:
    return (series for series in all_series(page) if series[1].get("model") == model)
