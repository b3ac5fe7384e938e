"""Which batches are measured for a table of costs, and in which order: a grid, and mixed batches that check it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TypeAlias

from varlen.scheduling.cost import powers_of_two
from varlen.scheduling.partition import Limits

# (sequences, length in tokens)
Point: TypeAlias = tuple[int, int]

# Shorter sequences than this are taken to cost as much.
_SHORTEST = 4
# Mixed batches: how large a share of a full one, and the longest sequence's share of what is allowed.
_SIZES = (0.1, 0.3, 0.6, 1.0)
_LONGEST = (1.0, 0.25)


def grid_order(limits: Limits, max_length: int) -> tuple[list[Point], list[Point]]:
    """Return the points of the grid in the order in which they are measured: those any table needs, and the others.

    Every other length and number of sequences comes first, then those between; small batches before large ones.
    """
    lengths = [n for n in powers_of_two(max_length) if n >= _SHORTEST] or [max_length]
    counts = powers_of_two(limits.max_sequences)
    fine = [(n, length) for length in lengths for n in counts if n * length <= limits.max_tokens]
    coarse = [
        (n, length)
        for length in _every_other(lengths)
        for n in _every_other([n for n in counts if n * length <= limits.max_tokens])
    ]
    shortest, longest = lengths[0], lengths[-1]
    needed = [(n, length) for n, length in coarse if length == shortest][:2]
    needed += [(1, longest)] if longest > shortest else []
    rest = [point for points in (coarse, fine) for point in sorted(points, key=_tokens)]
    return needed, [point for point in dict.fromkeys(rest) if point not in needed]


def mixed_batches(limits: Limits, max_length: int) -> list[list[int]]:
    """Return the lengths of batches of several sizes, of uniformly random lengths; the same ones every time."""
    numbers = random.Random(0)
    batches = [
        _mixed_batch(numbers, limits, size, max(1, int(max_length * longest)))
        for longest in _LONGEST
        for size in _SIZES
    ]
    return [batch for batch in batches if len(batch) > 1]


def _mixed_batch(numbers: random.Random, limits: Limits, size: float, longest: int) -> list[int]:
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


def _tokens(point: Point) -> int:
    count, length = point
    return count * length
