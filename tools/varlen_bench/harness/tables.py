"""Tables of CSV rows, on the screen and on HTML pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table as ConsoleTable

from varlen_bench.harness.rows import Cell, cell


@dataclass(frozen=True, slots=True)
class Table:
    """A title, headings, and the cells of each line; `Run.show` prints it."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]

    @classmethod
    def of(cls, title: str, columns: Iterable[str], rows: Iterable[Mapping[str, Cell]]) -> Table:
        """Return a table of columns of CSV rows, without the columns that are empty."""
        rows = list(rows)
        filled = [name for name in columns if any(row[name] not in (None, "") for row in rows)]
        lines = [["" if row[name] is None else cell(row[name]) for name in filled] for row in rows]
        return cls(title, filled, lines)

    def __rich__(self) -> ConsoleTable:
        """Return the table as rich prints it."""
        headings = (name.replace("_", "\n") for name in self.headings)
        view = ConsoleTable(*headings, title=self.title, title_justify="left")
        for line in self.lines:
            view.add_row(*line)
        return view
