"""CSV rows, keys of the BENCH line, and tables; see docs/benchmarks/memory.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from varlen_bench.harness.resident import MIB
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import ratio, rounded, worst
from varlen_bench.harness.tables import Table
from varlen_bench.memory.cases import OURS, PEER, Case

EXACT, STUB, SERVER = "exact-arena", "stub", "server"
_NAMES = ("encoder", "batch", "requests", "system")
# Columns of each table after the names; it has the rows that have the first of them.
_TABLES = {
    "memory above weights": "weights_mib peak_mib allocated_mib vs_pytorch asked_mib_longest seconds",
    "the arena": "new_mib_per_request bound_largest_mib reserved_mib reserved_vs_bound footprint_vs_bound "
    "footprint_vs_bound_max plan_share vs_no_arena vs_no_arena_p20 vs_no_arena_p80",
    "processes of the server": "rss_flatness rss_least_mib rss_median_mib rss_most_mib peak_mib",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row; a figure that a system does not have is None."""

    encoder: str
    batch: int | None
    requests: int
    system: str
    device: str
    weights_mib: float | None = None
    footprint_vs_bound: float | None = None
    footprint_vs_bound_max: float | None = None
    bound_largest_mib: float | None = None
    reserved_mib: float | None = None
    reserved_vs_bound: float | None = None
    new_mib_per_request: float | None = None
    asked_mib_longest: float | None = None
    peak_mib: float | None = None
    allocated_mib: float | None = None
    vs_pytorch: float | None = None
    seconds: float | None = None
    plan_share: float | None = None
    vs_no_arena: float | None = None
    vs_no_arena_p20: float | None = None
    vs_no_arena_p80: float | None = None
    rss_least_mib: float | None = None
    rss_median_mib: float | None = None
    rss_most_mib: float | None = None
    rss_flatness: float | None = None
    note: str = ""


def empty_row(case: Case, system: str, device: str, note: str = "") -> Row:
    """Return the row of a system without figures."""
    return Row(case.encoder.name, case.batch, len(case.lengths), system, device, note=note)


def finish_rows(rows: list[Row], speed: dict[str, Any] | str) -> list[Row]:
    """Return the rows of a case with ratios; `speed`: our columns, or an error."""
    ours, *others = rows
    if isinstance(speed, str):
        speed = {"note": "; ".join(filter(None, [ours.note, speed]))}
    peer = next(row.peak_mib for row in rows if row.system == PEER)
    rows = [replace(ours, **speed), *others]
    finished = [replace(row, vs_pytorch=ratio(row.peak_mib, peer)) for row in rows]
    return sorted(finished, key=lambda row: row.system == EXACT)


def bench_figures(rows: Sequence[Row]) -> dict[str, Cell]:
    """Return the keys of the BENCH line: the worst of each figure, None without one."""

    def of(system: str, column: str, choose: Callable[[list[float]], float]) -> float | None:
        return worst(choose, [getattr(row, column) for row in rows if row.system == system])

    new = of(OURS, "new_mib_per_request", max)
    return {
        "footprint_vs_bound": rounded(of(OURS, "footprint_vs_bound", max)),
        "vs_pytorch": rounded(of(OURS, "vs_pytorch", max)),
        "plan_share": rounded(of(OURS, "plan_share", max), 6),
        "speed_vs_no_arena": rounded(of(OURS, "vs_no_arena", min)),
        "new_bytes_per_request": None if new is None else round(new * MIB),
        "rss_flatness": rounded(of(STUB, "rss_flatness", max)),
    }


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables that have rows."""
    found = []
    for title, names in _TABLES.items():
        first, *_ = columns = names.split()
        cells = [asdict(row) for row in rows if getattr(row, first) is not None]
        found.append(Table.of(title, (*_NAMES, *columns), cells))
    return [table for table in found if table.lines]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what did not run, and why."""
    noted = (row for row in rows if row.note)
    return [f"{row.encoder} {row.batch or ''} {row.system}: {row.note}" for row in noted]
