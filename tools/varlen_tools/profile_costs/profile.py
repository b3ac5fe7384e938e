"""A measured cost model, ready to be shown: its costs on a grid, and measured batches with their predictions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from varlen.config import Execution
from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import powers_of_two
from varlen.costs.store import StoredCosts


@dataclass(frozen=True, slots=True)
class GridCell:
    """The predicted cost of a batch of equal lengths.

    Attributes:
        sequences, length: number of sequences, and tokens of each.
        seconds: predicted seconds of the batch.
        is_allowed: whether the batch is within the limits.
    """

    sequences: int
    length: int
    seconds: float
    is_allowed: bool

    @property
    def milliseconds(self) -> float:
        """Milliseconds of the batch."""
        return 1e3 * self.seconds

    @property
    def microseconds_per_token(self) -> float:
        """Microseconds per token."""
        return 1e6 * self.seconds / (self.sequences * self.length)


@dataclass(frozen=True, slots=True)
class PredictedBatch:
    """A measured batch and its prediction.

    Attributes:
        shape: of the batch.
        measured, predicted: seconds.
    """

    shape: BatchShape
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured cost model, ready to be shown.

    Attributes:
        name: of the model.
        costs: the measurement and its circumstances.
        counts, lengths: axes of the grid, ascending.
        cells: by (sequences, length).
        batches: measured batches, by number of tokens.
    """

    name: str
    costs: StoredCosts
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: dict[tuple[int, int], GridCell]
    batches: tuple[PredictedBatch, ...]

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
            (count, length): GridCell(
                count,
                length,
                model.seconds(BatchShape.of([length] * count)),
                limits.allow(count, count * length, length),
            )
            for length in lengths
            for count in counts
        }
        batches = [
            PredictedBatch(batch.shape, batch.seconds, model.seconds(batch.shape))
            for batch in costs.measurement.batches
        ]
        batches.sort(key=lambda batch: batch.shape.tokens)
        return cls(name, costs, tuple(counts), tuple(lengths), cells, tuple(batches))

    def median_error(self) -> float:
        """Return the median relative error of the measured batches."""
        return statistics.median(abs(batch.error) for batch in self.batches)
