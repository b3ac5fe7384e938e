"""Who comes when, and how long: Poisson, in bursts, or as a trace says. All of it follows from a seed."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from varlen_tools.simulate.run import Arrival

Lengths: TypeAlias = Callable[[random.Random], int]

# Arrivals that come together in a burst, in the mean.
_BURST = 20


def uniform(shortest: int, longest: int) -> Lengths:
    """Return lengths uniform between two, both included."""
    return lambda numbers: numbers.randint(shortest, longest)


def one_of(lengths: Sequence[int]) -> Lengths:
    """Return lengths drawn from those given."""
    return lambda numbers: numbers.choice(lengths)


def poisson(count: int, rate: float, lengths: Lengths, seed: int) -> list[Arrival]:
    """Return arrivals at `rate` a second that know nothing of one another."""
    numbers, at = random.Random(seed), 0.0
    arrivals = []
    for _ in range(count):
        at += numbers.expovariate(rate)
        arrivals.append(Arrival(at, lengths(numbers)))
    return arrivals


def bursts(count: int, rate: float, lengths: Lengths, seed: int) -> list[Arrival]:
    """Return arrivals at `rate` a second in the mean that come many at a time, the bursts Poisson."""
    numbers = random.Random(seed)
    return list(_bursts(count, rate, lengths, numbers))


def with_deadline(arrivals: list[Arrival], seconds: float | None) -> list[Arrival]:
    """Return the arrivals, each with this deadline."""
    return [replace(arrival, deadline_seconds=seconds) for arrival in arrivals]


def read_lengths(path: Path, column: str) -> list[int]:
    """Return the positive whole numbers in a column of a CSV file.

    Raises:
        ValueError: the file has no such column, or nothing in it.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if column not in (rows.fieldnames or []):
            raise ValueError(
                f"{path.name} has no column {column}; it has {', '.join(rows.fieldnames or [])}"
            )
        lengths = [int(row[column]) for row in rows if int(row[column]) > 0]
    if not lengths:
        raise ValueError(f"{path.name} has no lengths in column {column}")
    return lengths


def _bursts(count: int, rate: float, lengths: Lengths, numbers: random.Random) -> Iterator[Arrival]:
    at, left = 0.0, count
    while left:
        at += numbers.expovariate(rate / _BURST)
        size = min(left, 1 + int(numbers.expovariate(1 / (_BURST - 1))))
        left -= size
        yield from (Arrival(at, lengths(numbers)) for _ in range(size))
