"""Usage records: lifetime and size of each intermediate of a program.

Records are derived from the recorded program, never written by hand. Sizes are symbolic, so one set of records
serves batches of every shape.

Source: the records of TurboTransformers (Fang et al. 2021, arXiv:2010.05680, section 4.2).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TypeAlias

# First and last op that touch a tensor, inclusive.
Lifetime: TypeAlias = tuple[int, int]
# Sizes of one batch's dimensions, by name, such as {"tokens": 90, "sequences": 4}.
Dims: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True, init=False)
class Size:
    """A number that grows linearly with named dimensions: the elements of an axis, or bytes.

    No coefficient is negative, so a smaller batch never needs more.

    Attributes:
        fixed: the part that no dimension changes.
        per: (dimension, coefficient), in order of the names; no coefficient is 0.
    """

    fixed: int
    per: tuple[tuple[str, int], ...]

    def __init__(self, fixed: int = 0, **per: int) -> None:
        """Make a size from the coefficients: `Size(1, sequences=1)` is sequences + 1.

        Raises:
            ValueError: a number is negative.
        """
        if min((fixed, *per.values())) < 0:
            raise ValueError(f"a size of {fixed} and {per}; allowed: numbers from 0")
        object.__setattr__(self, "fixed", fixed)
        object.__setattr__(self, "per", tuple(sorted((n, k) for n, k in per.items() if k)))

    def at(self, dims: Dims) -> int:
        """Return the number for a batch of these dimensions."""
        return self.fixed + sum(factor * dims[name] for name, factor in self.per)

    def __add__(self, other: "Size | int") -> "Size":
        if isinstance(other, int):
            other = Size(other)
        mine, theirs = dict(self.per), dict(other.per)
        names = {*mine, *theirs}
        per = {name: mine.get(name, 0) + theirs.get(name, 0) for name in names}
        return Size(self.fixed + other.fixed, **per)

    def __sub__(self, other: int) -> "Size":
        """Return the difference.

        Raises:
            ValueError: its fixed part is negative.
        """
        return Size(self.fixed - other, **dict(self.per))

    def __mul__(self, other: "Size | int") -> "Size":
        """Return the product.

        Raises:
            ValueError: both factors grow with the batch, so the product is not linear.
        """
        if isinstance(other, int):
            other = Size(other)
        if self.per and other.per:
            raise ValueError(f"{self} times {other} is not linear; allowed: one symbolic axis")
        (growing, factor) = (self, other.fixed) if self.per else (other, self.fixed)
        return Size(growing.fixed * factor, **{name: k * factor for name, k in growing.per})

    def is_never_below(self, other: "Size") -> bool:
        """Return whether it is at least `other` for every batch."""
        mine = dict(self.per)
        return self.fixed >= other.fixed and all(mine.get(name, 0) >= k for name, k in other.per)


# An axis of fixed length, or one whose length a batch decides.
Axis: TypeAlias = int | Size
Shape: TypeAlias = tuple[Axis, ...]


def shapes_at(shapes: Iterable[Shape], dims: Dims) -> list[tuple[int, ...]]:
    """Return shapes for a batch of these dimensions."""
    return [
        tuple([axis if isinstance(axis, int) else axis.at(dims) for axis in shape])
        for shape in shapes
    ]


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of a result, and of the results written over it in place.

    Attributes:
        name: name of the first of these results.
        first_op, last_op: the op that writes it first, and the last that reads or writes it; inclusive.
        size: number of bytes.
    """

    name: str
    first_op: int
    last_op: int
    size: Size


@dataclass(frozen=True, slots=True)
class Buffer:
    """Usages of one size, never live together, that share one place in every plan.

    The same tensor of each layer becomes one buffer, so the plan of one layer serves all.

    Attributes:
        usages: usage records in order of time.
        size: bytes of each.
    """

    usages: tuple[Usage, ...]
    size: Size

    @property
    def lifetimes(self) -> list[Lifetime]:
        """Lifetimes of the usages, in order of time."""
        return [(usage.first_op, usage.last_op) for usage in self.usages]


def fold(usages: Sequence[Usage]) -> tuple[Buffer, ...]:
    """Return the fewest buffers that hold all usages.

    Each usage goes to the first buffer of its size that is free.

    Args:
        usages: usage records in the order of `first_op`.
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
    """Return, for each entry, a bit mask of the entries live with it."""
    masks = [0] * len(lifetimes)
    for i, mine in enumerate(lifetimes):
        for j in range(i):
            if any(a <= d and c <= b for a, b in mine for c, d in lifetimes[j]):
                masks[i] |= 1 << j
                masks[j] |= 1 << i
    return tuple(masks)


def live_sizes(usages: Sequence[Usage]) -> tuple[Size, ...]:
    """Return the live bytes at each op; dominated entries dropped.

    The largest of them, for a batch, is its peak of live bytes: no plan can use fewer.
    """
    sums = {
        reduce(add, (usage.size for usage in usages if usage.first_op <= op <= usage.last_op))
        for op in {started.first_op for started in usages}
    }
    return tuple(
        size
        for size in sums
        if not any(size != other and other.is_never_below(size) for other in sums)
    )
