"""Tables of CSV rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from varlen_bench.harness.rows import Cell, cell
from varlen_tools.tables import Table


def csv_table(title: str, columns: Iterable[str], rows: Iterable[Mapping[str, Cell]]) -> Table:
    """Return a table of columns of CSV rows, without the columns that are empty."""
    rows = list(rows)
    filled = [name for name in columns if any(row[name] not in (None, "") for row in rows)]
    lines = [["" if row[name] is None else cell(row[name]) for name in filled] for row in rows]
    return Table(title, filled, lines)
