"""What each system serves of what it is offered, and how long callers wait, as one picture.

The left column is figure 7 of the account that the authors of TurboTransformers gave in Chinese: a system leaves the
diagonal where it is saturated.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from varlen_bench.serving.figures import GOAL
from varlen_bench.serving.rows import Row
from varlen_bench.serving.systems import OURS, SYSTEMS, System

# Ours in blues and greens, peers in warm colours; the dynamic batcher of today is red.
_COLOURS = {
    "varlen-dp": "#0b4fa8",
    "varlen-token-budget": "#2f9ed8",
    "varlen-dp-padded": "#12805c",
    "varlen-fifo-padded": "#7cc29f",
    "varlen-none": "#8b8fd6",
    "transformers-fp32-dynamic": "#c01f2e",
    "transformers-fp32-single": "#e8837a",
    "transformers-bf16-dynamic": "#8a5a2b",
    "transformers-bf16-single": "#c9a26b",
    "onnxruntime-fp32-dynamic": "#d97a00",
    "onnxruntime-fp32-single": "#f2b84b",
}
_DPI = 110
_PANELS = (("served/s", "served"), ("mean latency, ms", "mean_ms"), ("p99 latency, ms", "p99_ms"))
# Latency of a system that is behind is its backlog's; only the curve up to there says something.
_LONGEST_MS = 5000.0


def picture(rows: Sequence[Row], labels: Sequence[str]) -> bytes:
    """Return a PNG: a row of panels for each mix of lengths.

    Args:
        rows: of a run.
        labels: of the mixes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4 * len(labels) + 0.9), dpi=_DPI, layout="constrained")
    panels = figure.subplots(len(labels), len(_PANELS), squeeze=False)
    for line, label in zip(panels, labels, strict=True):
        for axes, (title, attribute) in zip(line, _PANELS, strict=True):
            _draw_panel(axes, rows, label, attribute)
            axes.set_title(f"{label} tokens: {title}", loc="left", fontsize=10)
            if attribute == "p99_ms":
                axes.axhline(GOAL.p99_ms, color="#999999", linewidth=0.8, linestyle=":")
    handles = {
        line.get_label(): line
        for axes in panels.flat
        for line in axes.get_lines()
        if _is_named(line)
    }
    named = [system.name for system in SYSTEMS if system.name in handles]
    figure.legend(
        [handles[name] for name in named], named, loc="outside lower center", ncols=4, frameon=False
    )
    held = io.BytesIO()
    figure.savefig(held, format="png")
    return held.getvalue()


def curve(
    rows: Sequence[Row], label: str, system: str, attribute: str
) -> list[tuple[float, float]]:
    """Return a system's points of load on one mix, by what was offered; loads that were given up are left out."""
    found = [
        (row.offered, getattr(row, attribute))
        for row in rows
        if row.lengths == label
        and row.system == system
        and row.kind in {"load", "most"}
        and row.offered is not None
        and getattr(row, attribute) is not None
        and (row.kind == "most" or not row.not_sent)
    ]
    return sorted(found)


def _draw_panel(axes: Any, rows: Sequence[Row], label: str, attribute: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for system in SYSTEMS:
        points = curve(rows, label, system.name, attribute)
        if points:
            axes.plot(*zip(*points, strict=True), **_style(system))
    highest = max((row.offered or 0.0 for row in rows if row.lengths == label), default=1.0)
    axes.set_xlabel("offered/s", fontsize=9)
    axes.set_xlim(0, highest * 1.02)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    if attribute == "served":
        _, top = axes.get_ylim()
        axes.plot([0, highest], [0, highest], color="#bbbbbb", linewidth=0.8, linestyle=":")
        axes.set_ylim(0, top)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        low, high = axes.get_ylim()
        axes.set_ylim(low, min(high, _LONGEST_MS))


def _style(system: System) -> dict[str, Any]:
    return {
        "label": system.name,
        "color": _COLOURS[system.name],
        "linewidth": 2.6 if system.name == OURS else 1.4,
        "linestyle": "-" if system.is_ours else "--",
        "marker": "o" if system.is_ours else "s",
        "markersize": 4,
        "zorder": 3 if system.is_ours else 2,
    }


def _is_named(line: Any) -> bool:
    return not str(line.get_label()).startswith("_")
