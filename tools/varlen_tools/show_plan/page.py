"""A page around a picture: the figures in a table, and what is to be seen."""

from collections.abc import Sequence
from html import escape

from varlen_tools.show_plan.maps import Map
from varlen_tools.show_plan.picture import draw, in_units

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff }
body { max-width: 80rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { text-align: right; padding: .2rem .9rem; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
figure { margin: 1.5rem 0 }
svg { max-width: 100%; height: auto }
"""


def render(heading: str, maps: Sequence[Map], note: str) -> str:
    """Return the page.

    Args:
        heading: what is planned.
        maps: drawn side by side.
        note: one sentence on how it was planned.
    """
    rows = "\n".join(
        f"<tr><td>{escape(one.title)}</td><td>{len(one.areas)}</td>"
        f"<td>{' + '.join(in_units(size) for size in one.chunks)}</td>"
        f"<td>{in_units(one.footprint)}</td><td>{in_units(one.peak_live)}</td>"
        f"<td>{one.footprint / one.peak_live:.3f}</td></tr>"
        for one in maps
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(heading)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(heading)}</h1>
<p>{escape(note)} Point at a rectangle to read what it holds, when, and where.
Two rectangles of one chunk never overlap: what is live together lies apart, what is not may share bytes.</p>
<table>
<tr><th>batch</th><th>usages</th><th>chunks</th><th>footprint</th><th>peak of live bytes</th><th>ratio</th></tr>
{rows}
</table>
<figure>
{draw(heading, maps)}
</figure>
</body>
</html>
"""
