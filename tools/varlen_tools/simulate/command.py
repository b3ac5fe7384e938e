"""What the commands of the simulator share: options, console and CSV files."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MILLISECONDS = 1e3
# Columns of output that goes to a file.
_WIDTH = 120


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
    """Return the numbers of an option, each finite and more than 0.

    Raises:
        ValueError: it has something else; the message has its name.
    """
    numbers = parse_numbers(name, text)
    if not all(0.0 < number < math.inf for number in numbers):
        raise ValueError(f'{name} are "{text}"; allowed: numbers above 0')
    return numbers


def parse_counts(name: str, text: str) -> list[int]:
    """Return the whole numbers of an option, each at least 1.

    Raises:
        ValueError: it has something else; the message has its name.
    """
    numbers = parse_positive(name, text)
    if any(number != int(number) for number in numbers):
        raise ValueError(f'{name} are "{text}"; allowed: whole numbers from 1')
    return [int(number) for number in numbers]


def write_results(path: Path, results: Sequence[DataclassInstance]) -> None:
    """Write a CSV file of results of one kind, at least one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        names = [field.name for field in fields(results[0])]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for result in results:
            row: dict[str, Any] = asdict(result)
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
