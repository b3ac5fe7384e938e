"""Figures of the BENCH lines; tables, notes, picture and page of a run.

The left column of the picture is figure 7 of the TurboTransformers authors' report in Chinese: a system leaves the
diagonal where it is saturated.
"""

from __future__ import annotations

import colorsys
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from varlen_bench import html_page, pictures
from varlen_bench.harness.rows import Cell, Provenance, cell, csv_table
from varlen_bench.harness.summary import ratio, rounded, worst
from varlen_bench.serving.server import (
    BEFORE,
    DYNAMIC_BATCHER,
    FIFO_PADDED,
    OURS,
    OURS_FP32,
    OURS_INT8,
    OURS_PADDED,
    SYSTEMS,
    TOKEN_BUDGET,
    ServedSystem,
)
from varlen_bench.workers.serving import GOAL_P99_MS, Row
from varlen_bench.workloads import Mix
from varlen_tools.tables import Table


def bench_figures(rows: Sequence[Row], mixes: Sequence[Mix]) -> dict[str, Cell]:
    """Return the keys of the BENCH line; a mix other than `uniform` is a prefix."""
    figures: dict[str, Cell] = {}
    for mix in sorted(mixes, key=lambda mix: mix.name != "uniform"):
        prefix = "" if mix.name == "uniform" else f"{mix.name}_"
        of_mix = _mix_figures([row for row in rows if row.lengths == mix.label])
        figures |= {f"{prefix}{key}": value for key, value in of_mix.items()}
        # once, after the first mix
        figures["lost"] = sum(row.lost or 0 for row in rows)
    return figures


def overload_figures(rows: Sequence[Row]) -> dict[str, Cell]:
    """Return the keys of the BENCH line of an overload: the worst of each figure."""
    loads = [row for row in rows if row.kind == "overload"]
    return {
        "refused_p99_ms": rounded(worst(max, (row.refused_p99_ms for row in loads))),
        "kept_deadline": rounded(worst(min, (row.kept_deadline or 0.0 for row in loads))),
        "rss_flatness": rounded(worst(max, (row.rss_flatness for row in loads))),
        "failed": sum(row.failed or 0 for row in rows),
        "lost": sum(row.lost or 0 for row in rows),
    }


def lone_figures(rows: Sequence[Row], mixes: Sequence[Mix]) -> dict[str, Cell]:
    """Return the keys of `--lone`: our time over the fastest peer's."""
    figures: dict[str, Cell] = {}
    for mix in mixes:
        times = lone_times([row for row in rows if row.lengths == mix.label])
        for ours, precision in ((OURS_FP32, "fp32"), (OURS_INT8, "int8")):
            peers = (SYSTEMS[name] for name in times if not SYSTEMS[name].is_ours)
            fastest = min(
                (times[each.name] for each in peers if each.precision == precision), default=None
            )
            key = f"{mix.name}_{precision}_vs_{precision}_peer"
            figures[key] = rounded(ratio(times.get(ours), fastest))
    figures["lost"] = sum(row.lost or 0 for row in rows)
    return figures


def lone_times(rows: Iterable[Row]) -> dict[str, float]:
    """Return the latency of each system in ms, among the rows of one length."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if row.kind == "lone" and row.p50_ms is not None:
            times.setdefault(row.system, []).append(row.p50_ms)
    return {system: statistics.median(each) for system, each in times.items()}


def best_peer(rows: Iterable[Row], precision: str = "") -> Row | None:
    """Return the result of the peer that sustains most, among the rows of one mix.

    Args:
        precision: precision of the peers that count; all if empty.
    """
    results = [(row, SYSTEMS[row.system]) for row in rows if row.kind == "result"]
    peers = [
        row for row, system in results if not system.is_ours and precision in {"", system.precision}
    ]
    return max(peers, key=lambda row: row.sustained or 0.0, default=None)


def paired_ratios(rows: Iterable[Row], attribute: str, other: str = TOKEN_BUDGET) -> list[float]:
    """Return `varlen-dp` over another system of the paired loads, by load and turn."""
    loads: dict[tuple[float | None, int | None], dict[str, float]] = {}
    for row in rows:
        value = getattr(row, attribute)
        if row.kind == "paired" and value is not None:
            loads.setdefault((row.offered, row.turn), {})[row.system] = value
    return [
        values[OURS] / values[other] for values in loads.values() if {OURS, other} <= values.keys()
    ]


def _mix_figures(rows: Sequence[Row]) -> dict[str, Cell]:
    results = {row.system: row for row in rows if row.kind == "result"}

    def over(whole: Row | None, attribute: str, part: str = OURS) -> float | None:
        values = (getattr(row, attribute, None) for row in (results.get(part), whole))
        return rounded(ratio(*values))

    def mean_ratio(attribute: str, other: str) -> float | None:
        ratios = paired_ratios(rows, attribute, other)
        return rounded(statistics.geometric_mean(ratios)) if ratios else None

    dynamic_batcher, fifo = results.get(DYNAMIC_BATCHER), results.get(FIFO_PADDED)
    if any(row.system == BEFORE for row in rows):
        return {
            "mean_vs_before": mean_ratio("mean_ms", BEFORE),
            "p99_vs_before": mean_ratio("p99_ms", BEFORE),
        }
    return {
        "sustained_vs_dynamic_batcher": over(dynamic_batcher, "sustained"),
        "sustained_vs_best_peer": over(best_peer(rows), "sustained"),
        "fp32_vs_dynamic_batcher": over(dynamic_batcher, "sustained", OURS_FP32),
        "fp32_vs_best_fp32_peer": over(best_peer(rows, "fp32"), "sustained", OURS_FP32),
        "int8_vs_best_fp32_peer": over(best_peer(rows, "fp32"), "sustained", OURS_INT8),
        "int8_vs_best_int8_peer": over(best_peer(rows, "int8"), "sustained", OURS_INT8),
        "dp_padded_vs_fifo_padded": over(fifo, "saturated", OURS_PADDED),
        "dp_mean_vs_token_budget": mean_ratio("mean_ms", TOKEN_BUDGET),
        "dp_p99_vs_token_budget": mean_ratio("p99_ms", TOKEN_BUDGET),
    }


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ours in blues and greens, peers in warm colors; the dynamic batcher of today is red. Readable on light and dark.
_COLORS = {
    "varlen-fp32": "#5a6fd8",
    "varlen-int8": "#9a5fd0",
    "varlen-int8-eight": "#c49be6",
    "varlen-dp": "#1f6fd6",
    "varlen-token-budget": "#2fb0d8",
    "varlen-dp-padded": "#12906a",
    "varlen-fifo-padded": "#6fb58f",
    "varlen-none": "#8b8fd6",
    "transformers-fp32-dynamic": "#d62f3c",
    "transformers-fp32-single": "#e8837a",
    "transformers-bf16-dynamic": "#9c6a38",
    "transformers-bf16-single": "#c9a26b",
}
# The hues of the strongest peers; their systems differ in lightness.
_HUES = {"onnxruntime": 0.09, "openvino": 0.91}
_DARKEST, _LIGHTEST = 0.3, 0.75
_GUIDE = {"color": "#8f8f8f", "linewidth": 0.9, "linestyle": ":"}
_PANELS = (("served/s", "served"), ("mean latency, ms", "mean_ms"), ("p99 latency, ms", "p99_ms"))
# Beyond saturation the latency comes from the backlog.
_LONGEST_MS = 5000.0


def _peer_colors() -> dict[str, str]:
    """Return the color of each of the strongest peers."""
    found: dict[str, str] = {}
    for engine, hue in _HUES.items():
        names = [system.name for system in SYSTEMS.values() if system.engine == engine]
        for name, lightness in zip(
            names, np.linspace(_DARKEST, _LIGHTEST, len(names)), strict=True
        ):
            parts = colorsys.hls_to_rgb(hue, float(lightness), 0.75)
            found[name] = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
    return found


COLORS = {**_COLORS, **_peer_colors()}


def draw(rows: Sequence[Row]) -> Figure:
    """Return a figure with a line of panels for each mix."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(row.lengths for row in rows if row.kind == "load"))
    figure = Figure(figsize=(15, 4.4 * len(labels) + 0.9), layout="constrained")
    panels = figure.subplots(len(labels), len(_PANELS), squeeze=False)
    drawn: dict[str, Any] = {}
    for line, label in zip(panels, labels, strict=True):
        for axes, (title, attribute) in zip(line, _PANELS, strict=True):
            for system in SYSTEMS.values():
                if points := curve(rows, label, system.name, attribute):
                    (drawn[system.name],) = axes.plot(*zip(*points, strict=True), **_style(system))
            _finish_panel(axes, rows, label, attribute)
            axes.set_title(f"{label} tokens: {title}")
    names = [name for name in SYSTEMS if name in drawn]
    figure.legend([drawn[name] for name in names], names, loc="outside lower center", ncols=4)
    return figure


def curve(
    rows: Sequence[Row], label: str, system: str, attribute: str
) -> list[tuple[float, float]]:
    """Return (offered, figure) of a system's open loads on one mix, if not given up."""
    return sorted(
        (row.offered, value)
        for row in rows
        if (row.lengths, row.system) == (label, system)
        and (row.kind == "most" or (row.kind == "load" and not row.not_sent))
        and row.offered is not None
        and (value := getattr(row, attribute)) is not None
    )


def _finish_panel(axes: Any, rows: Sequence[Row], label: str, attribute: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    highest = max((row.offered or 0.0 for row in rows if row.lengths == label), default=1.0)
    axes.set_xlabel("offered/s")
    axes.set_xlim(0, highest * 1.02)
    if attribute == "served":
        _, top = axes.get_ylim()
        axes.plot([0, highest], [0, highest], **_GUIDE)
        axes.set_ylim(0, top)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, _LONGEST_MS))
    if attribute == "p99_ms":
        axes.axhline(GOAL_P99_MS, **_GUIDE)


def _style(system: ServedSystem) -> dict[str, Any]:
    return {
        "color": COLORS[system.name],
        "linewidth": 2.6 if system.name == OURS else 1.4,
        "linestyle": "-" if system.is_ours else "--",
        "marker": "o" if system.is_ours else "s",
        "markersize": 4,
        "zorder": 3 if system.is_ours else 2,
    }


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


def reason(error: Exception) -> str:
    """Return the line of an error that explains most, such as the server's own reason."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "failed to load '" in line and ": " in line]
    text = reasons[0].split("version 1: ")[-1] if reasons else (lines or [type(error).__name__])[0]
    # a Python traceback follows the reason, on the same line of the log
    return text.split("\\n\\nAt:")[0].strip(' "')


def page(rows: Sequence[Row], figures: Mapping[str, Cell], run: Provenance) -> str:
    """Return the page: figures of the BENCH line, picture, tables, every load."""
    origin = f"{run.date}, {run.revision}, {run.cpu}; {run.versions}; {run.command}"
    keys = [[key, cell(value)] for key, value in figures.items()]
    parts = [html_page.paragraph(origin), html_page.table(["key", "value"], keys)]
    if any(row.kind == "load" for row in rows):
        drawn = pictures.embedded(lambda: draw(rows), "served and latency by load")
        parts.append(drawn)
    for table in tables(rows):
        parts += [html_page.heading(table.title), html_page.table(table.headings, table.lines)]
    if lines := notes(rows):
        parts += [html_page.heading("What did not run"), html_page.bullets(lines)]
    loads = _table("every load", _LOADS, (r for r in rows if r.kind not in {"result", "failed"}))
    parts += [
        html_page.folded(loads.title, html_page.table(loads.headings, loads.lines)),
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
