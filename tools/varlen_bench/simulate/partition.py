"""The command `python -m varlen_bench.simulate partition 17,18,52,63,77`, with the example of TurboTransformers.

It prints what the best partition of some sequences is worth: least total time over consecutive batches by length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from varlen.config import Execution
from varlen.costs.model import BatchShape, CostModel, FloatArray
from varlen.scheduling.one_shot.partition import best_partition
from varlen_bench.simulate.command import (
    COSTS_HELP,
    MILLISECONDS,
    CacheOption,
    new_console,
    parse_counts,
)
from varlen_bench.simulate.costs import CostSource, cost_models
from varlen_tools.tables import Table

# The five requests in the figure of the authors' report.
_EXAMPLE = "17,18,52,63,77"


def main(
    lengths: Annotated[str, typer.Argument(help="Lengths in tokens, by comma.")] = _EXAMPLE,
    costs: Annotated[CostSource, typer.Option(help=COSTS_HELP)] = CostSource.cpu,
    packed: Annotated[
        bool, typer.Option("--packed", help="Batches without padding; by default they pad.")
    ] = False,
    cache: CacheOption = "auto",
) -> None:
    """Print what the best partition of some sequences is worth."""
    execution: Execution = "packed" if packed else "padded"
    try:
        ordered = sorted(parse_counts("lengths", lengths))
        make_model = cost_models(
            costs, [execution], cache=cache, max_sequences=len(ordered), longest=ordered[-1]
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    new_console().print(_table(ordered, make_model(execution)))


def seconds_of_batches(lengths: Sequence[int], costs: CostModel) -> FloatArray:
    """Return [sequences, sizes], seconds of the batch of `column + 1` sequences from each one on."""
    count = len(lengths)
    seconds = np.full((count, count), math.inf)
    for first in range(count):
        for end in range(first + 1, count + 1):
            seconds[first, end - first - 1] = costs.seconds(BatchShape.of(lengths[first:end]))
    return seconds


def _table(lengths: Sequence[int], costs: CostModel) -> Table:
    seconds = seconds_of_batches(lengths, costs)
    count = len(lengths)
    partitions = {
        "one batch": [range(count)],
        "best partition": best_partition(seconds),
        "no batches": [range(place, place + 1) for place in range(count)],
    }
    whole, lines = seconds[0, -1], []
    for name, batches in partitions.items():
        total = sum(seconds[batch.start, len(batch) - 1] for batch in batches)
        parts = " | ".join(", ".join(str(lengths[i]) for i in batch) for batch in batches)
        figures = (f"{MILLISECONDS * total:.2f}", f"{count / total:.0f}", f"{whole / total:.2f}x")
        lines.append([name, parts, *figures])
    return Table("", ("", "batches, by length", "ms", "requests/s", "of one batch"), lines)


if __name__ == "__main__":
    typer.run(main)
