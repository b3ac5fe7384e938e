"""The tables of a run, for the console and the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from rich.table import Table as ConsoleTable

from varlen_bench.harness.summary import shown
from varlen_bench.serving.figures import paired_ratios
from varlen_bench.serving.rows import Row
from varlen_bench.serving.systems import OURS, TOKEN_BUDGET

# heading, attribute of a row, format
_RESULTS = (
    ("system", "system", ""),
    ("sustained/s", "sustained", ".1f"),
    ("saturated/s", "saturated", ".1f"),
    ("machine GFLOP/s", "machine_gflops", ".0f"),
    ("light p50 ms", "p50_ms", ".0f"),
    ("light p99 ms", "p99_ms", ".0f"),
    ("batch", "mean_batch", ".1f"),
    ("padding", "padding_share", ".0%"),
    ("prediction error", "prediction_error", "+.0%"),
    ("RSS MiB", "rss_mib", ",.0f"),
    ("cosine", "cosine_min", ".5f"),
)
_LOADS = (
    ("system", "system", ""),
    ("lengths", "lengths", ""),
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
    ("mean ms", "mean_ms", ",.1f"),
    ("p50 ms", "p50_ms", ",.1f"),
    ("p99 ms", "p99_ms", ",.1f"),
    ("lateness p99 ms", "lateness_p99_ms", ",.1f"),
    ("batch", "mean_batch", ".1f"),
    ("padding", "padding_share", ".0%"),
    ("prediction error", "prediction_error", "+.0%"),
    ("kept deadline", "kept_deadline", ".2%"),
    ("refused p99 ms", "refused_p99_ms", ".1f"),
    ("RSS flatness", "rss_flatness", ".2%"),
)
_PAIRED = ("lengths", "loads", "mean", "middle half", "p99", "middle half")


@dataclass(frozen=True, slots=True)
class Table:
    """A title, headings, and the cells of each line."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]

    def for_console(self) -> ConsoleTable:
        """Return the table as rich prints it, with the lines of our system in bold."""
        view = ConsoleTable(title=self.title, title_justify="left")
        for number, heading in enumerate(self.headings):
            view.add_column(heading, justify="right" if number else "left")
        for line in self.lines:
            view.add_row(*line, style="bold" if line[0] == OURS else "")
        return view


def summary_tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of results by mix, of two policies in turns, of overloads and of the cross-check."""
    found = []
    for label, of_mix in _by_mix(rows):
        results = [_with_loads(row, of_mix) for row in of_mix if row.kind == "result"]
        found.append(_table(f"{label} tokens", _RESULTS, results))
    found.append(_paired(rows))
    found.append(_table("Overload", _LOADS, [row for row in rows if row.kind == "overload"]))
    for own, row in pairwise(rows):
        if row.kind == "perf_analyzer":
            found.append(_table("Beside perf_analyzer", _LOADS, [own, row]))
    return [table for table in found if table.lines]


def load_table(rows: Iterable[Row]) -> Table:
    """Return the table of every load."""
    loads = [row for row in rows if row.kind not in {"result", "failed"}]
    return _table("every load", _LOADS, loads)


def notes(rows: Iterable[Row]) -> list[str]:
    """Return what did not run or failed, and why."""
    return [
        " ".join(f"{row.lengths} {row.system} {row.kind}: {row.note}".split())
        for row in rows
        if row.note and (row.kind == "failed" or row.failed)
    ]


def _table(title: str, columns: Iterable[tuple[str, str, str]], rows: Sequence[Row]) -> Table:
    """Return the table of some rows, without columns that are empty."""
    cells = {
        heading: [shown(getattr(row, attribute), form) for row in rows]
        for heading, attribute, form in columns
    }
    filled = {heading: column for heading, column in cells.items() if any(column)}
    return Table(title, list(filled), list(zip(*filled.values(), strict=True)))


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
        means, p99s = (paired_ratios(of_mix, name) for name in ("mean_ms", "p99_ms"))
        if means and p99s:
            lines.append([label, str(len(means)), *_with_spread(means), *_with_spread(p99s)])
    return Table(f"Latency of {OURS} over {TOKEN_BUDGET}, same arrivals", _PAIRED, lines)


def _with_spread(ratios: Sequence[float]) -> tuple[str, str]:
    low, high = np.percentile(ratios, [25, 75])
    return f"{statistics.geometric_mean(ratios):.3f}", f"{low:.2f}-{high:.2f}"
