"""What is shown of a table of costs: each point of its grid, and how well mixed batches were predicted."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal, TypeAlias

from varlen.config import Execution
from varlen.costs.batch_shape import BatchShape
from varlen.costs.store import StoredCosts

# `filled`: read off its neighbours. `past`: more tokens than a batch may hold; it only helps to fill.
Kind: TypeAlias = Literal["measured", "filled", "past"]


@dataclass(frozen=True, slots=True)
class Point:
    """A batch of one length.

    Attributes:
        sequences, length: how many, of how many tokens.
        seconds: what it costs, as batches are planned by it.
        measured: the median of what it took; None if it was not measured.
        kind: where its cost is from.
    """

    sequences: int
    length: int
    seconds: float
    measured: float | None
    kind: Kind

    @property
    def per_token(self) -> float:
        """Seconds a token."""
        return self.seconds / (self.sequences * self.length)


@dataclass(frozen=True, slots=True)
class Mixed:
    """A batch of mixed lengths.

    Attributes:
        shape: of it.
        actual: the median of what it took, in seconds.
        by_grid: what the batches of one length say that it takes.
        by_table: what the table says, which mixed batches have corrected.
    """

    shape: BatchShape
    actual: float
    by_grid: float
    by_table: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A table of costs, ready to be shown.

    Attributes:
        name: of the model.
        costs: what was measured, and under which circumstances.
        counts, lengths: the sides of the grid, ascending.
        points: by (sequences, length).
        mixed: the fewest tokens first.
    """

    name: str
    costs: StoredCosts
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    points: dict[tuple[int, int], Point]
    mixed: tuple[Mixed, ...]

    @classmethod
    def of(cls, name: str, costs: StoredCosts) -> Profile:
        """Return what there is to show of measured costs."""
        execution: Execution = "padded" if costs.about["execution"] == "padded" else "packed"
        most = int(costs.about["max_batch_tokens"])
        measurement = costs.measurement
        by_grid, table = measurement.grid_table(execution), measurement.table(execution)
        points = {
            (count, length): Point(
                count,
                length,
                seconds,
                measurement.samples.get((count, length)),
                _kind(count * length > most, (count, length) in measurement.samples),
            )
            for (count, length), seconds in table.grid.items()
        }
        shapes = [(BatchShape.of(batch.lengths), batch.seconds) for batch in measurement.mixed]
        mixed = [
            Mixed(shape, actual, by_grid.seconds(shape), table.seconds(shape))
            for shape, actual in shapes
        ]
        return cls(
            name,
            costs,
            tuple(sorted({count for count, _ in points})),
            tuple(sorted({length for _, length in points})),
            points,
            tuple(sorted(mixed, key=lambda batch: batch.shape.tokens)),
        )

    def median_errors(self) -> tuple[float, float] | None:
        """Return by what share mixed batches are off in the median: by the grid, and by the table; None without any."""
        if not self.mixed:
            return None
        return (
            statistics.median(abs(batch.by_grid / batch.actual - 1) for batch in self.mixed),
            statistics.median(abs(batch.by_table / batch.actual - 1) for batch in self.mixed),
        )


def _kind(is_past: bool, is_measured: bool) -> Kind:
    if is_past:
        return "past"
    return "measured" if is_measured else "filled"
