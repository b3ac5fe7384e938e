"""The picture of maps: bytes across, ops down, a rectangle for each usage; its page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, TypeAlias

from varlen_bench import html_page, pictures
from varlen_bench.pictures import COLORS
from varlen_bench.show_plan.maps import Map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20
_COLUMNS = 2
# Height in inches of one op, and of titles and axis labels.
_OP, _AROUND = 0.145, 1.1
# Usages below this share of the widest map are too narrow to tell apart.
_NARROW = 0.005
_NARROW_NAME = "narrower than 0.5 %"
_GREY = COLORS[6]
_STYLES = [
    {"facecolor": color, "hatch": hatch}
    for hatch, color in product((None, "///", "..."), [c for c in COLORS if c != _GREY])
]

_BATCH_HEADINGS = ("batch", "usages", "chunks", "footprint", "peak of live bytes", "ratio")
_USAGE_HEADINGS = ("results, in order of writing", "first op", "last op", "chunk", "offset", "size")

# matplotlib's settings of a rectangle, by legend entry.
Styles: TypeAlias = dict[str, dict[str, Any]]


def draw(heading: str, maps: Sequence[Map]) -> Figure:
    """Return the picture of maps, two in a row."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    edge = {"edgecolor": rcParams["axes.facecolor"], "linewidth": 0.8}
    widest = max(sum(one.chunks) for one in maps)
    styles = {name: {**edge, **style} for name, style in _styles(maps, widest).items()}
    columns = min(len(maps), _COLUMNS)
    rows = -(-len(maps) // columns)
    height = rows * (_AROUND + _OP * max(len(one.ops) for one in maps)) + 1.3
    figure = Figure(figsize=(3.0 + 5.0 * columns, height), layout="constrained")
    figure.suptitle(heading, fontweight="bold", parse_math=False)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for axes, one in zip(panels, maps, strict=False):
        _draw_map(axes, one, styles, widest)
    for axes in list(panels)[len(maps) :]:
        axes.set_axis_off()
    patches = [Patch(label=name, **style) for name, style in styles.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5)
    return figure


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


def in_units(size: int) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit, factor in (("MiB", _MIB), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


def _draw_map(axes: Axes, one: Map, styles: Styles, widest: int) -> None:
    from matplotlib import rcParams

    starts = list(accumulate(one.chunks, initial=0))
    for number, (start, size) in enumerate(zip(starts, one.chunks, strict=False)):
        axes.axvspan(
            start / _MIB, (start + size) / _MIB, color=rcParams["grid.color"], alpha=0.5, zorder=0
        )
        axes.axvline((start + size) / _MIB, color=rcParams["text.color"], linewidth=1)
        label = f" chunk {number}: {in_units(size)}"
        axes.text(start / _MIB, -0.7, label, fontsize="small", va="bottom")
    for area in one.areas:
        axes.barh(
            area.first_op - 0.5,
            area.size / _MIB,
            height=area.last_op - area.first_op + 1,
            left=(starts[area.chunk] + area.offset) / _MIB,
            align="edge",
            **styles[_legend_name(area.name, area.size, widest)],
        )
    title = f"footprint {in_units(one.footprint)}, {one.ratio:.2f} x peak of live bytes"
    axes.set_title(f"{one.title}: {title}", pad=18)
    axes.set_xlabel("offset, MiB" if len(one.chunks) == 1 else "offset, MiB; chunks side by side")
    axes.set_ylabel("op")
    axes.set_xlim(0, widest / _MIB)
    axes.set_ylim(len(one.ops) - 0.5, -0.5)
    axes.set_yticks(range(len(one.ops)), one.ops, fontsize=7)
    axes.label_outer()


def _styles(maps: Sequence[Map], widest: int) -> Styles:
    areas = sorted((area for one in maps for area in one.areas), key=lambda area: -area.size)
    names = dict.fromkeys(_legend_name(area.name, area.size, widest) for area in areas)
    styles = {name: _STYLES[number % len(_STYLES)] for number, name in enumerate(names)}
    if _NARROW_NAME in styles:
        styles[_NARROW_NAME] = {"facecolor": _GREY, "edgecolor": _GREY}
    return styles


def _legend_name(name: str, size: int, widest: int) -> str:
    return name if size >= _NARROW * widest else _NARROW_NAME
