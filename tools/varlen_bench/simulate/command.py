"""What the commands of the simulator share: options, console and CSV files."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MILLISECONDS = 1e3
# Columns of output that goes to a file.
_WIDTH = 120

SeedOption: TypeAlias = Annotated[int, typer.Option(help="Seed of arrivals and lengths.")]
TableOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="CSV file of all results to write.")
]
AsConfigured: TypeAlias = Annotated[int, typer.Option(min=1, help="As in config.pbtxt.")]
CacheOption: TypeAlias = Annotated[
    str, typer.Option("--cache-folder", help="Cache of measured costs; the latest are used.")
]
# Help of an option that names a source of batch costs.
COSTS_HELP = "Costs of batches: by formula, or measured on this machine."


class Figures(Protocol):
    """Figures of a run under one load."""

    @property
    def offered(self) -> float:
        """Requests per second."""


_F = TypeVar("_F", bound=Figures)


def new_console() -> Console:
    """Return a console whose tables have the same width in every file."""
    return Console(width=None if os.isatty(1) else _WIDTH)


def parse_numbers(name: str, text: str) -> list[float]:
    """Return the numbers of an option.

    Raises:
        ValueError: it has something else; the message has its name.
    """
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f'{name} are "{text}"; allowed: numbers with commas between') from None


def parse_positive(name: str, text: str) -> list[float]:
    """Return the numbers of an option, each finite and more than 0; else raise ValueError."""
    numbers = parse_numbers(name, text)
    if not all(0.0 < number < math.inf for number in numbers):
        raise ValueError(f'{name} are "{text}"; allowed: numbers above 0')
    return numbers


def parse_counts(name: str, text: str) -> list[int]:
    """Return the whole numbers of an option, each at least 1; else raise ValueError."""
    numbers = parse_positive(name, text)
    if any(number != int(number) for number in numbers):
        raise ValueError(f'{name} are "{text}"; allowed: whole numbers from 1')
    return [int(number) for number in numbers]


def table_of_loads(
    headings: Sequence[str], results: Sequence[_F], cells: Callable[[_F], Sequence[str]]
) -> Table:
    """Return a table of results with a line between loads; the first column has names."""
    table = Table()
    for heading in headings:
        is_name = heading == headings[0]
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for result, following in zip_longest(results, results[1:]):
        is_last = following is not None and following.offered != result.offered
        table.add_row(*cells(result), end_section=is_last)
    return table


def write_results(path: Path | None, results: Sequence[DataclassInstance]) -> None:
    """Write a CSV file of at least one result, if there is a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        names = [field.name for field in fields(results[0])]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for result in results:
            row: dict[str, Any] = asdict(result)
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
