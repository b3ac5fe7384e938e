"""The HTML page of a report: one file, light or dark by the reader's setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --line: #ddd }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --page: #16181c; --line: #3a3d42 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page) }
body { max-width: 84rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
figure { margin: 1.5rem 0; overflow-x: auto }
img { max-width: 100%; height: auto }
details, .wide { overflow-x: auto; font-size: 13px }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page."""
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def heading(text: str) -> str:
    """Return a heading of the second level."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def bullets(lines: Iterable[str]) -> str:
    """Return a bullet list of plain text."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first column is aligned left, the others right."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def folded(summary: str, content: str) -> str:
    """Return HTML that opens when its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"
