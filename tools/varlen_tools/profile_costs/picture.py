"""Costs of batches as SVG: two heat maps, sequences across and length down, and predicted by measured seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from varlen_tools.profile_costs.points import Cell, Checked, Profile
from varlen_tools.profile_costs.printed import in_milliseconds, three_digits

# Light to dark in equal steps of lightness, from the map "viridis" of matplotlib; read the same in grey.
_COLOURS = ("#fde725", "#a0da39", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e", "#440154")
_CELL = (58, 34)
_LEFT = 92
_TOP = 66
_GAP = 16
_BETWEEN = 40
_FOOT = 64
_SIDE = 300
# Of batches past the limits.
_PAST = "#f6f6f6"
# Colours darker than this share of white take white text.
_DARK = 0.45
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1a1a1a}.value{font-variant-numeric:tabular-nums}"
    ".value,.axis{text-anchor:middle}.row{text-anchor:end}.title{font:600 15px system-ui,sans-serif}"
    ".heading{font:600 17px system-ui,sans-serif}.note,.axis,.row{fill:#444}.on-dark{fill:#fff}"
    ".cell:hover rect{stroke:#d00;stroke-width:2.5}"
    ".past rect{stroke:#bbb;stroke-dasharray:2 3}.past text{fill:#999;font-style:italic}"
    ".batch:hover circle{stroke:#d00;stroke-width:2.5}"
)


def draw(profile: Profile) -> str:
    """Return the SVG of a profile."""
    wide = _LEFT + _CELL[0] * len(profile.counts)
    tall = max(_TOP + _CELL[1] * len(profile.lengths), _TOP + _SIDE)
    panels: list[tuple[float, Iterator[str]]] = [
        (wide, _heat_map(profile, "milliseconds per batch", lambda cell: 1e3 * cell.seconds)),
        (wide, _heat_map(profile, "microseconds per token", lambda cell: 1e6 * cell.per_token)),
        (_LEFT + _SIDE, _scatter(profile.checked)),
    ]
    width = sum(size for size, _ in panels) + _BETWEEN * (len(panels) - 1) + 2 * _GAP
    height = tall + _FOOT + 2 * _GAP + 24
    heading = f"What a batch of {profile.name} costs"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<style>{_STYLE}</style>",
        f"<title>{escape(heading)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
        _text(_GAP, _GAP + 14, heading, "heading"),
    ]
    left = float(_GAP)
    for size, panel in panels:
        parts.append(f'<g class="panel" transform="translate({left:.1f},{_GAP + 24})">')
        parts.extend(panel)
        parts.append("</g>")
        left += size + _BETWEEN
    parts.extend(_legend(height - _FOOT + 14))
    return "\n".join([*parts, "</svg>"])


def _heat_map(profile: Profile, title: str, value: Callable[[Cell], float]) -> Iterator[str]:
    shown = [value(cell) for cell in profile.cells.values() if cell.is_allowed]
    low, high = math.log(min(shown)), math.log(max(shown))
    wide, tall = _CELL
    yield _text(0, 22, title, "title")
    middle = _LEFT + wide * len(profile.counts) / 2
    yield _text(middle, _TOP - 24, "sequences →", "axis")
    yield _text(_LEFT - 8, _TOP - 24, "tokens each ↓", "row")
    for column, count in enumerate(profile.counts):
        yield _text(_LEFT + wide * (column + 0.5), _TOP - 8, str(count), "axis")
    for row, length in enumerate(profile.lengths):
        top = _TOP + tall * row
        yield _text(_LEFT - 8, top + tall / 2 + 4, str(length), "row")
        for column, count in enumerate(profile.counts):
            cell = profile.cells[count, length]
            share = (math.log(value(cell)) - low) / (high - low or 1.0)
            colour = _colour(share) if cell.is_allowed else _PAST
            yield from _cell(_LEFT + wide * column, top, colour, three_digits(value(cell)), cell)


def _cell(left: float, top: float, colour: str, label: str, cell: Cell) -> Iterator[str]:
    wide, tall = _CELL
    kind = "value on-dark" if _lightness(colour) < _DARK else "value"
    yield (
        f'<g class="cell {"allowed" if cell.is_allowed else "past"}"><title>{escape(_about(cell))}</title>'
        f'<rect x="{left + 1.5:.1f}" y="{top + 1.5:.1f}" width="{wide - 3}" height="{tall - 3}" fill="{colour}"/>'
    )
    yield _text(left + wide / 2, top + tall / 2 + 4, label, kind)
    yield "</g>"


def _about(cell: Cell) -> str:
    lines = [
        f"{cell.sequences} x {cell.length} tokens",
        f"{in_milliseconds(cell.seconds)} ms, {three_digits(1e6 * cell.per_token)} µs per token",
    ]
    if not cell.is_allowed:
        lines.append(f"{cell.sequences * cell.length} tokens are past the limits of a batch")
    return "\n".join(lines)


def _scatter(batches: Sequence[Checked]) -> Iterator[str]:
    """Yield predicted by measured seconds, on equal logarithmic axes."""
    values = [value for batch in batches for value in (batch.actual, batch.predicted)]
    low, high = math.log(min(values) / 1.25), math.log(max(values) * 1.25)

    def across(seconds: float) -> float:
        return _LEFT + _SIDE * (math.log(seconds) - low) / (high - low)

    def down(seconds: float) -> float:
        return _TOP + _SIDE * (high - math.log(seconds)) / (high - low)

    yield _text(0, 22, "measured batches, in milliseconds", "title")
    yield _text(_LEFT - 8, _TOP - 10, "predicted ↑", "row")
    yield (
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="#fafafa" stroke="#999"/>'
    )
    yield (
        f'<line x1="{_LEFT}" y1="{_TOP + _SIDE}" x2="{_LEFT + _SIDE}" y2="{_TOP}" stroke="#999"/>'
    )
    for tick in _ticks(math.exp(low), math.exp(high)):
        yield _text(across(tick), _TOP + _SIDE + 16, f"{1e3 * tick:g}", "axis")
        yield _text(_LEFT - 8, down(tick) + 4, f"{1e3 * tick:g}", "row")
    yield _text(_LEFT + _SIDE / 2, _TOP + _SIDE + 32, "measured →", "axis")
    for batch in batches:
        yield f'<g class="batch"><title>{escape(_about_batch(batch))}</title>'
        yield (
            f'<circle cx="{across(batch.actual):.1f}" cy="{down(batch.predicted):.1f}" r="4.5" fill="#365c8d"/>'
        )
        yield "</g>"


def _about_batch(batch: Checked) -> str:
    return "\n".join(
        [
            f"{batch.shape.sequences} sequences, {batch.shape.tokens} tokens, the longest {batch.shape.longest}",
            f"measured {in_milliseconds(batch.actual)} ms",
            f"predicted {in_milliseconds(batch.predicted)} ms, {batch.error:+.1%}",
        ]
    )


def _legend(top: float) -> Iterator[str]:
    yield (
        f'<g class="cell past"><rect x="{_GAP}" y="{top}" width="24" height="16" fill="{_PAST}"/></g>'
    )
    yield _text(_GAP + 32, top + 12, "past the limits of a batch", "note")
    yield _text(
        _GAP,
        top + 36,
        "Colours are logarithmic, from the cheapest to the most expensive; all numbers are predicted.",
        "note",
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within a range."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**exponent for exponent in exponents for step in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _colour(share: float) -> str:
    """Return the colour of a share from 0 to 1, between the two nearest of the scale."""
    place = min(max(share, 0.0), 1.0) * (len(_COLOURS) - 1)
    below = min(int(place), len(_COLOURS) - 2)
    pair = zip(_channels(_COLOURS[below]), _channels(_COLOURS[below + 1]), strict=True)
    mixed = (round(a + (b - a) * (place - below)) for a, b in pair)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _lightness(colour: str) -> float:
    """Return how light a colour looks, from 0 to 1."""
    red, green, blue = _channels(colour)
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
