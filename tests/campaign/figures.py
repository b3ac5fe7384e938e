"""Figures of a campaign: CSV rows, tables, a page of markdown, the BENCH line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from varlen_bench.harness.rows import Cell, Provenance, cell
from varlen_bench.harness.tables import Table

from .endings import ENDS, End
from .phase import Report
from .state import State

_ALL = "all"
_PAGE = """# Last campaign

<!-- Written by `make campaign` (tests/campaign/figures.py). -->

What [the campaign](../campaign.md) found last. Rows of all runs are in [campaign.csv](campaign.csv).
"""
_STATE_HEADINGS = ("processes", "descriptors", "threads", "memory_mib", "shared_mib")


def rows(reports: Sequence[Report], seed: int) -> list[dict[str, Cell]]:
    """Return a row for each phase, with what it held before and after, and one for each kind of request in it."""
    found = []
    for report in reports:
        whole = {_ALL: report.ledger.ends, **dict(sorted(report.ledger.by_kind.items()))}
        for kind, ends in whole.items():
            is_all = kind == _ALL
            found.append(
                {
                    "seed": seed,
                    "phase": report.name,
                    "kind": kind,
                    "requests": ends.total(),
                    **{end: ends[end] for end in ENDS},
                    "problems": report.ledger.num_problems if is_all else None,
                    "seconds": round(report.seconds, 1) if is_all else None,
                    **_state_cells(report.before if is_all else None, "before"),
                    **_state_cells(report.after if is_all else None, "after"),
                    "notes": _notes(report) if is_all else "",
                }
            )
    return found


def tables(reports: Sequence[Report], seed: int) -> Iterator[Table]:
    """Return the tables of a run: requests by kind, and what servers held before and after."""
    every = rows(reports, seed)
    requests = ("phase", "kind", "requests", *ENDS)
    yield Table.of("Requests by kind and end", requests, every)
    held = [f"{name}_{when}" for name in _STATE_HEADINGS for when in ("before", "after")]
    phases = [row for row in every if row["kind"] == _ALL]
    yield Table.of(
        "Phases, and what the server held before and after",
        ("phase", "seconds", "problems", *held, "notes"),
        phases,
    )


def page(reports: Sequence[Report], seed: int, run: Provenance) -> str:
    """Return the page of a run."""
    ends: Counter[End] = sum((report.ledger.ends for report in reports), Counter[End]())
    problems = [
        f"{report.name}: {problem}" for report in reports for problem in report.ledger.problems
    ]
    found = "\n".join(f"* {problem}" for problem in problems) or "No invariant was violated."
    parts = [
        _PAGE,
        f"{run.date}, commit {run.revision}, {run.cpu}, {run.versions}.",
        f"`{run.command}`: {ends.total()} requests, {ends['wrong']} wrong, {ends['lost']} lost.",
        found,
        *map(_markdown, tables(reports, seed)),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def bench_figures(reports: Sequence[Report], seed: int) -> dict[str, Cell]:
    """Return the figures of the BENCH line."""
    ends: Counter[End] = sum((report.ledger.ends for report in reports), Counter[End]())
    return {
        "seed": seed,
        "phases": len(reports),
        "requests": ends.total(),
        **{end: ends[end] for end in ENDS},
        "problems": sum(report.ledger.num_problems for report in reports),
        "seconds": round(sum(report.seconds for report in reports)),
    }


def _state_cells(state: State | None, when: str) -> dict[str, Cell]:
    if state is None:
        return {f"{name}_{when}": None for name in _STATE_HEADINGS}
    return dict(state.cells(when))


def _notes(report: Report) -> str:
    return "; ".join(f"{name} {value}" for name, value in sorted(report.notes.items()))


def _markdown(table: Table) -> str:
    headings = [heading.replace("_", " ") for heading in table.headings]
    lines = [headings, ["---"] * len(headings), *table.lines]
    shown = "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    return f"## {table.title}\n\n{shown}"
