"""Tables on the screen: CSV rows below each other, some of their columns beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from varlen_bench.harness.rows import Cell, cell


def table(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Cell]]) -> Table:
    """Return a table of these columns of CSV rows; a missing figure is empty."""
    view = Table(*(name.replace("_", "\n") for name in columns), title=title, title_justify="left")
    for row in rows:
        cells = ("" if row[name] is None else cell(row[name]) for name in columns)
        view.add_row(*cells)
    return view
