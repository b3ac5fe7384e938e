"""The page of maps: the picture, and every usage in tables."""

from collections.abc import Sequence
from functools import partial

from varlen_tools import html_page, pictures
from varlen_tools.show_plan.maps import Map
from varlen_tools.show_plan.picture import draw, in_units

_BATCH_HEADINGS = ("batch", "usages", "chunks", "footprint", "peak of live bytes", "ratio")
_USAGE_HEADINGS = ("results, in order of writing", "first op", "last op", "chunk", "offset", "size")


def render(heading: str, maps: Sequence[Map], note: str) -> str:
    """Return the page; `note` is one sentence on how the batches were planned."""
    summary = [
        [
            one.title,
            str(len(one.areas)),
            " + ".join(map(in_units, one.chunks)),
            in_units(one.footprint),
            in_units(one.peak_live),
            f"{one.ratio:.3f}",
        ]
        for one in maps
    ]
    parts = [
        html_page.paragraph(note),
        html_page.paragraph(
            "A rectangle is a usage: as wide as its bytes, as tall as its lifetime. No two rectangles of one chunk"
            " overlap: usages that are live together lie apart, others may share bytes."
        ),
        html_page.table(_BATCH_HEADINGS, summary),
        pictures.embedded(partial(draw, heading, maps), f"Space-time map of {heading}"),
    ]
    for one in maps:
        table = html_page.table(_USAGE_HEADINGS, _usages(one))
        parts.append(html_page.folded(f"Every usage of {one.title}, in bytes", table))
    return html_page.page(heading, parts)


def _usages(one: Map) -> list[list[str]]:
    return [
        [
            ", ".join(area.results),
            one.ops[area.first_op],
            one.ops[area.last_op],
            str(area.chunk),
            f"{area.offset:,}",
            f"{area.size:,}",
        ]
        for area in sorted(one.areas, key=lambda area: (area.first_op, area.chunk, area.offset))
    ]
