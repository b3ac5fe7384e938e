"""Figures of a campaign: CSV rows, tables, a page of markdown, the BENCH line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import indent

from varlen_bench.harness.rows import Cell, Provenance, csv_table
from varlen_tools.tables import Table

from .endings import ENDS, End
from .report import Report
from .state import State

_ALL = "all"
_PAGE = """# Last campaign

<!-- Written by `make campaign` (tests/campaign/figures.py). -->

What [the campaign](../project/campaign.md) found last. Rows of all runs are in [campaign.csv](campaign.csv).
"""
_STATE_HEADINGS = ("processes", "descriptors", "threads", "memory_mib", "shared_mib")


def rows(reports: Sequence[Report], seed: int) -> list[dict[str, Cell]]:
    """Return a row for each phase, and one for each kind of request in it."""
    found = []
    for report in reports:
        whole = {_ALL: report.ledger.ends, **dict(sorted(report.ledger.by_kind.items()))}
        for kind, ends in whole.items():
            is_all = kind == _ALL
            row: dict[str, Cell] = {"seed": seed, "phase": report.name, "kind": kind}
            row |= {"requests": ends.total()} | {str(end): ends[end] for end in ENDS}
            row["problems"] = report.ledger.num_problems if is_all else None
            row["seconds"] = round(report.seconds, 1) if is_all else None
            row |= _state_cells(report.before if is_all else None, "before")
            row |= _state_cells(report.after if is_all else None, "after")
            row["notes"] = _notes(report) if is_all else ""
            found.append(row)
    return found


def tables(reports: Sequence[Report], seed: int) -> Iterator[Table]:
    """Return the tables of a run: requests by kind, and state by phase."""
    every = rows(reports, seed)
    requests = ("phase", "kind", "requests", *ENDS)
    yield csv_table("Requests by kind and end", requests, every)
    held = [f"{name}_{when}" for name in _STATE_HEADINGS for when in ("before", "after")]
    phases = [row for row in every if row["kind"] == _ALL]
    yield csv_table(
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
    # Indented lines are code, whatever stands in them: a regular expression may look like a link.
    found = indent("\n".join(problems), " " * 4) or "No invariant was violated."
    parts = [
        _PAGE,
        f"{run.date}, commit {run.revision}, {run.cpu}, {run.versions}.",
        f"`{run.command}`: {ends.total()} requests, {ends['wrong']} wrong, {ends['lost']} lost.",
        found,
        *map(_markdown, tables(reports, seed)),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


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
    return "\n".join((f"## {table.title}\n", *replace(table, headings=headings).markdown()))
