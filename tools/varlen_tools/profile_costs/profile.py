"""A measured cost model, ready to be shown: its cost on a grid, and every measured batch beside its prediction."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from varlen.config import Execution
from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import powers_of_two
from varlen.costs.store import StoredCosts


@dataclass(frozen=True, slots=True)
class Cell:
    """The predicted cost of a batch of one length.

    Attributes:
        sequences, length: number of sequences, and tokens of each.
        seconds: of the batch, predicted.
        is_allowed: whether the batch is within the limits.
    """

    sequences: int
    length: int
    seconds: float
    is_allowed: bool

    @property
    def per_token(self) -> float:
        """Seconds per token."""
        return self.seconds / (self.sequences * self.length)


@dataclass(frozen=True, slots=True)
class Checked:
    """A measured batch and its prediction.

    Attributes:
        shape: of the batch.
        actual, predicted: seconds.
    """

    shape: BatchShape
    actual: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.actual - 1


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured cost model, ready to be shown.

    Attributes:
        name: of the model.
        costs: the measurement and what it was measured for.
        counts, lengths: the sides of the grid, ascending.
        cells: by (sequences, length).
        checked: measured batches, the fewest tokens first.
    """

    name: str
    costs: StoredCosts
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: dict[tuple[int, int], Cell]
    checked: tuple[Checked, ...]

    @classmethod
    def of(cls, name: str, costs: StoredCosts) -> Profile:
        """Return the profile of measured costs."""
        execution: Execution = "padded" if costs.key["execution"] == "padded" else "packed"
        model = costs.measurement.model(execution)
        limits = BatchLimits(
            int(costs.key["max_batch_sequences"]), int(costs.key["max_batch_tokens"]), execution
        )
        counts = powers_of_two(limits.max_sequences)
        lengths = powers_of_two(int(costs.key["max_sequence_tokens"]))
        cells = {
            (count, length): Cell(
                count,
                length,
                model.seconds(BatchShape.of([length] * count)),
                limits.allow(count, count * length, length),
            )
            for length in lengths
            for count in counts
        }
        checked = [
            Checked(batch.shape, batch.seconds, model.seconds(batch.shape))
            for batch in costs.measurement.batches
        ]
        return cls(
            name,
            costs,
            tuple(counts),
            tuple(lengths),
            cells,
            tuple(sorted(checked, key=lambda batch: batch.shape.tokens)),
        )

    def median_error(self) -> float:
        """Return the median relative error of the measured batches."""
        return statistics.median(abs(batch.error) for batch in self.checked)
