"""The figures of the BENCH lines, and the tables on the screen."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Table

from varlen_bench.harness.rows import Cell
from varlen_bench.serving.rows import Row
from varlen_bench.serving.systems import (
    DP_PADDED,
    DYNAMIC_BATCHER,
    FIFO_PADDED,
    OURS,
    SYSTEMS,
    TOKEN_BUDGET,
)

_OUR_NAMES = {system.name for system in SYSTEMS if system.is_ours}


def bench_figures(rows: Sequence[Row], mixes: Sequence[tuple[str, str]]) -> dict[str, Cell]:
    """Return the keys of the BENCH line; None where a system that it needs did not run.

    Args:
        rows: of a run.
        mixes: name and label of each; all but `uniform` put their name before their keys.
    """
    figures: dict[str, Cell] = {}
    ordered = sorted(mixes, key=lambda mix: mix[0] != "uniform")
    for place, (name, label) in enumerate(ordered):
        prefix = "" if name == "uniform" else f"{name}_"
        found = _mix_figures([row for row in rows if row.lengths == label])
        figures |= {f"{prefix}{key}": value for key, value in found.items()}
        if place == 0:
            figures["lost"] = sum(row.lost or 0 for row in rows)
    return figures


def overload_figures(rows: Sequence[Row]) -> dict[str, Cell]:
    """Return the keys of the BENCH line of an overload: of each figure the worst."""
    loads = [row for row in rows if row.kind == "overload"]
    return {
        "refused_p99_ms": _rounded(_most(row.refused_p99_ms for row in loads)),
        "kept_deadline": _rounded(min((row.kept_deadline or 0.0 for row in loads), default=None)),
        "rss_flatness": _rounded(_most(row.rss_flatness for row in loads)),
        "failed": sum(row.failed or 0 for row in rows),
        "lost": sum(row.lost or 0 for row in rows),
    }


def result_of(rows: Iterable[Row], system: str) -> Row | None:
    """Return a system's result among the rows of one mix."""
    return next((row for row in rows if row.kind == "result" and row.system == system), None)


def best_peer(rows: Sequence[Row]) -> Row | None:
    """Return the result of the peer that sustains most, among the rows of one mix."""
    peers = [row for row in rows if row.kind == "result" and row.system not in _OUR_NAMES]
    return max(peers, key=lambda row: row.sustained or 0.0, default=None)


def paired_ratios(rows: Sequence[Row], attribute: str) -> list[float]:
    """Return ours over the token budget's, for each load and turn of one mix."""
    found: dict[tuple[float, int], dict[str, float]] = {}
    for row in rows:
        value = getattr(row, attribute)
        if row.kind == "paired" and row.offered is not None and value is not None:
            found.setdefault((row.offered, row.turn or 0), {})[row.system] = value
    return [
        values[OURS] / values[TOKEN_BUDGET]
        for values in found.values()
        if {OURS, TOKEN_BUDGET} <= values.keys()
    ]


def result_table(rows: Sequence[Row], label: str) -> Table:
    """Return the table of a mix's results."""
    view = Table(title=f"{label}: requests/s", title_justify="left")
    headings = (
        "sustained saturated machine light-p50 light-p99 batch padding error RSS-MiB cosine".split()
    )
    view.add_column("system")
    for heading in headings:
        view.add_column(heading.replace("-", " "), justify="right")
    here = [row for row in rows if row.lengths == label]
    for row in here:
        if row.kind == "result":
            style = "bold" if row.system == OURS else ""
            view.add_row(row.system, *result_cells(here, row), style=style)
    return view


def result_cells(rows: Sequence[Row], result: Row) -> list[str]:
    """Return what the tables say of a result, from the rows of its mix."""
    light = next((r for r in rows if r.system == result.system and r.kind == "load"), None)
    most = next((r for r in rows if r.system == result.system and r.kind == "most"), None)
    return [
        shown(result.sustained, ".1f"),
        shown(result.saturated, ".1f"),
        shown(_machine(rows, result.system), ".0f"),
        shown(light and light.p50_ms, ".0f"),
        shown(light and light.p99_ms, ".0f"),
        shown(most and most.mean_batch, ".1f"),
        shown(most and most.padding_share, ".0%"),
        shown(most and most.prediction_error, "+.0%"),
        shown(result.rss_mib, ",.0f"),
        shown(result.cosine_min, ".5f"),
    ]


def _machine(rows: Sequence[Row], system: str) -> float | None:
    """Return the machine's speed in the median of a system's turn, in GFLOP/s."""
    own = (row for row in rows if row.system == system and row.kind in ("closed", "load", "most"))
    speeds = [row.machine_gflops for row in own if row.machine_gflops is not None]
    return statistics.median(speeds) if speeds else None


def paired_table(rows: Sequence[Row]) -> Table:
    """Return the table of two policies under the same arrivals."""
    view = Table(title=f"{OURS} over {TOKEN_BUDGET}, same arrivals", title_justify="left")
    for heading in PAIRED_HEADINGS:
        view.add_column(heading, justify="left" if heading == "lengths" else "right")
    for cells in paired_summary(rows):
        view.add_row(*cells)
    return view


PAIRED_HEADINGS = ("lengths", "loads", "mean", "middle half", "p99", "middle half")


def paired_summary(rows: Sequence[Row]) -> list[list[str]]:
    """Return by mix: loads compared, and the geometric mean and the quartiles of the ratios of mean and p99 latency."""
    summary = []
    for label in dict.fromkeys(row.lengths for row in rows if row.kind == "paired"):
        here = [row for row in rows if row.lengths == label]
        means, p99s = (paired_ratios(here, name) for name in ("mean_ms", "p99_ms"))
        if means and p99s:
            summary.append([label, str(len(means)), *_with_spread(means), *_with_spread(p99s)])
    return summary


def _with_spread(ratios: Sequence[float]) -> tuple[str, str]:
    low, high = np.percentile(ratios, [25, 75])
    return f"{statistics.geometric_mean(ratios):.3f}", f"{low:.2f}-{high:.2f}"


def load_table(rows: Sequence[Row]) -> Table:
    """Return the table of every load."""
    view = Table(title="every load", title_justify="left")
    for heading, _, _ in LOAD_COLUMNS:
        view.add_column(heading, justify="right")
    for row in rows:
        if row.kind not in {"result", "failed"}:
            view.add_row(*load_cells(row))
    return view


# heading, attribute of a row, format
LOAD_COLUMNS = (
    ("lengths", "lengths", ""),
    ("system", "system", ""),
    ("load", "kind", ""),
    ("offered/s", "offered", ".1f"),
    ("served/s", "served", ".1f"),
    ("s", "seconds", ".0f"),
    ("sent", "sent", ","),
    ("ok", "ok", ","),
    ("refused", "refused", ","),
    ("failed", "failed", ","),
    ("lost", "lost", ","),
    ("not sent", "not_sent", ","),
    ("mean ms", "mean_ms", ",.0f"),
    ("p50", "p50_ms", ",.0f"),
    ("p99", "p99_ms", ",.0f"),
    ("lateness p99", "lateness_p99_ms", ",.1f"),
    ("batch", "mean_batch", ".1f"),
    ("padding", "padding_share", ".0%"),
    ("error", "prediction_error", "+.0%"),
)


def load_cells(row: Row) -> list[str]:
    """Return what the tables say of a load."""
    return [shown(getattr(row, attribute), form) for _, attribute, form in LOAD_COLUMNS]


def overload_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each overload."""
    return [
        f"{row.system}, {row.lengths}: {shown(row.offered, '.1f')} requests/s for {shown(row.seconds, '.0f')} s; "
        f"{row.ok:,} answered, {shown(row.kept_deadline, '.2%')} of them in time; {row.refused:,} refused, "
        f"p99 {shown(row.refused_p99_ms, '.1f')} ms; {row.failed:,} failed, {row.lost:,} lost, {row.not_sent:,} not "
        f"sent; memory apart by {shown(row.rss_flatness, '.2%')}"
        for row in rows
        if row.kind == "overload"
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what did not run or went wrong, and why."""
    return [
        " ".join(f"{row.lengths} {row.system} {row.kind}: {row.note}".split())
        for row in rows
        if row.note and (row.kind == "failed" or row.failed)
    ]


def shown(value: object, form: str) -> str:
    """Return a figure as tables have it, empty if there is none."""
    return "" if value is None else format(value, form)


def _mix_figures(rows: Sequence[Row]) -> dict[str, Cell]:
    ours, dynamic = result_of(rows, OURS), result_of(rows, DYNAMIC_BATCHER)
    dp_padded, fifo = result_of(rows, DP_PADDED), result_of(rows, FIFO_PADDED)
    mean, p99 = (_typical(paired_ratios(rows, name)) for name in ("mean_ms", "p99_ms"))
    return {
        "sustained_vs_dynamic_batcher": _ratio(ours, dynamic, "sustained"),
        "sustained_vs_best_peer": _ratio(ours, best_peer(rows), "sustained"),
        "dp_padded_vs_fifo_padded": _ratio(dp_padded, fifo, "saturated"),
        "dp_mean_vs_token_budget": _rounded(mean),
        "dp_p99_vs_token_budget": _rounded(p99),
    }


def _ratio(part: Row | None, whole: Row | None, attribute: str) -> float | None:
    values = [None if row is None else getattr(row, attribute) for row in (part, whole)]
    return _rounded(values[0] / values[1]) if values[0] is not None and values[1] else None


def _typical(ratios: Sequence[float]) -> float | None:
    return statistics.geometric_mean(ratios) if ratios else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
