"""The page of a run: figures, picture, tables and every load, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from varlen_bench.harness.rows import Cell, Provenance, cell
from varlen_bench.serving import picture, tables
from varlen_bench.serving.rows import Row
from varlen_tools import html_page, pictures


def render(rows: Sequence[Row], figures: Mapping[str, Cell], run: Provenance) -> str:
    """Return the page of a run; `figures` are those of the BENCH line."""
    origin = f"{run.date}, {run.revision}, {run.cpu}; {run.versions}; {run.command}"
    keys = [[key, cell(value)] for key, value in figures.items()]
    parts = [html_page.paragraph(origin), html_page.table(["key", "value"], keys)]
    if any(row.kind == "load" for row in rows):
        drawn = pictures.embedded(lambda: picture.draw(rows), "served and latency by load")
        parts.append(drawn)
    for table in tables.summary_tables(rows):
        parts += [html_page.heading(table.title), html_page.table(table.headings, table.lines)]
    if notes := tables.notes(rows):
        parts += [html_page.heading("What did not run"), html_page.bullets(notes)]
    loads = tables.load_table(rows)
    parts += [
        html_page.folded(loads.title, html_page.table(loads.headings, loads.lines)),
        html_page.paragraph("docs/benchmarks/serving.md has the method."),
    ]
    return html_page.page("Serving under load", parts)
