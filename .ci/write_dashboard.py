"""Write the dashboard of deploy/ from the metric catalogue: `python .ci/write_dashboard.py`.

The names and descriptions of metrics come from the catalogue, so a panel never shows a metric that does not exist.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from varlen.telemetry.metrics import CountedMetric, Metric, SnapshotMetric

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

PATH = Path(__file__).resolve().parents[1] / "deploy" / "chart" / "files" / "dashboard.json"
COMMAND = "python .ci/write_dashboard.py"

# Recorded by files/rules.yaml.
LOAD = "varlen:load:ratio"
KV_RESERVED = "varlen:kv_reserved:ratio"

_SELECTOR = '{namespace=~"$namespace", model=~"$model"}'
# Prometheus names the replica `instance`, or its pod where it knows pods.
_REPLICA = "{{model}} {{pod}} {{instance}}"
_DATASOURCE: Json = {"type": "prometheus", "uid": "$datasource"}
_COLUMNS = 3
_WIDTH, _HEIGHT = 24 // _COLUMNS, 8
_SCHEMA_VERSION = 38
# Letters of the queries of a panel.
_NAMES = "ABCDEFGH"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time.

    Attributes:
        unit: Grafana's name of the unit.
        highest: upper end of the axis; None follows the values.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str
    highest: float | None = None


def _value(metric: Metric, title: str, unit: str = "short") -> Panel:
    """Return a panel with a gauge of each replica."""
    return Panel(title, unit, (Query(_of(metric), _REPLICA),), f"{metric.description}.")


def _rate(metrics: Sequence[Metric], title: str, unit: str) -> Panel:
    """Return a panel with sums of all replicas per second, by model and label value."""
    queries = tuple(
        Query(
            f"sum by ({', '.join(['model', *_label(metric)])}) (rate({_of(metric)}[$__rate_interval]))",
            f"{{{{model}}}} {_legend(metric)}",
        )
        for metric in metrics
    )
    description = " ".join(f"{metric.description}." for metric in metrics)
    return Panel(title, unit, queries, description)


def _quantiles(metric: Metric, title: str) -> Panel:
    """Return a panel with the median and 99th percentile of a histogram over all replicas."""
    buckets = f"sum by (le, model) (rate({metric.value}_bucket{_SELECTOR}[$__rate_interval]))"
    queries = tuple(
        Query(f"histogram_quantile({quantile}, {buckets})", f"{{{{model}}}} p{quantile * 100:g}")
        for quantile in (0.5, 0.99)
    )
    return Panel(title, "s", queries, f"{metric.description}.")


def _ratio(record: str, title: str, description: str) -> Panel:
    """Return a panel with a recorded ratio of each replica."""
    query = Query(f"{record}{_SELECTOR}", _REPLICA)
    return Panel(title, "percentunit", (query,), description, highest=1)


def _cache_hits() -> Panel:
    hits, joined, misses = (
        f"sum by (model) (rate({_of(metric)}[$__rate_interval]))"
        for metric in (
            SnapshotMetric.CACHE_HITS,
            SnapshotMetric.CACHE_JOINED,
            SnapshotMetric.CACHE_MISSES,
        )
    )
    query = Query(f"({hits} + {joined}) / ({hits} + {joined} + {misses})", "{{model}}")
    description = "Part of the sequences that the response cache answered, or that joined an equal one in flight."
    return Panel("Response cache hits", "percentunit", (query,), description, highest=1)


def _of(metric: Metric) -> str:
    return f"{metric.value}{_SELECTOR}"


def _label(metric: Metric) -> list[str]:
    return [metric.label] if metric.label else []


def _legend(metric: Metric) -> str:
    words = metric.value.removeprefix("varlen_").removesuffix("_total")
    return f"{{{{{metric.label}}}}}" if metric.label else words.replace("_", " ")


ROWS: dict[str, tuple[Panel, ...]] = {
    "Load": (
        _ratio(LOAD, "Load", "Part of the slots that ran batches: at 1 a replica can do no more."),
        _value(SnapshotMetric.QUEUED_SECONDS, "Queue", "s"),
        _value(SnapshotMetric.OPEN_REQUESTS, "Open requests"),
        _value(SnapshotMetric.QUEUED_TOKENS, "Queued tokens"),
        _value(SnapshotMetric.DRAINING, "Draining"),
        _rate([CountedMetric.WORKER_RESTARTS], "Restarts of workers", "cps"),
    ),
    "Requests": (
        _rate([CountedMetric.REQUESTS], "Requests by outcome", "reqps"),
        _rate([CountedMetric.REFUSED_REQUESTS], "Refused requests by reason", "reqps"),
        _quantiles(CountedMetric.REQUEST_LATENCY, "Latency"),
        _quantiles(CountedMetric.QUEUE_WAIT, "Wait in the queue"),
        _rate([CountedMetric.TOKENS], "Tokens", "cps"),
        _cache_hits(),
    ),
    "Generation": (
        _rate(
            [SnapshotMetric.PREFILL_TOKENS, SnapshotMetric.DECODE_TOKENS],
            "Prompt and generated tokens",
            "cps",
        ),
        _quantiles(CountedMetric.TIME_TO_FIRST_TOKEN, "Time to the first token"),
        _quantiles(CountedMetric.TIME_PER_OUTPUT_TOKEN, "Time per output token"),
        _ratio(KV_RESERVED, "KV memory", "Part of the KV blocks that is reserved for sequences."),
        _value(SnapshotMetric.WAITING_SEQUENCES, "Waiting sequences"),
        _rate([SnapshotMetric.PREEMPTIONS], "Preemptions", "cps"),
    ),
}


def dashboard() -> Json:
    """Return the dashboard in Grafana's JSON model."""
    panels: list[Json] = []
    top = 0
    for title, graphs in ROWS.items():
        panels.append(_row(len(panels) + 1, title, top))
        top += 1
        for place, graph in enumerate(graphs):
            row, column = divmod(place, _COLUMNS)
            panels.append(_graph(len(panels) + 1, graph, column * _WIDTH, top + row * _HEIGHT))
        top += -(-len(graphs) // _COLUMNS) * _HEIGHT
    return {
        "uid": "varlen",
        "title": "varlen",
        "description": f"Written by `{COMMAND}`. Load and KV memory need the recording rules beside this file.",
        "tags": ["varlen"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "schemaVersion": _SCHEMA_VERSION,
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Prometheus",
                    "query": "prometheus",
                },
                _variable("namespace", f"label_values({SnapshotMetric.SLOTS.value}, namespace)"),
                _variable(
                    "model",
                    f'label_values({SnapshotMetric.SLOTS.value}{{namespace=~"$namespace"}}, model)',
                ),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, query: str) -> Json:
    """Return a choice of label values, at first all, also for series without the label."""
    return {
        "type": "query",
        "name": name,
        "label": name.capitalize(),
        "datasource": _DATASOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _row(number: int, title: str, top: int) -> Json:
    return {
        "type": "row",
        "id": number,
        "title": title,
        "collapsed": False,
        "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
        "panels": [],
    }


def _graph(number: int, panel: Panel, left: int, top: int) -> Json:
    bounds: dict[str, Json] = {"unit": panel.unit, "min": 0}
    if panel.highest is not None:
        bounds["max"] = panel.highest
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": left, "y": top},
        "fieldConfig": {"defaults": bounds, "overrides": []},
        "targets": [
            {
                "refId": name,
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for name, query in zip(_NAMES, panel.queries, strict=False)
        ],
    }


def text() -> str:
    """Return the text of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> None:
    """Write the file."""
    PATH.write_text(text())


if __name__ == "__main__":
    main()
