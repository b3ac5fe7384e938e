"""A measured cost model on a grid, and measured batches with their predictions, as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varlen.config import Execution
from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import MeasuredBatch, powers_of_two
from varlen.costs.store import StoredCosts
from varlen_tools.tables import Table


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured cost model, ready to be shown.

    Attributes:
        costs: the measurement and its circumstances.
        lengths, counts: axes of the grid, ascending.
        seconds: `[lengths, counts]`, predicted cost of a batch of `count` sequences of `length` tokens.
        is_allowed: `[lengths, counts]`, whether the batch is within the limits.
        batches: measured batches, by number of tokens, each with its predicted seconds.
    """

    name: str
    costs: StoredCosts
    lengths: list[int]
    counts: list[int]
    seconds: NDArray[np.float64]
    is_allowed: NDArray[np.bool_]
    batches: list[tuple[MeasuredBatch, float]]

    @classmethod
    def of(cls, name: str, costs: StoredCosts) -> Profile:
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
        return cls(name, costs, lengths, counts, np.array(seconds), np.array(is_allowed), batches)

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
