"""The command line of all benchmarks: options, selection by name, progress, and output.

A run prints progress, appends rows to its CSV while it measures, prints tables, and ends with the BENCH line.
`--quick` is a short run for a look: it appends rows only if `--output` is given.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console, RenderableType

from varlen_bench.harness.rows import Cell, append_rows, bench_line, provenance

Only: TypeAlias = Annotated[
    str, typer.Option(help="Names or beginnings of names, comma-separated; all if empty.")
]
Threads: TypeAlias = Annotated[int, typer.Option(min=0, help="Threads of a batch; 0: all cores.")]
Seed: TypeAlias = Annotated[int, typer.Option(help="Seed of random input.")]
Quick: TypeAlias = Annotated[
    bool, typer.Option("--quick", help="A short run for a look; appends no rows unless --output.")
]
Revision: TypeAlias = Annotated[
    str, typer.Option(help="Commit id, if the working tree is a copy without git.")
]
Output: TypeAlias = Annotated[
    Path | None, typer.Option(help="CSV file to append rows to; by default in docs/benchmarks.")
]

# Prints a line.
Progress: TypeAlias = Callable[[str], None]
_WIDTH = 200


def select(wanted: str, known: Iterable[str]) -> list[str]:
    """Return the names selected by a comma-separated list; all if it is empty.

    A whole name selects itself, a beginning every name that starts with it.

    Raises:
        ValueError: a wanted name selects nothing.
    """
    known = list(known)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    chosen: set[str] = set() if names else set(known)
    for name in names:
        found = {name} & set(known) or {other for other in known if other.startswith(name)}
        if not found:
            raise ValueError(f"unknown name {name!r}; allowed: {', '.join(known)}")
        chosen |= found
    return [name for name in known if name in chosen]


class Run:
    """One run of a benchmark: its provenance, its CSV, its console."""

    def __init__(
        self,
        context: typer.Context,
        module: str,
        *,
        threads: int,
        packages: Sequence[str],
        output: Path | None,
        revision: str = "",
    ) -> None:
        """Start a run of the command of `module`; without `output` it appends no rows."""
        self.output = output
        self.console = Console(width=None if os.isatty(1) else _WIDTH)
        self.provenance = provenance(
            threads=threads,
            packages=packages,
            command=_command_line(context, module),
            root=Path.cwd(),
            revision=revision,
        )

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Yield a function that prints a line; in a terminal it replaces the last one."""
        began = time.monotonic()
        with self.console.status("start") as status:

            def report(line: str) -> None:
                line = f"{time.monotonic() - began:5.0f} s  {line}"
                if self.console.is_terminal:
                    status.update(line)
                else:
                    self.console.print(line, highlight=False, markup=False)

            yield report

    def append(self, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Append rows to the CSV, if there is one."""
        if self.output is not None:
            append_rows(self.output, self.provenance, rows)

    def show(self, *parts: RenderableType) -> None:
        """Print tables and lines."""
        for part in parts:
            self.console.print(part, highlight=False, markup=False)

    def finish(self, name: str, figures: Mapping[str, Cell]) -> None:
        """Print where rows are, and the BENCH line."""
        self.show(f"rows appended to {self.output}" if self.output else "no rows were appended")
        sys.stdout.flush()
        print(bench_line(name, figures), flush=True)


@contextmanager
def refused(*others: type[Exception]) -> Iterator[None]:
    """Report ValueError, OSError and `others` as a wrong value of an option."""
    expected: tuple[type[Exception], ...] = (ValueError, OSError, *others)
    try:
        yield
    except expected as error:
        raise typer.BadParameter(str(error)) from error


def csv_path(name: str, output: Path | None, *, is_trial: bool) -> Path | None:
    """Return `output`; by default the CSV in docs/benchmarks, or None for a trial."""
    return output or (None if is_trial else Path("docs/benchmarks", f"{name}.csv"))


def _command_line(context: typer.Context, module: str) -> str:
    """Return the command of this run: the module and the options without their default.

    An absolute path is cut to its last part, so that no row tells where files are.
    """
    words = ["python", "-m", module]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value in (None, "", parameter.get_default(context)) or not parameter.opts:
            continue
        name = parameter.opts[0]
        if value is True:
            words.append(name)
        else:
            is_absolute = isinstance(value, Path) and value.is_absolute()
            words += [name, value.name if is_absolute else str(value)]
    return shlex.join(words)
