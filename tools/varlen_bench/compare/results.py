"""Figures of systems by round; their CSV rows, ratios and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

from varlen_bench.compare.systems import System
from varlen_bench.harness.rows import Cell, csv_table
from varlen_bench.harness.summary import Spread, paired_ratio, rounded
from varlen_tools.tables import Table


@dataclass(slots=True, kw_only=True)
class Result:
    """Figures of one system on one workload, by round; none if it failed.

    Attributes:
        workload: description for tables and rows.
        requests: number of requests; 0: an isolated step was measured, once.
        work: tokens or sentences of the requests.
        speed: name of the figure that counts, in work per second.
        arrivals: "at once" or "poisson"; empty if the benchmark has one kind.
        rate: requests/s of Poisson arrivals.
        batch: batch size; None if the engine batches requests itself.
        calibration: speed of each batch size.
        equal_tokens: share of checked tokens that equal the reference.
    """

    system: System
    workload: str = ""
    requests: int = 0
    work: int = 0
    speed: str = "tokens_per_second"
    model: str = ""
    arrivals: str = ""
    rate: float | None = None
    batch: int | str | None = None
    calibration: str = ""
    equal_tokens: float | None = None
    rounds: list[dict[str, float]] = field(default_factory=list)
    has_failed: bool = False
    note: str = ""

    @property
    def speeds(self) -> list[float]:
        """The speed in each round that has it."""
        return [each[self.speed] for each in self.rounds if self.speed in each]

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the rounds that have it."""
        found = [each[name] for each in self.rounds if each.get(name) is not None]
        return statistics.median(found) if found else None

    def figures(self) -> dict[str, Cell]:
        """Return the median of each figure, and the 20th and 80th percentile of the speed."""
        names = (name for each in self.rounds for name in each)
        medians: dict[str, Cell] = {name: self.median(name) for name in dict.fromkeys(names)}
        if not self.speeds:
            return medians
        spread = Spread.of(self.speeds)
        return {**medians, f"{self.speed}_p20": spread.p20, f"{self.speed}_p80": spread.p80}


AnyResult = TypeVar("AnyResult", bound=Result)


def csv_row(result: Result, columns: Iterable[str], **derived: Cell) -> dict[str, Cell]:
    """Return the cells of a result by column: what is `derived`, figures, fields, or None."""
    known: dict[str, Cell] = {each.name: getattr(result, each.name) for each in fields(result)}
    known |= {"system": result.system.name, "rounds": len(result.rounds)}
    if not result.requests:
        known |= {name: known[name] or None for name in ("workload", "calibration", "note")}
        known |= dict.fromkeys(("requests", "rounds"))
    cells = {**known, **result.figures(), **derived}
    return {column: cells.get(column) for column in columns}


def result_of(results: Iterable[AnyResult], name: str) -> AnyResult | None:
    """Return the first result of a system that ran."""
    return next((each for each in results if each.system.name == name and each.rounds), None)


def fastest(results: Iterable[AnyResult]) -> AnyResult | None:
    """Return the fastest of the results that ran."""
    ran = (result for result in results if result.rounds)
    return max(ran, key=lambda result: statistics.median(result.speeds), default=None)


def best_peer(results: Iterable[Result]) -> Result | None:
    """Return the fastest peer in fp32 that ran."""
    peers = (each for each in results if not each.system.is_ours)
    return fastest(each for each in peers if each.system.precision == "fp32")


def speed_ratio(result: Result | None, base: Result | None) -> float | None:
    """Return the speed over the speed of another system in the same round; the median."""
    if result is None or base is None:
        return None
    return rounded(paired_ratio(result.speeds, base.speeds))


def tables(
    rows: Sequence[Mapping[str, Cell]], columns: Sequence[str], *, by: Sequence[str], speed: str
) -> list[Table]:
    """Return a table of each combination of the cells `by`, the fastest system first."""
    fastest_first = sorted(rows, key=lambda row: -float(row[speed] or 0))
    lists: dict[str, list[Mapping[str, Cell]]] = {_title(row, by): [] for row in rows}
    for row in fastest_first:
        lists[_title(row, by)].append(row)
    return [csv_table(title, columns, kept) for title, kept in lists.items()]


def _title(row: Mapping[str, Cell], by: Iterable[str]) -> str:
    return ", ".join(str(row[name]) for name in by if row[name])
