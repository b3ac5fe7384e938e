"""A map as SVG: bytes across to one scale for all maps, ops down, a rectangle for each usage."""

from collections.abc import Iterator, Sequence
from html import escape

from varlen_tools.show_plan.maps import Area, Map

# The first eight are those of Okabe and Ito 2008, apart for every kind of colour vision, lightened for black text.
_COLOURS = (
    "#9ad0f5",
    "#f5c56b",
    "#7fd1b3",
    "#f0e58a",
    "#e8a0c4",
    "#f2a27a",
    "#b9b6e3",
    "#cfcfcf",
    "#c9e38f",
    "#d8b894",
    "#7ea6e0",
)
_LINK = "#555"
_WIDTH = 430
_ROW = 15
_OPS = 150
_GAP = 14
_HEAD = 66
_BETWEEN = 46
_FOOT = 34
# Of one letter, at the size that labels have.
_LETTER = 6.2
_STYLE = (
    "text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:#1a1a1a}"
    ".title{font:600 15px system-ui,sans-serif}.note{font:12px system-ui,sans-serif;fill:#444}"
    ".area rect{stroke:#333;stroke-width:.7}.area:hover rect{stroke:#000;stroke-width:2.4}"
)


def draw(heading: str, maps: Sequence[Map]) -> str:
    """Return the SVG of maps side by side."""
    scale = _WIDTH / max(sum(one.chunks) for one in maps)
    panels = [_Panel(one, scale, _colours(maps)) for one in maps]
    width = sum(panel.width for panel in panels) + _BETWEEN * (len(panels) - 1) + 2 * _GAP
    height = _GAP + 24 + max(panel.height for panel in panels) + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<style>{_STYLE}</style>",
        f"<title>{escape(heading)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
        _text(_GAP, _GAP + 12, heading, "title"),
    ]
    left = float(_GAP)
    for panel in panels:
        parts.append(f'<g class="map" transform="translate({left:.1f},{_GAP + 24})">')
        parts.extend(panel.parts())
        parts.append("</g>")
        left += panel.width + _BETWEEN
    parts.append(
        _text(
            _GAP,
            height - _GAP,
            "offset in the chunk → across, op ↓ down; a rectangle is a usage: its bytes wide, its lifetime tall",
            "note",
        )
    )
    return "\n".join([*parts, "</svg>"])


def in_units(size: int) -> str:
    """Return a number of bytes as people write it."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


class _Panel:
    def __init__(self, drawn: Map, scale: float, colours: dict[str, str]) -> None:
        self._map = drawn
        self._scale = scale
        self._colours = colours
        widths = [size * scale for size in drawn.chunks]
        self._left = [
            _OPS + sum(widths[:chunk]) + _GAP * chunk for chunk in range(len(drawn.chunks))
        ]
        # room for the text above, where chunks are narrow
        self.width = max(self._left[-1] + widths[-1], _OPS + 260.0)
        self.height = _HEAD + _ROW * len(drawn.ops)

    def parts(self) -> Iterator[str]:
        drawn = self._map
        ratio = drawn.footprint / drawn.peak_live
        yield _text(0, 14, drawn.title, "title")
        yield _text(
            0,
            32,
            f"footprint {in_units(drawn.footprint)}, {ratio:.2f} of the peak of live bytes",
            "note",
        )
        for chunk, size in enumerate(drawn.chunks):
            yield from self._chunk(chunk, size)
        for op, name in enumerate(drawn.ops):
            yield _text(0, _HEAD + _ROW * op + 11, _cut(name, _OPS - 8), "op")
        for area in drawn.areas:
            yield from self._area(area)

    def _chunk(self, chunk: int, size: int) -> Iterator[str]:
        left, tall = self._left[chunk], _ROW * len(self._map.ops)
        width = size * self._scale
        label = f"chunk {chunk}: {in_units(size)}"
        yield _text(left, _HEAD - 8, _cut(label, width), "op")
        yield (
            f'<rect class="chunk" x="{left:.2f}" y="{_HEAD}" width="{width:.2f}" height="{tall}"'
            f' fill="#f4f4f4" stroke="{_LINK}"><title>{label}</title></rect>'
        )

    def _area(self, area: Area) -> Iterator[str]:
        left = self._left[area.chunk] + area.offset * self._scale
        top, width = _HEAD + _ROW * area.first_op, area.size * self._scale
        tall = _ROW * (area.last_op - area.first_op + 1)
        yield (
            f'<g class="area"><title>{escape(self._about(area))}</title>'
            f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{tall}"'
            f' fill="{self._colours[area.name]}"/>'
        )
        label = _cut(area.name, width - 6)
        if label:
            yield _text(left + 4, top + 11, label, "label")
        yield "</g>"

    def _about(self, area: Area) -> str:
        lines = [
            area.written[0],
            f"from op {area.first_op} to op {area.last_op}, {self._map.ops[area.last_op]}",
            f"{in_units(area.size)} ({area.size} bytes) at offset {area.offset} of chunk {area.chunk}",
        ]
        if len(area.written) > 1:
            lines.append("written over in place by " + ", ".join(area.written[1:]))
        return "\n".join(lines)


def _colours(maps: Sequence[Map]) -> dict[str, str]:
    # the largest first, so that colours repeat among those that are too thin to see
    areas = sorted((area for one in maps for area in one.areas), key=lambda area: -area.size)
    names = dict.fromkeys(area.name for area in areas)
    return {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" class="{kind}">{escape(text)}</text>' if text else ""


def _cut(text: str, width: float) -> str:
    """Return what of a text fits into so many pixels; nothing if that would say nothing."""
    most = int(width / _LETTER)
    if len(text) <= most:
        return text
    return text[: most - 1] + "…" if most > 3 else ""
