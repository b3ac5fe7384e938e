"""The figures of the BENCH line, and the tables on the screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from varlen_bench.harness.rows import Cell
from varlen_bench.memory.cases import OURS
from varlen_bench.memory.rows import Row

_MIB = 1 << 20
_STUB = "stub"
# heading, attribute of a row, format
_MEMORY = (
    ("weights", "weights_mib", ",.0f"),
    ("peak above", "peak_mib", ",.1f"),
    ("in use", "allocated_mib", ",.1f"),
    ("x PyTorch", "vs_pytorch", ".2f"),
    ("asked, longest", "asked_mib_longest", ",.1f"),
    ("seconds", "seconds", ",.1f"),
)
_ARENA = (
    ("bound, largest", "bound_largest_mib", ",.1f"),
    ("reserved", "reserved_mib", ",.1f"),
    ("x bound", "reserved_vs_bound", ".2f"),
    ("plans x bound", "footprint_vs_bound", ".3f"),
    ("most", "footprint_vs_bound_max", ".3f"),
    ("new a request", "new_mib_per_request", ",.2f"),
    ("planning", "plan_share", ".3%"),
    ("speed x no arena", "vs_no_arena", ".3f"),
    ("p20", "vs_no_arena_p20", ".3f"),
    ("p80", "vs_no_arena_p80", ".3f"),
)


def bench_figures(rows: Sequence[Row]) -> dict[str, Cell]:
    """Return the keys of the BENCH line: the worst of each figure, None if nobody has it."""
    ours = [row for row in rows if row.system == OURS]
    stub = [row for row in rows if row.system == _STUB]
    new = _worst(max, [row.new_mib_per_request for row in ours])
    return {
        "footprint_vs_bound": _rounded(_worst(max, [row.footprint_vs_bound for row in ours])),
        "vs_pytorch": _rounded(_worst(max, [row.vs_pytorch for row in ours])),
        "plan_share": _rounded(_worst(max, [row.plan_share for row in ours]), digits=6),
        "speed_vs_no_arena": _rounded(_worst(min, [row.vs_no_arena for row in ours])),
        "new_bytes_per_request": None if new is None else round(new * _MIB),
        "rss_flatness": _rounded(_worst(max, [row.rss_flatness for row in stub])),
    }


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of what systems take, and of the arena; sizes in MiB."""
    ran = [row for row in rows if row.weights_mib is not None]
    planned = [row for row in rows if row.new_mib_per_request is not None]
    return [
        _table("memory above weights, MiB", ran, _MEMORY),
        _table("the arena, MiB", planned, _ARENA),
    ]


def soak_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each process of the server."""
    return [
        f"{row.system} of {row.encoder}: {row.rss_least_mib:,.1f} to {row.rss_most_mib:,.1f} MiB resident over "
        f"{row.requests:,} requests, apart by {row.rss_flatness:.2%} of {row.rss_median_mib:,.1f}; "
        f"{row.peak_mib:,.1f} at most"
        for row in rows
        if row.rss_flatness is not None
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what did not run, and why."""
    return [
        " ".join(f"{row.encoder} {row.batch or ''} {row.system}: {row.note}".split())
        for row in rows
        if row.note
    ]


def _worst(choose: Callable[[list[float]], float], values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _table(title: str, rows: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> Table:
    view = Table(title=title, title_justify="left")
    for heading in ("encoder", "batch", "requests", "system"):
        view.add_column(heading, justify="left" if heading in {"encoder", "system"} else "right")
    for heading, _, _ in columns:
        view.add_column(heading, justify="right")
    for row in rows:
        told = row.encoder, str(row.batch), str(row.requests), row.system
        cells = [_shown(getattr(row, attribute), form) for _, attribute, form in columns]
        view.add_row(*told, *cells, style="bold" if row.system == OURS else "")
    return view


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
