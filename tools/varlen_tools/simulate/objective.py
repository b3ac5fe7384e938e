"""The picture of the scheduler's objective: the best batches of one queue, for three pressures.

A batch is a box: as wide as it takes, as high as the number of requests that it delays, later arrivals included.
The scheduler minimizes the total area of the boxes: `python -m varlen_tools.simulate.objective`.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varlen.costs.batch_shape import BatchLimits
from varlen.costs.model import CostModel
from varlen.scheduling.partition import partition
from varlen_tools import pictures
from varlen_tools.simulate.costs import cpu_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LENGTHS = [8, 9, 10, 12, 14, 16, 60, 65, 70, 240, 500]
_TITLES = {
    0.0: "pressure 0: least waiting",
    12.0: "pressure 12",
    math.inf: "pressure ∞: least total time",
}
_MILLISECONDS = 1e3
_WAITING, _LATER = pictures.COLORS[0], pictures.COLORS[4]


def main(
    output: Annotated[Path, typer.Argument(help="Picture to write.")] = Path("docs/scheduling.svg"),
) -> None:
    """Draw what the scheduler minimizes."""
    print(*pictures.write(draw, output), sep="\n")


def draw() -> Figure:
    """Return a panel for each pressure."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    panels = figure.subplots(1, len(_TITLES), sharex=True, sharey=True)
    for axes, pressure in zip(panels, _TITLES, strict=True):
        _draw_batches(axes, pressure)
    panels[0].set_ylabel("requests")
    figure.suptitle(
        f"The best batches of {len(_LENGTHS)} requests; above each box, its requests x their tokens"
    )
    patches = [
        Patch(color=_WAITING, label="requests that wait"),
        Patch(color=_LATER, label="later arrivals that the batch delays: the pressure"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=2)
    return figure


def _draw_batches(axes: Axes, pressure: float) -> None:
    from matplotlib import rcParams

    costs = CostModel.of_function(
        lambda n, length: 4e-3 + cpu_seconds(n, length), "packed", max_sequences=16, max_length=512
    )
    sizes, seconds = partition(_LENGTHS, costs, BatchLimits(16, 8192), pressure=pressure)
    ends = [_MILLISECONDS * end for end in accumulate(seconds, initial=0.0)]
    numbers = list(accumulate(sizes, initial=0))
    later = 0.0 if math.isinf(pressure) else pressure
    box = {"align": "edge", "edgecolor": rcParams["axes.facecolor"]}
    for (first, last), (left, right) in zip(pairwise(numbers), pairwise(ends), strict=True):
        waiting = len(_LENGTHS) - first
        axes.bar(left, waiting, right - left, later, color=_WAITING, **box)
        axes.bar(left, later, right - left, color=_LATER, **box)
        shortest, longest = _LENGTHS[first], _LENGTHS[last - 1]
        lengths = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        middle, top = (left + right) / 2, later + waiting + 0.3
        axes.text(middle, top, f"{last - first} x\n{lengths}", ha="center", fontsize=8)
    axes.set_title(_TITLES[pressure])
    axes.set_xlabel(f"milliseconds; all are done after {ends[-1]:.0f}")
    axes.set_ylim(0, len(_LENGTHS) + max(p for p in _TITLES if p < math.inf) + 4)


if __name__ == "__main__":
    typer.run(main)
