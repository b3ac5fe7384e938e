"""Usage records: when each intermediate of a program is live, and how many bytes it takes.

A record is derived from the recorded program, never written by hand. Sizes are symbolic, so that one
set of records serves batches of every shape.

Source: the records of TurboTransformers (Fang et al. 2021, arXiv:2010.05680, section 4.2).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# First and last op that touch a tensor, inclusive.
Lifetime = tuple[int, int]


class Size(NamedTuple):
    """A number of bytes that grows with the batch."""

    per_token: int = 0
    per_sequence: int = 0
    fixed: int = 0

    def at(self, tokens: int, sequences: int) -> int:
        """Return the bytes for a batch of so many tokens and sequences."""
        return self.per_token * tokens + self.per_sequence * sequences + self.fixed


@dataclass(frozen=True, slots=True)
class Usage:
    """One stretch of memory that intermediates use: a result, and the results written over it in place.

    Attributes:
        name: of the first of them.
        first_op, last_op: the op that writes it first, and the last that reads it or writes it; inclusive.
        size: in bytes.
    """

    name: str
    first_op: int
    last_op: int
    size: Size


@dataclass(frozen=True, slots=True)
class Buffer:
    """Usages of one size, never live together, that share one place in every plan.

    The same tensor of each layer becomes one buffer, so that what is planned is one layer.

    Attributes:
        usages: in order of time.
        size: of each, in bytes.
    """

    usages: tuple[Usage, ...]
    size: Size

    @property
    def lifetimes(self) -> list[Lifetime]:
        """When it holds something, in order of time."""
        return [(usage.first_op, usage.last_op) for usage in self.usages]


def fold(usages: Sequence[Usage]) -> tuple[Buffer, ...]:
    """Return as few buffers as hold all usages: each goes to the first one of its size that is free.

    Args:
        usages: in the order of `first_op`.
    """
    rows: list[list[Usage]] = []
    for usage in usages:
        free = (
            row for row in rows if row[-1].size == usage.size and row[-1].last_op < usage.first_op
        )
        row = next(free, None)
        if row is None:
            rows.append([usage])
        else:
            row.append(usage)
    return tuple(Buffer(tuple(row), row[0].size) for row in rows)


def conflicts(lifetimes: Sequence[Sequence[Lifetime]]) -> tuple[int, ...]:
    """Return for each entry the set of those that are live when it is, as a mask: bit i stands for entry i.

    Args:
        lifetimes: of each entry, one or many.
    """
    masks = [0] * len(lifetimes)
    for i, mine in enumerate(lifetimes):
        for j in range(i):
            if any(a <= d and c <= b for a, b in mine for c, d in lifetimes[j]):
                masks[i] |= 1 << j
                masks[j] |= 1 << i
    return tuple(masks)


def live_sizes(usages: Sequence[Usage]) -> tuple[Size, ...]:
    """Return what is live together at some op, summed up; without sums that another one is never below.

    The largest of them, for a batch, is the peak of its live bytes: no plan can use fewer.
    """
    sums = {
        _total(usage.size for usage in usages if usage.first_op <= op <= usage.last_op)
        for op in {started.first_op for started in usages}
    }
    return tuple(
        size
        for size in sums
        if not any(size != other and _is_never_below(other, size) for other in sums)
    )


def _total(sizes: Iterable[Size]) -> Size:
    return Size(*(sum(terms) for terms in zip(*sizes, strict=True)))


def _is_never_below(size: Size, other: Size) -> bool:
    return all(mine >= theirs for mine, theirs in zip(size, other, strict=True))
