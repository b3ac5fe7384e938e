"""Which batches are measured for a table of costs, and in which order: a grid, and mixed batches that check it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TypeAlias

from varlen.costs.batch_shape import BatchLimits
from varlen.costs.table import powers_of_two

# (sequences, length in tokens)
Point: TypeAlias = tuple[int, int]

# Shorter sequences than this are taken to cost as much.
_SHORTEST = 4
# Mixed batches: how large a share of a full one, and the longest sequence's share of what is allowed.
_MIXED = ((0.1, 0.25), (0.2, 1.0), (0.3, 0.25), (0.5, 1.0), (0.7, 0.25), (1.0, 1.0))


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """Which batches are measured, in this order: small ones before large ones in each part.

    Attributes:
        needed: without these points of the grid there is no table: one sequence and several of the shortest length,
            one of the longest.
        coarse: every other length and number of sequences.
        mixed: the lengths of batches of random lengths, the same ones every time.
        fine: the rest of the grid.
    """

    needed: list[Point]
    coarse: list[Point]
    mixed: list[list[int]]
    fine: list[Point]

    @property
    def batches(self) -> int:
        """How many there are."""
        return len(self.needed) + len(self.coarse) + len(self.mixed) + len(self.fine)

    @classmethod
    def of(cls, limits: BatchLimits, max_length: int) -> MeasurementPlan:
        """Return the plan for batches within limits, of sequences up to so many tokens."""
        lengths = [n for n in powers_of_two(max_length) if n >= _SHORTEST] or [max_length]
        counts = powers_of_two(limits.max_sequences)
        rows = {n: [c for c in counts if c * n <= limits.max_tokens] for n in lengths}
        every = [(count, length) for length in lengths for count in rows[length]]
        coarse = [
            (count, length)
            for length in _every_other(lengths)
            for count in _every_other(rows[length])
        ]
        shortest, longest = lengths[0], lengths[-1]
        several = [point for point in coarse if point[1] == shortest][:2]
        needed = list(dict.fromkeys([*several, (1, longest)]))
        return cls(
            needed,
            sorted({*coarse} - {*needed}, key=_tokens),
            _mixed_batches(limits, max_length),
            sorted({*every} - {*coarse} - {*needed}, key=_tokens),
        )


def _mixed_batches(limits: BatchLimits, max_length: int) -> list[list[int]]:
    numbers = random.Random(0)
    batches = [
        _mixed_batch(numbers, limits, size, max(1, int(max_length * longest)))
        for size, longest in _MIXED
    ]
    return sorted((batch for batch in batches if len(batch) > 1), key=sum)


def _mixed_batch(
    numbers: random.Random, limits: BatchLimits, size: float, longest: int
) -> list[int]:
    """Return random lengths up to `longest`, until the next would be too much for so large a share of a full batch."""
    limits = replace(limits, max_tokens=int(limits.max_tokens * size))
    lengths: list[int] = []
    while True:
        longer = [*lengths, numbers.randint(min(_SHORTEST, longest), longest)]
        if not limits.allow(len(longer), sum(longer), max(longer)):
            return lengths
        lengths = longer


def _every_other(values: list[int]) -> list[int]:
    """Return the first, the third and so on, and the last."""
    return list(dict.fromkeys([*values[::2], values[-1]]))


def _tokens(point: Point) -> tuple[int, Point]:
    count, length = point
    return count * length, point
