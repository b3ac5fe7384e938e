"""A picture of policies under load: what is served, and how long callers wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from varlen_tools.simulate.study import Point

_PANELS = (
    ("served/s", "served", 1.0),
    ("mean latency, ms", "mean", 1e3),
    ("p99 latency, ms", "p99", 1e3),
)


def draw(points: Sequence[Point], output: Path, title: str) -> None:
    """Write a picture of three panels over requests a second; the format follows from the file's name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    names = list(dict.fromkeys((point.policy, point.execution) for point in points))
    for axes, (label, attribute, scale) in zip(
        figure.subplots(1, len(_PANELS)), _PANELS, strict=True
    ):
        for policy, execution in names:
            line = [p for p in points if (p.policy, p.execution) == (policy, execution)]
            axes.plot(
                [point.offered for point in line],
                [scale * getattr(point, attribute) for point in line],
                marker="o",
                markersize=3,
                label=f"{policy}, {execution}",
            )
        axes.set_xlabel("requests offered a second")
        axes.set_title(label, loc="left")
        if attribute != "served":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    figure.savefig(output)
