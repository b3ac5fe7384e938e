"""The picture of policies under load: requests served, and latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from varlen_tools.simulate.study import PolicyResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (
    ("requests served per second", "served", 1.0),
    ("mean latency, ms", "mean", 1e3),
    ("p99 latency, ms", "p99", 1e3),
)


def draw(results: Sequence[PolicyResult], title: str) -> Figure:
    """Return three panels over the offered load, a line for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    names = list(dict.fromkeys((result.policy, result.execution) for result in results))
    panels = figure.subplots(1, len(_PANELS))
    for axes, (label, field, scale) in zip(panels, _PANELS, strict=True):
        for policy, execution in names:
            line = [
                each for each in results if (each.policy, each.execution) == (policy, execution)
            ]
            axes.plot(
                [result.offered for result in line],
                [scale * getattr(result, field) for result in line],
                marker="o",
                markersize=3,
                label=f"{policy}, {execution}",
            )
        axes.set_xlabel("requests offered per second")
        axes.set_ylabel(label)
        if field != "served":
            axes.set_yscale("log")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(title)
    return figure
