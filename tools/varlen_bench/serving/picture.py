"""The picture of a run: requests served and latency, by requests offered.

The left column is figure 7 of the TurboTransformers authors' report in Chinese: a system leaves the diagonal where it
is saturated.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from varlen_bench.serving.rows import GOAL_P99_MS, Row
from varlen_bench.serving.systems import OURS, SYSTEMS, ServedSystem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ours in blues and greens, peers in warm colors; the dynamic batcher of today is red. Readable on light and dark.
_COLORS = {
    "varlen-fp32": "#5a6fd8",
    "varlen-int8": "#9a5fd0",
    "varlen-int8-eight": "#c49be6",
    "varlen-dp": "#1f6fd6",
    "varlen-token-budget": "#2fb0d8",
    "varlen-dp-padded": "#12906a",
    "varlen-fifo-padded": "#6fb58f",
    "varlen-none": "#8b8fd6",
    "transformers-fp32-dynamic": "#d62f3c",
    "transformers-fp32-single": "#e8837a",
    "transformers-bf16-dynamic": "#9c6a38",
    "transformers-bf16-single": "#c9a26b",
}
# The hues of the strongest peers; their systems differ in lightness.
_HUES = {"onnxruntime": 0.09, "openvino": 0.91}
_DARKEST, _LIGHTEST = 0.3, 0.75
_GUIDE = {"color": "#8f8f8f", "linewidth": 0.9, "linestyle": ":"}
_PANELS = (("served/s", "served"), ("mean latency, ms", "mean_ms"), ("p99 latency, ms", "p99_ms"))
# Beyond saturation the latency comes from the backlog.
_LONGEST_MS = 5000.0


def _peer_colors() -> dict[str, str]:
    """Return the color of each of the strongest peers."""
    found: dict[str, str] = {}
    for engine, hue in _HUES.items():
        names = [system.name for system in SYSTEMS.values() if system.engine == engine]
        for name, lightness in zip(
            names, np.linspace(_DARKEST, _LIGHTEST, len(names)), strict=True
        ):
            parts = colorsys.hls_to_rgb(hue, float(lightness), 0.75)
            found[name] = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
    return found


COLORS = {**_COLORS, **_peer_colors()}


def draw(rows: Sequence[Row]) -> Figure:
    """Return a figure with a line of panels for each mix."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(row.lengths for row in rows if row.kind == "load"))
    figure = Figure(figsize=(15, 4.4 * len(labels) + 0.9), layout="constrained")
    panels = figure.subplots(len(labels), len(_PANELS), squeeze=False)
    drawn: dict[str, Any] = {}
    for line, label in zip(panels, labels, strict=True):
        for axes, (title, attribute) in zip(line, _PANELS, strict=True):
            for system in SYSTEMS.values():
                if points := curve(rows, label, system.name, attribute):
                    (drawn[system.name],) = axes.plot(*zip(*points, strict=True), **_style(system))
            _finish_panel(axes, rows, label, attribute)
            axes.set_title(f"{label} tokens: {title}")
    names = [name for name in SYSTEMS if name in drawn]
    figure.legend([drawn[name] for name in names], names, loc="outside lower center", ncols=4)
    return figure


def curve(
    rows: Sequence[Row], label: str, system: str, attribute: str
) -> list[tuple[float, float]]:
    """Return (offered, figure) of a system's open loads on one mix, if not given up."""
    return sorted(
        (row.offered, value)
        for row in rows
        if (row.lengths, row.system) == (label, system)
        and (row.kind == "most" or (row.kind == "load" and not row.not_sent))
        and row.offered is not None
        and (value := getattr(row, attribute)) is not None
    )


def _finish_panel(axes: Any, rows: Sequence[Row], label: str, attribute: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    highest = max((row.offered or 0.0 for row in rows if row.lengths == label), default=1.0)
    axes.set_xlabel("offered/s")
    axes.set_xlim(0, highest * 1.02)
    if attribute == "served":
        _, top = axes.get_ylim()
        axes.plot([0, highest], [0, highest], **_GUIDE)
        axes.set_ylim(0, top)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, _LONGEST_MS))
    if attribute == "p99_ms":
        axes.axhline(GOAL_P99_MS, **_GUIDE)


def _style(system: ServedSystem) -> dict[str, Any]:
    return {
        "color": COLORS[system.name],
        "linewidth": 2.6 if system.name == OURS else 1.4,
        "linestyle": "-" if system.is_ours else "--",
        "marker": "o" if system.is_ours else "s",
        "markersize": 4,
        "zorder": 3 if system.is_ours else 2,
    }
