"""CSV rows, keys of the BENCH line, and tables; see docs/benchmarks/memory.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from varlen_bench.compare.results import Result, csv_row
from varlen_bench.compare.systems import System
from varlen_bench.harness.resident import MIB
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import ratio, rounded, worst
from varlen_bench.harness.tables import csv_table
from varlen_bench.memory.cases import OURS, PEER
from varlen_tools.tables import Table

# Rows beside the compared systems: an arena of the exact size, and the processes of a server.
EXACT, STUB, SERVER = (
    System(name, "varlen", "fp32", "engine") for name in ("exact-arena", "stub", "server")
)
_NAMES = ("encoder", "batch", "requests", "system")
# Columns of each table after the names; it has the rows that have the first of them.
_TABLES = {
    "memory above weights": "weights_mib peak_mib allocated_mib vs_pytorch asked_mib_longest seconds",
    "the arena": "new_mib_per_request bound_largest_mib reserved_mib reserved_vs_bound footprint_vs_bound "
    "footprint_vs_bound_max plan_share vs_no_arena vs_no_arena_p20 vs_no_arena_p80",
    "processes of the server": "rss_flatness rss_least_mib rss_median_mib rss_most_mib peak_mib",
}
_COLUMNS = (
    "encoder batch requests system device weights_mib footprint_vs_bound footprint_vs_bound_max bound_largest_mib "
    "reserved_mib reserved_vs_bound new_mib_per_request asked_mib_longest peak_mib allocated_mib vs_pytorch seconds "
    "plan_share vs_no_arena vs_no_arena_p20 vs_no_arena_p80 rss_least_mib rss_median_mib rss_most_mib rss_flatness note"
).split()


def empty_result(
    system: System, model: str, device: str, requests: int, *, batch: int | None = None
) -> Result:
    """Return the result of a system without figures; its speed is compared with no arena."""
    return Result(
        system=system,
        workload=device,
        requests=requests,
        work=requests,
        speed="vs_no_arena",
        model=model,
        batch=batch,
    )


def csv_rows(results: Sequence[Result]) -> list[dict[str, Cell]]:
    """Return a row for each result, also for those that failed."""
    return [
        csv_row(result, _COLUMNS, encoder=result.model, device=result.workload)
        for result in results
    ]


def add_ratios(results: Sequence[Result]) -> None:
    """Add the peak of each system over the peak of transformers, all of one case."""
    peer = next(result for result in results if result.system == PEER).median("peak_mib")
    for result in results:
        over = ratio(result.median("peak_mib"), peer)
        if over is not None:
            result.rounds[0]["vs_pytorch"] = over


def bench_figures(results: Sequence[Result]) -> dict[str, Cell]:
    """Return the keys of the BENCH line: the worst of each figure, None without one."""

    def of(system: System, name: str, choose: Callable[[list[float]], float]) -> float | None:
        return worst(choose, [each.median(name) for each in results if each.system == system])

    new = of(OURS, "new_mib_per_request", max)
    return {
        "footprint_vs_bound": rounded(of(OURS, "footprint_vs_bound", max)),
        "vs_pytorch": rounded(of(OURS, "vs_pytorch", max)),
        "plan_share": rounded(of(OURS, "plan_share", max), 6),
        "speed_vs_no_arena": rounded(of(OURS, "vs_no_arena", min)),
        "new_bytes_per_request": None if new is None else round(new * MIB),
        "rss_flatness": rounded(of(STUB, "rss_flatness", max)),
    }


def tables(results: Sequence[Result]) -> list[Table]:
    """Return the tables that have rows."""
    rows, found = csv_rows(results), []
    for title, names in _TABLES.items():
        first, *_ = columns = names.split()
        kept = [row for row in rows if row[first] is not None]
        found.append(csv_table(title, (*_NAMES, *columns), kept))
    return [table for table in found if table.lines]


def notes(results: Sequence[Result]) -> list[str]:
    """Return what did not run, and why."""
    noted = (each for each in results if each.note)
    return [f"{each.model} {each.batch or ''} {each.system.name}: {each.note}" for each in noted]
