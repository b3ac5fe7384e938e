"""The objective as a picture: who waits, and for how long, under the best cuts for three pressures.

Each batch is a box, as wide as it takes and as high as the requests that wait while it runs, those to come included.
The scheduler makes the sum of the boxes as small as it can: `python -m varlen_tools.simulate.objective`.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from varlen.costs.batch_shape import BatchLimits
from varlen.costs.model import CostModel
from varlen.scheduling.partition import partition
from varlen_tools.simulate.__main__ import cpu_seconds

_LENGTHS = [8, 9, 10, 12, 14, 16, 60, 65, 70, 240, 500]
_PRESSURES = (0.0, 12.0, math.inf)
_TITLES = {
    0.0: "nobody to come: least waiting",
    math.inf: "no end of them: least total time (TurboTransformers)",
}
_MILLISECONDS = 1e3
_COLOURS = ("#2f6db3", "#7fb0dd")


def main(
    output: Annotated[Path, typer.Argument(help=".svg or .png")] = Path("docs/scheduling.svg"),
) -> None:
    """Draw what the scheduler minimises."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    # the same bytes every time
    rcParams["svg.hashsalt"] = "varlen"
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = figure.subplots(1, len(_PRESSURES), sharex=True)
    for axes, pressure in zip(panels, _PRESSURES, strict=True):
        _draw(axes, pressure)
    lengths = ", ".join(map(str, _LENGTHS))
    figure.suptitle(
        f"Requests of {lengths} tokens. A box is a batch: as wide as it takes, as high as who waits"
    )
    figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
    print(output)


def _draw(axes: Any, pressure: float) -> None:
    costs = CostModel.of_function(
        lambda n, length: 4e-3 + cpu_seconds(n, length), "packed", max_sequences=16, max_length=512
    )
    sizes, seconds = partition(_LENGTHS, costs, BatchLimits(16, 8192), pressure=pressure)
    begins = list(accumulate(sizes, initial=0))
    starts = accumulate(seconds, initial=0.0)
    to_come = 0.0 if math.isinf(pressure) else pressure
    for number, ((begin, end), start, took) in enumerate(
        zip(pairwise(begins), starts, seconds, strict=False)
    ):
        waiting = len(_LENGTHS) - begin
        left, width = _MILLISECONDS * start, _MILLISECONDS * took
        colour = _COLOURS[number % 2]
        axes.bar(left, waiting, width, to_come, align="edge", color=colour, edgecolor="white")
        if to_come:
            axes.bar(left, to_come, width, align="edge", color=colour, alpha=0.35)
        lengths = "\n".join(map(str, _LENGTHS[begin:end]))
        axes.text(
            left + width / 2, to_come + waiting, lengths, ha="center", va="bottom", fontsize=7
        )
    total = _MILLISECONDS * sum(seconds)
    axes.set_title(_TITLES.get(pressure, f"{pressure:.0f} to come"), loc="left", fontsize=10)
    axes.set_xlabel(f"milliseconds; done after {total:.0f}")
    axes.set_ylabel("requests waiting, and to come (pale)" if not pressure else "")
    axes.set_ylim(0, len(_LENGTHS) + to_come + 12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    typer.run(main)
