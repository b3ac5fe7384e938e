"""CSV rows of a benchmark, each with its provenance, and the BENCH line.

Rows are appended and never rewritten: a slower day stays visible.
"""

from __future__ import annotations

import csv
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from varlen_bench.harness.machine import cpu_count, cpu_name

if TYPE_CHECKING:
    from varlen_tools.tables import Table

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Time, machine, versions and command of a run: the first columns of its rows."""

    date: str
    revision: str
    cpu: str
    threads: int
    versions: str
    command: str


def provenance(
    *, threads: int, packages: Sequence[str], command: str, root: Path, revision: str = ""
) -> Provenance:
    """Return the provenance of a run that starts now; without a revision, git is asked."""
    found = [f"{package}={installed_version(package)}" for package in packages]
    return Provenance(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        revision=revision or _git_revision(root),
        cpu=f"{cpu_name()} x{cpu_count()}",
        threads=threads,
        versions=" ".join([f"python={platform.python_version()}", *found]),
        command=command,
    )


def installed_version(package: str) -> str:
    """Return the version of a package, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def append_rows(path: Path, run: Provenance, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Append rows to a CSV, each after the columns of its provenance.

    Raises:
        ValueError: the file has other columns.
    """
    if not rows:
        return
    full = [{**asdict(run), **row} for row in rows]
    columns = list(full[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new:
        with path.open(newline="", encoding="utf-8") as file:
            existing = next(csv.reader(file), [])
        if existing != columns:
            raise ValueError(f"{path} has columns {existing}; these rows have {columns}")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows({key: cell(value) for key, value in row.items()} for row in full)


def bench_line(name: str, figures: Mapping[str, Cell]) -> str:
    """Return the line "BENCH name: key=value …", the last line of a benchmark's output."""
    return f"BENCH {name}: " + " ".join(f"{key}={cell(value)}" for key, value in figures.items())


def cell(value: Cell) -> str:
    """Return a figure as text: six digits, or "n/a"."""
    if value is None:
        return "n/a"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _git_revision(root: Path) -> str:
    """Return the short commit id of `root`, with "+changes" if tracked files differ."""
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "uncommitted"
    return f"{head}+changes" if _git(root, "status", "--porcelain", "-uno") else head


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def csv_table(title: str, columns: Iterable[str], rows: Iterable[Mapping[str, Cell]]) -> Table:
    """Return a table of columns of CSV rows, without the columns that are empty."""
    # not above: it imports rich, whose memory would count as an engine's in a worker
    from varlen_tools.tables import Table

    rows = list(rows)
    filled = [name for name in columns if any(row[name] not in (None, "") for row in rows)]
    lines = [["" if row[name] is None else cell(row[name]) for name in filled] for row in rows]
    return Table(title, filled, lines)
