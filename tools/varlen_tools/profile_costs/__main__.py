"""The command `varlen costs model_repository/minilm`.

What it measures goes into the cache that the server reads, so that a model's first start measures nothing.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from varlen.config import Execution
from varlen.costs.model import BatchLimits, BatchShape, MeasuredBatch, powers_of_two
from varlen.costs.store import StoredCosts
from varlen.errors import VarlenError
from varlen.execution.workers.worker import load_workers
from varlen.service.costs import measured_costs, warm_up
from varlen.telemetry.metrics import Stats
from varlen_client.cli.progress import show_stage
from varlen_tools.model_source import (
    ModelSource,
    SettingsOption,
    SourceArgument,
    find_source,
    parse_settings,
)
from varlen_tools.tables import Table

_DEFAULT_SECONDS = 20


def main(
    source: SourceArgument,
    settings: SettingsOption = None,
    seconds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Seconds to measure at most; default: the model's warmup_seconds."
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again what is in the cache.")
    ] = False,
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU, if the model uses one.")] = 0,
) -> None:
    """Measure what a model's batches cost; print it.

    Costs in the cache are not measured again.
    """
    try:
        found = find_source(source, parse_settings(settings))
        with show_stage(f"loading {found.name}") as on_stage:
            # lines of the log go above the stage
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            costs = _costs(found, seconds, on_stage, gpu=gpu, again=again)
    except VarlenError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    Console().print(*tables(Profile.of(costs)), sep="\n")


def _costs(
    source: ModelSource,
    seconds: int | None,
    on_stage: Callable[[str], object],
    *,
    gpu: int,
    again: bool,
) -> StoredCosts:
    allowed = seconds or source.config.warmup_seconds or _DEFAULT_SECONDS
    config = replace(source.config, warmup_seconds=allowed)
    checkpoint = source.open_checkpoint()
    workers = load_workers(checkpoint, config, Stats(), gpu=gpu, isolated=True)
    executor = workers.new_executor()
    try:
        warm_up(workers.info, executor, config)
        on_stage(f"measuring batches, at most {allowed} s")
        return measured_costs(workers.info, executor, checkpoint, config, again=again)
    finally:
        if executor.close():
            workers.close()


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured cost model on a grid, and measured batches with their predictions.

    Attributes:
        lengths, counts: axes of the grid, ascending.
        seconds: `[lengths, counts]`, predicted cost of a batch of `count` sequences of `length` tokens.
        is_allowed: `[lengths, counts]`, whether the batch is within the limits.
        batches: measured batches, by number of tokens, each with its predicted seconds.
    """

    lengths: list[int]
    counts: list[int]
    seconds: NDArray[np.float64]
    is_allowed: NDArray[np.bool_]
    batches: list[tuple[MeasuredBatch, float]]

    @classmethod
    def of(cls, costs: StoredCosts) -> "Profile":
        key = costs.key
        execution: Execution = "padded" if key["execution"] == "padded" else "packed"
        model = costs.measurement.model(execution)
        limits = BatchLimits(
            int(key["max_batch_sequences"]), int(key["max_batch_tokens"]), execution
        )
        lengths = powers_of_two(int(key["max_sequence_tokens"]))
        counts = powers_of_two(limits.max_sequences)
        shapes = [[BatchShape.of([length] * count) for count in counts] for length in lengths]
        seconds = [[model.seconds(shape) for shape in row] for row in shapes]
        is_allowed = [
            [limits.allow(shape.sequences, shape.tokens, shape.longest) for shape in row]
            for row in shapes
        ]
        measured = sorted(costs.measurement.batches, key=lambda batch: batch.shape.tokens)
        batches = [(batch, model.seconds(batch.shape)) for batch in measured]
        return cls(lengths, counts, np.array(seconds), np.array(is_allowed), batches)

    def grids(self) -> dict[str, NDArray[np.float64]]:
        return {
            "milliseconds per batch": 1e3 * self.seconds,
            "microseconds per token": 1e6 * self.seconds / np.outer(self.lengths, self.counts),
        }

    def median_error(self) -> float:
        errors = [abs(predicted / batch.seconds - 1) for batch, predicted in self.batches]
        return float(np.median(errors))


_CAPTION = "struck out: beyond the limits of a batch"


def tables(profile: Profile) -> Iterator[Table]:
    """Yield milliseconds per batch, microseconds per token, and the measured batches."""
    headings = ("tokens each", *(f"{count} x" for count in profile.counts))
    for title, grid in profile.grids().items():
        lines = [
            [
                str(length),
                *(
                    three_digits(value) if is_allowed else f"[dim strike]{three_digits(value)}[/]"
                    for value, is_allowed in zip(*row, strict=True)
                ),
            ]
            for length, *row in zip(
                profile.lengths, grid.tolist(), profile.is_allowed.tolist(), strict=True
            )
        ]
        yield Table(title, headings, lines, align_right=True, caption=_CAPTION)
    yield batch_table(profile)


def batch_table(profile: Profile) -> Table:
    """Return the table of the measured batches with their predictions."""
    lines = [
        [
            str(batch.shape.sequences),
            str(batch.shape.tokens),
            str(batch.shape.longest),
            three_digits(1e3 * batch.seconds),
            three_digits(1e3 * predicted),
            f"{predicted / batch.seconds - 1:+.1%}",
        ]
        for batch, predicted in profile.batches
    ]
    headings = ("sequences", "tokens", "longest", "measured", "predicted", "error")
    caption = f"median error {profile.median_error():.1%}"
    title = "measured batches, in milliseconds"
    return Table(title, headings, lines, align_right=True, caption=caption)


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    typer.run(main)
