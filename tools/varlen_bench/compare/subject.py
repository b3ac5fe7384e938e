"""Subjects of the comparison: options, measurement, rows, tables and figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar

import typer
from rich.console import RenderableType

from varlen_bench.compare.results import AnyResult, csv_row, tables
from varlen_bench.compare.systems import System
from varlen_bench.harness import machine
from varlen_bench.harness.command import (
    Only,
    Output,
    Progress,
    Quick,
    Revision,
    Run,
    Seed,
    Threads,
    csv_path,
    refused,
    select,
)
from varlen_bench.harness.options import with_options
from varlen_bench.harness.rows import Cell
from varlen_tools.tables import Table

Measured = TypeVar("Measured")
Rounds: TypeAlias = Annotated[int, typer.Option(min=1, help="Measured passes of each system.")]


@dataclass(kw_only=True)
class Subject(ABC, Generic[Measured]):
    """A benchmark: its docstring is the help of its command, its fields are options."""

    name: ClassVar[str]
    """Name of its module, its CSV and its BENCH line."""
    packages: ClassVar[Sequence[str]]
    """Distributions whose versions are in each row."""
    errors: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors of `prepare` beside ValueError and OSError that an option may cause."""

    quick: Quick = False
    revision: Revision = ""
    output: Output = None

    @property
    def cores(self) -> int:
        """Number of cores that a run uses."""
        return machine.cpu_count()

    @property
    def bench_name(self) -> str:
        """Name of the BENCH line."""
        return self.name

    def prepare(self) -> None:
        """Check the options, before anything is measured."""

    @abstractmethod
    def measure(self, progress: Progress) -> Iterator[Sequence[Measured]]:
        """Measure; yield each part of the results once it is complete."""

    @abstractmethod
    def rows(self, results: Sequence[Measured]) -> Sequence[Mapping[str, Cell]]:
        """Return the CSV rows of results."""

    def tables(self, results: Sequence[Measured]) -> Sequence[RenderableType]:  # noqa: ARG002  # for overriding
        """Return the tables and lines that a run prints."""
        return []

    @abstractmethod
    def figures(self, results: Sequence[Measured]) -> Mapping[str, Cell]:
        """Return the keys of the BENCH line."""

    def has_failed(self, results: Sequence[Measured]) -> bool:  # noqa: ARG002  # for overriding
        """Return whether the command exits with 1."""
        return False

    def show(self, bench: Run, results: Sequence[Measured]) -> None:
        """Print the results."""
        bench.show(*self.tables(results))

    def run(self, context: typer.Context) -> None:
        """Measure, append rows after each part, and print tables and the BENCH line."""
        with refused(*self.errors):
            self.prepare()
        bench = Run(
            context,
            f"varlen_bench.{self.name}",
            threads=self.cores,
            packages=self.packages,
            output=csv_path(self.name, self.output, is_trial=self.quick),
            revision=self.revision,
        )
        results: list[Measured] = []
        with bench.progress() as progress:
            for found in self.measure(progress):
                bench.append(self.rows(found))
                results += found
        self.show(bench, results)
        bench.finish(self.bench_name, self.figures(results))
        if self.has_failed(results):
            raise typer.Exit(1)


def command(subject: type[Subject[Any]]) -> typer.Typer:
    """Return the command line of a subject."""

    def main(context: typer.Context, options: Subject[Any]) -> None:
        options.run(context)

    main.__doc__ = subject.__doc__
    app = typer.Typer(add_completion=False)
    app.command()(with_options(subject)(main))
    return app


@dataclass(kw_only=True)
class SystemsSubject(Subject[AnyResult]):
    """A subject that compares systems, each in a process, by rounds in turn."""

    systems: ClassVar[Mapping[str, System]]
    columns: ClassVar[Sequence[str]]
    """Columns of the CSV."""
    shown: ClassVar[Sequence[str]]
    """Columns of the tables."""
    by: ClassVar[Sequence[str]]
    """Columns whose values have a table each."""
    speed: ClassVar[str] = "tokens_per_second"
    """Figure that counts, in work per second."""

    rounds: Rounds = 5
    only: Only = ""
    threads: Threads = 0
    seed: Seed = 0
    chosen: list[System] = field(init=False)

    @property
    def cores(self) -> int:
        """Number of cores that a run uses."""
        return self.threads or machine.cpu_count()

    def prepare(self) -> None:
        """Choose the systems that `only` names."""
        self.chosen = [self.systems[name] for name in select(self.only, self.systems)]

    def rows(self, results: Sequence[AnyResult]) -> list[dict[str, Cell]]:
        """Return a row for each result, also for those that failed."""
        return [csv_row(each, self.columns, **self._derived(each, results)) for each in results]

    def _derived(self, result: AnyResult, results: Sequence[AnyResult]) -> dict[str, Cell]:  # noqa: ARG002  # for overriding
        """Return cells of a row beside the figures of its result."""
        return {}

    def tables(self, results: Sequence[AnyResult]) -> list[Table]:
        """Return the tables, the fastest system first."""
        return tables(self.rows(results), self.shown, by=self.by, speed=self.speed)

    def has_failed(self, results: Sequence[AnyResult]) -> bool:
        """Return whether varlen answered none of its requests."""
        ours = (each for each in results if each.system.is_ours and each.requests)
        return any(not each.rounds for each in ours)
