"""What every benchmark of the project writes: one provenance record, rows of a CSV, one BENCH line.

A figure means little without the machine, the versions and the command behind it, so these travel
in every row. Rows are appended and never rewritten: a slower day stays visible.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where, when and with what a benchmark ran; the first columns of each of its rows."""

    date: str
    revision: str
    cpu: str
    threads: int
    versions: str
    command: str


def provenance(*, threads: int, packages: Sequence[str], command: str, root: Path) -> Provenance:
    """Return the provenance of a run that starts now from the working tree `root`."""
    return Provenance(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        revision=git_revision(root),
        cpu=f"{cpu_name()} x{cpu_count()}",
        threads=threads,
        versions=versions(packages),
        command=command,
    )


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the CPU's name and which of the instructions that decide bf16 and int8 it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (li.partition(":") for li in lines)}
    flags = set(fields.get("flags", "").split())
    wanted = ("avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    present = [flag for flag in wanted if flag in flags]
    return " ".join([fields.get("model name", platform.machine()), *present])


def versions(packages: Sequence[str]) -> str:
    """Return "python=3.11.2 torch=2.13.0 …"; a package that is not installed reads "absent"."""
    found = [f"{package}={_version(package)}" for package in packages]
    return " ".join([f"python={platform.python_version()}", *found])


def git_revision(root: Path) -> str:
    """Return the short commit id of `root`, with "+changes" where tracked files differ from it."""
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "uncommitted"
    return f"{head}+changes" if _git(root, "status", "--porcelain", "-uno") else head


def append_rows(path: Path, run: Provenance, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Append `rows` to the CSV at `path`, each led by the columns of `run`.

    Raises:
        ValueError: the file has other columns; old rows are never rewritten.
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
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in full)


def write_table(path: Path, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Write `rows` to the CSV at `path` in place of what it holds: for tables that come out the same everywhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)


def bench_line(name: str, figures: Mapping[str, Cell]) -> str:
    """Return the line "BENCH name: key=value …" that ends a benchmark's output."""
    return f"BENCH {name}: " + " ".join(f"{key}={_cell(value)}" for key, value in figures.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _cell(value: Cell) -> str:
    if value is None:
        return "n/a"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
