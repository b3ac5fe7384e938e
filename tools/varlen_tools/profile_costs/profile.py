"""A measured cost model on a grid, and measured batches with their predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varlen.config import Execution
from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import MeasuredBatch, powers_of_two
from varlen.costs.store import StoredCosts


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
