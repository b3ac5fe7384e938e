"""Tables and notes of a run, and its HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise

import numpy as np

from varlen_bench.harness.rows import Cell, Provenance, cell
from varlen_bench.harness.tables import csv_table
from varlen_bench.serving import picture
from varlen_bench.serving.figures import lone_times, paired_ratios
from varlen_bench.serving.rows import Row
from varlen_bench.serving.systems import OURS
from varlen_tools import html_page, pictures
from varlen_tools.tables import Table

_RESULTS = (
    "system sustained saturated machine_gflops p50_ms p99_ms mean_batch padding_share prediction_error "
    "rss_mib cosine_min"
).split()
_LOADS = [field.name for field in fields(Row)]
_PAIRED = ("lengths", "other", "loads", "mean", "middle half", "p99", "middle half")


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of a run, without the table of every load."""
    found = []
    for label, of_mix in _by_mix(rows):
        results = [_with_loads(row, of_mix) for row in of_mix if row.kind == "result"]
        found.append(_table(f"{label} tokens; p50 and p99 of the light load", _RESULTS, results))
    found.append(_paired(rows))
    found.append(_lone(rows))
    found.append(_table("Overload", _LOADS, (row for row in rows if row.kind == "overload")))
    for own, row in pairwise(rows):
        if row.kind == "perf_analyzer":
            found.append(_table("Beside perf_analyzer", _LOADS, (own, row)))
    return [table for table in found if table.lines]


def notes(rows: Iterable[Row]) -> list[str]:
    """Return what did not run or failed, and why."""
    return [
        " ".join(f"{row.lengths} {row.system} {row.kind}: {row.note}".split())
        for row in rows
        if row.note and (row.kind == "failed" or row.failed)
    ]


def page(rows: Sequence[Row], figures: Mapping[str, Cell], run: Provenance) -> str:
    """Return the page: figures of the BENCH line, picture, tables, every load."""
    origin = f"{run.date}, {run.revision}, {run.cpu}; {run.versions}; {run.command}"
    keys = [[key, cell(value)] for key, value in figures.items()]
    parts = [html_page.paragraph(origin), html_page.table(["key", "value"], keys)]
    if any(row.kind == "load" for row in rows):
        drawn = pictures.embedded(lambda: picture.draw(rows), "served and latency by load")
        parts.append(drawn)
    for table in tables(rows):
        parts += [html_page.heading(table.title), table.html()]
    if lines := notes(rows):
        parts += [html_page.heading("What did not run"), html_page.bullets(lines)]
    loads = _table("every load", _LOADS, (r for r in rows if r.kind not in {"result", "failed"}))
    parts += [
        html_page.folded(loads.title, loads.html()),
        html_page.paragraph("docs/benchmarks/serving.md has the method."),
    ]
    return html_page.page("Serving under load", parts)


def _table(title: str, columns: Iterable[str], rows: Iterable[Row]) -> Table:
    return csv_table(title, columns, map(asdict, rows))


def _by_mix(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    labels = dict.fromkeys(row.lengths for row in rows if row.lengths)
    return [(label, [row for row in rows if row.lengths == label]) for label in labels]


def _with_loads(result: Row, rows: Sequence[Row]) -> Row:
    """Return a result with figures of its light load, its saturation, and its machine."""
    own = [row for row in rows if row.system == result.system and row.kind != "paired"]
    light = next((row for row in own if row.kind == "load"), result)
    most = next((row for row in own if row.kind == "most"), result)
    speeds = [row.machine_gflops for row in own if row.machine_gflops is not None]
    return replace(
        result,
        machine_gflops=statistics.median(speeds) if speeds else None,
        p50_ms=light.p50_ms,
        p99_ms=light.p99_ms,
        mean_batch=most.mean_batch,
        padding_share=most.padding_share,
        prediction_error=most.prediction_error,
    )


def _paired(rows: Sequence[Row]) -> Table:
    """Return by mix: geometric mean and quartiles of the ratios of mean and p99 latency."""
    lines = []
    for label, of_mix in _by_mix(rows):
        paired = dict.fromkeys(row.system for row in of_mix if row.kind == "paired")
        for other in paired:
            if other == OURS:
                continue
            means, p99s = (paired_ratios(of_mix, name, other) for name in ("mean_ms", "p99_ms"))
            if means and p99s:
                figures = [*_with_quartiles(means), *_with_quartiles(p99s)]
                lines.append([label, other, str(len(means)), *figures])
    return Table(f"Latency of {OURS} over another system, same arrivals", _PAIRED, lines)


def _lone(rows: Sequence[Row]) -> Table:
    """Return the latency of requests one by one, and its range over the turns."""
    lone = [row for row in rows if row.kind == "lone"]
    labels = list(dict.fromkeys(row.lengths for row in lone))
    lines = []
    for system in dict.fromkeys(row.system for row in lone):
        line = [system]
        for label in labels:
            own = [row for row in lone if (row.system, row.lengths) == (system, label)]
            middle = lone_times(own).get(system)
            values = [row.p50_ms for row in own if row.p50_ms is not None]
            line.append(
                "n/a" if middle is None else f"{middle:.1f} ({min(values):.1f}-{max(values):.1f})"
            )
        lines.append(line)
    return Table("Requests one by one: p50 latency in ms", ("system", *labels), lines)


def _with_quartiles(ratios: Sequence[float]) -> tuple[str, str]:
    low, high = np.percentile(ratios, [25, 75])
    return f"{statistics.geometric_mean(ratios):.3f}", f"{low:.2f}-{high:.2f}"
