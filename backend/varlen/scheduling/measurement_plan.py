"""Which batches are measured for a table of costs, and in which order: a grid, and mixed batches that check it."""

from __future__ import annotations

import random
from collections import deque
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
    """Return the points of the grid in the order in which they are measured: those needed, and the others.

    Length by length, the shortest and the longest before those between, every other number of sequences; then the rest.
    """
    lengths = [n for n in powers_of_two(max_length) if n >= _SHORTEST] or [max_length]
    counts = powers_of_two(limits.max_sequences)
    fine = {length: [n for n in counts if n * length <= limits.max_tokens] for length in lengths}
    coarse = {length: sorted({*row[::2], row[-1]}) for length, row in fine.items()}
    shortest, longest = lengths[0], lengths[-1]
    needed = list(dict.fromkeys([(n, shortest) for n in coarse[shortest][:2]] + [(1, longest)]))
    rows = _ends_first(lengths)
    order = [(n, length) for chosen in (coarse, fine) for length in rows for n in chosen[length]]
    return needed, [point for point in dict.fromkeys(order) if point not in needed]


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


def _ends_first(values: list[int]) -> list[int]:
    """Return ascending values in another order: both ends, and then what halves the gaps, the widest first."""
    order = [values[0], values[-1]]
    gaps = deque([(0, len(values) - 1)])
    while gaps:
        begin, end = gaps.popleft()
        if end - begin > 1:
            middle = (begin + end) // 2
            order.append(values[middle])
            gaps += [(begin, middle), (middle, end)]
    return list(dict.fromkeys(order))
