"""The planner: offsets of all buffers of a batch, such that live buffers never overlap.

Usage records, derived from the recorded program, have the lifetime of each intermediate, and its size in symbols: one
set of records serves batches of every shape.

Greedy by size: the largest buffer first, each into the smallest gap that holds it. Integers only;
the same sizes give the same plan, whatever was planned before.

Source: TurboTransformers (Fang et al. 2021, arXiv:2010.05680, section 4.2 and algorithm 1), in one unbounded chunk.
"""

from __future__ import annotations

import mmap
import os
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import accumulate
from math import prod
from operator import add
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from varlen.memory.memory_use import MemoryUse

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# First and last op that touch a tensor, inclusive.
Lifetime: TypeAlias = tuple[int, int]
# Sizes of one batch's dimensions, by name, such as {"tokens": 90, "sequences": 4}.
Dims: TypeAlias = Mapping[str, int]
# Largest number of cached plans; the least recently used are dropped. A plan is a tuple of about ten numbers.
_KEPT_PLANS = 4096
# Memory that no batch of a window needed is released. In batches; docs/decisions/0011-arena.md compares sizes.
_WINDOW = 64
_PAGE = 4096
# Memory is reserved and released in steps of a huge page.
_STEP = 2 << 20
# Messages of torch's host allocator and of oneDNN; neither has an exception of its own.
_ON_THE_HOST = ("DefaultCPUAllocator", "could not create a primitive")
# Messages of torch's allocator on a GPU, and of the driver, which allocates graphs and pinned memory without it.
_ON_THE_GPU = ("CUDA out of memory", "CUDA error: out of memory")
# Alignment of buffers, in bytes: a cache line.
HOST_ALIGNMENT = 64


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

    def __add__(self, other: Size | int) -> Size:
        if isinstance(other, int):
            other = Size(other)
        mine, theirs = dict(self.per), dict(other.per)
        names = {*mine, *theirs}
        per = {name: mine.get(name, 0) + theirs.get(name, 0) for name in names}
        return Size(self.fixed + other.fixed, **per)

    def __sub__(self, other: int) -> Size:
        """Return the difference.

        Raises:
            ValueError: its fixed part is negative.
        """
        return Size(self.fixed - other, **dict(self.per))

    def __mul__(self, other: Size | int) -> Size:
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

    def is_never_below(self, other: Size) -> bool:
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
        size: bytes.
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


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError instead of torch's errors about too little memory, on any device."""
    try:
        yield
    except RuntimeError as error:
        for place, messages in (("GPU", _ON_THE_GPU), ("host", _ON_THE_HOST)):
            if any(said in str(error) for said in messages):
                raise MemoryError(f"too little memory on the {place}") from error
        raise


@dataclass(frozen=True, slots=True)
class Plan:
    """The offsets of all buffers of one batch.

    Attributes:
        offsets: offset of each buffer, in bytes.
        footprint: bytes from the start of the first buffer to the end of the last.
        peak_live: most bytes live at one op; no plan can use fewer. Only a `Layout` knows it.
    """

    offsets: tuple[int, ...]
    footprint: int
    peak_live: int = 0


def plan(sizes: Sequence[int], conflicts: Sequence[int], alignment: int) -> Plan:
    """Return an offset for each buffer: the tightest gap that holds it, else the end.

    Args:
        sizes: size of each buffer, in bytes.
        conflicts: a mask for each buffer, of the buffers that are live when it is; see `usage.conflicts`.
        alignment: every offset is a multiple of it, in bytes.
    """
    offsets = [0] * len(sizes)
    footprint = 0
    placed: list[tuple[int, int, int]] = []
    for buffer in largest_first(sizes):
        size = -(-sizes[buffer] // alignment) * alignment
        offset = best_offset(placed, conflicts[buffer], size)
        insort(placed, (offset, offset + size, buffer))
        offsets[buffer] = offset
        footprint = max(footprint, offset + size)
    return Plan(tuple(offsets), footprint)


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Return the numbers of the buffers in the order in which they are placed."""
    return sorted(range(len(sizes)), key=lambda buffer: -sizes[buffer])


def best_offset(placed: Sequence[tuple[int, int, int]], conflicts: int, size: int) -> int:
    """Return the start of the tightest gap between the placed buffers, else their end.

    Args:
        placed: (offset, end, buffer) of each placed buffer, ascending.
        conflicts: a mask of the buffers that must not be overlapped.
        size: bytes that the gap must hold.
    """
    end, best, tightest = 0, None, None
    for offset, until, other in placed:
        if not conflicts >> other & 1:
            continue
        gap = offset - end
        if size <= gap and (tightest is None or gap < tightest):
            best, tightest = end, gap
        end = max(end, until)
    return end if best is None else best


class Layout:
    """Plans for one program's batches. A plan depends only on the batch's shape.

    Attributes:
        dim_names: the dimensions that change a plan.
        plan_seconds: time spent planning since the start.
    """

    def __init__(self, buffers: Sequence[Buffer], alignment: int) -> None:
        """Start without plans.

        Args:
            alignment: every offset is a multiple of it, in bytes.
        """
        self.buffers = tuple(buffers)
        self.dim_names = tuple(sorted({name for each in buffers for name, _ in each.size.per}))
        self._conflicts = conflicts([buffer.lifetimes for buffer in buffers])
        self._live = live_sizes([usage for buffer in buffers for usage in buffer.usages])
        self._alignment = alignment
        self.plan_seconds = 0.0
        self._kept_plans = lru_cache(_KEPT_PLANS)(self._plan)

    def plan(self, dims: Dims) -> Plan:
        """Return the plan for a batch of these dimensions; recent ones are cached."""
        return self._kept_plans(tuple([dims[name] for name in self.dim_names]))

    @property
    def plan_hits(self) -> int:
        return self._kept_plans.cache_info().hits

    @property
    def plan_misses(self) -> int:
        return self._kept_plans.cache_info().misses

    def _plan(self, key: tuple[int, ...]) -> Plan:
        began = time.perf_counter()
        dims = dict(zip(self.dim_names, key, strict=True))
        sizes = [buffer.size.at(dims) for buffer in self.buffers]
        made = plan(sizes, self._conflicts, self._alignment)
        peak = max((size.at(dims) for size in self._live), default=0)
        self.plan_seconds += time.perf_counter() - began
        return replace(made, peak_live=peak)


def max_tokens_that_fit(
    layouts: Sequence[Layout], size: int, most: int, largest: Callable[[int], Dims]
) -> int:
    """Return the largest batch that fits into `size` bytes, in tokens; 0 if none.

    Args:
        layouts: layouts of programs that run the batch one after another, each in memory of its own.
        most: upper bound of the result.
        largest: returns the largest dimensions of a batch of this number of tokens. No size falls when a dimension
            grows, so the offsets of this batch serve all batches of its tokens.
    """
    fits, too_many = 0, most + 1
    while fits + 1 < too_many:
        middle = (fits + too_many) // 2
        dims = largest(middle)
        if sum(layout.plan(dims).footprint for layout in layouts) <= size:
            fits = middle
        else:
            too_many = middle
    return fits


class Pages(Protocol):
    """Memory of a fixed capacity, allocated from its start.

    Attributes:
        memory: `[capacity]` uint8; only what is allocated may be touched.
    """

    memory: Any

    @property
    def reserved_bytes(self) -> int:
        """Allocated bytes, from its start."""

    def reserve(self, size: int) -> None:
        """Allocate the first `size` bytes that are not allocated yet."""

    def release(self, size: int) -> None:
        """Release the memory after the first `size` bytes; its content is lost."""


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Return address space of at least a byte, in huge pages where there are any.

    Raises:
        MemoryError: the system has too little address space.
    """
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no address space for {num_bytes} bytes") from error
    with suppress(OSError):
        # a kernel without huge pages serves small ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class HostPages:
    """Address space of the host.

    Attributes:
        address: address of the first byte.
    """

    def __init__(self, capacity: int) -> None:
        """Map address space for `capacity` bytes, at least 1, and allocate no memory yet.

        Raises:
            MemoryError: the system has too little address space.
        """
        self._capacity = capacity
        self._pages = huge_pages(capacity)
        self._bytes = np.frombuffer(self._pages, np.uint8)
        self.memory: Any = self._bytes
        self.address: int = self._bytes.ctypes.data
        self.reserved_bytes = 0

    def reserve(self, size: int) -> None:
        wanted = self._in_steps(size)
        if wanted > self.reserved_bytes:
            self._bytes[self.reserved_bytes : wanted] = 0
            self.reserved_bytes = wanted

    def release(self, size: int) -> None:
        kept = self._in_steps(size)
        if kept < self.reserved_bytes:
            self._pages.madvise(mmap.MADV_DONTNEED, kept, self.reserved_bytes - kept)
            self.reserved_bytes = kept

    def _in_steps(self, size: int) -> int:
        return min(self._capacity, -(-size // _STEP) * _STEP)


class HighWater:
    """The largest footprint of each window of batches, in bytes.

    Attributes:
        last: footprint and peak of live bytes of the last batch.
    """

    def __init__(self, window: int) -> None:
        self.last = (0, 0)
        self._window = window
        self._batches = 0
        self._largest = 0

    def add(self, footprint: int) -> int | None:
        """Count a batch; at the end of a window return its largest footprint, in bytes."""
        self._batches += 1
        self._largest = max(self._largest, footprint)
        if self._batches % self._window:
            return None
        reached, self._largest = self._largest, 0
        return reached


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the arena, laid out for one run of the program.

    Attributes:
        memory: `[footprint]` uint8.
        offsets: offset of each buffer in it, in bytes.
    """

    memory: Tensor
    offsets: tuple[int, ...]

    def view(self, buffer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a buffer's memory, uninitialised; valid until a buffer that overlaps it is written."""
        begin = self.offsets[buffer]
        size = prod(shape) * dtype.itemsize
        return self.memory[begin : begin + size].view(dtype).view(shape)

    def views(self, forms: Sequence[tuple[int, Shape, torch.dtype]], dims: Dims) -> list[Tensor]:
        """Return `view` of some buffers in some forms, for a batch of these dimensions."""
        shapes = shapes_at([shape for _, shape, _ in forms], dims)
        return [
            self.view(buffer, shape, dtype)
            for (buffer, _, dtype), shape in zip(forms, shapes, strict=True)
        ]


class PlannedMemory:
    """Memory of one program's intermediates, by the plan of each batch.

    Attributes:
        largest: upper bound of each dimension; a batch within it always fits.
        max_tokens: upper bound of the dimension `tokens`.
        capacity: largest size, in bytes: the footprint of the largest batch of its programs.
    """

    def __init__(
        self, layout: Layout, largest: Dims, pages: Callable[[int], Pages], room: int = 0
    ) -> None:
        """Plan the largest batch.

        Args:
            pages: returns memory of a capacity.
            room: bytes that it has at least.

        Raises:
            MemoryError: there is too little.
        """
        self.layout = layout
        self.largest = largest
        self.max_tokens = largest["tokens"]
        # No buffer is larger in a smaller batch, so these offsets serve each batch whose own greedy
        # plan would need more.
        self._largest_plan = layout.plan(largest)
        # an anonymous mapping has at least one byte
        self.capacity = max(1, self._largest_plan.footprint, room)
        self._pages = pages(self.capacity)
        self._high_water = HighWater(_WINDOW)

    def use(self) -> MemoryUse:
        footprint, peak = self._high_water.last
        plans = self.layout
        return MemoryUse(
            self._pages.reserved_bytes,
            footprint,
            peak,
            1,
            plans.plan_seconds,
            plans.plan_hits,
            plans.plan_misses,
        )

    def release(self) -> None:
        """Return the memory to the system, where it grows; the next batch takes its own."""
        self._pages.release(0)

    def allocate(self, dims: Dims) -> Region:
        """Return the region of the next batch, which always fits.

        Regions of earlier batches become invalid. Batches of one shape get the same region.

        Raises:
            ValueError: a dimension is larger than the same one of the largest batch.
        """
        (region,) = self._regions([self.plan(dims)])
        return region

    def allocate_several(self, parts: Sequence[Dims]) -> list[Region]:
        """Return regions of parts that run at the same time; none if too large together."""
        if len(parts) == 1:
            return [self.allocate(parts[0])]
        plans = [self.layout.plan(dims) for dims in parts]
        return self._regions(plans) if footprint_of(plans) <= self.capacity else []

    def _regions(self, plans: Sequence[Plan]) -> list[Region]:
        memory = self._pages.memory
        return [
            Region(memory[begin : begin + plan.footprint], plan.offsets)
            for begin, plan in zip(self.reserve(plans), plans, strict=True)
        ]

    def plan(self, dims: Dims) -> Plan:
        """Return a plan that fits; batches of one shape get the same one.

        Raises:
            ValueError: a dimension is larger than the same one of the largest batch.
        """
        for name, most in self.largest.items():
            if dims[name] > most:
                raise ValueError(f"a batch of {dims[name]} {name}; the arena holds {most}")
        plan = self.layout.plan(dims)
        return plan if plan.footprint <= self.capacity else self._largest_plan

    def reserve(self, plans: Sequence[Plan]) -> list[int]:
        """Reserve memory for plans that run at the same time; return the begin of each.

        Places of earlier batches become invalid.
        """
        footprint = footprint_of(plans)
        reached = self._high_water.add(footprint)
        if reached is not None:
            self._pages.release(reached)
        if footprint > self._pages.reserved_bytes:
            self._pages.reserve(footprint)
        self._high_water.last = footprint, sum(plan.peak_live for plan in plans)
        return list(accumulate(map(_room, plans[:-1]), initial=0))


def footprint_of(plans: Sequence[Plan]) -> int:
    """Return the bytes of plans, one behind another."""
    return sum(map(_room, plans[:-1])) + plans[-1].footprint


def _room(plan: Plan) -> int:
    """Return the bytes up to the next region: cores write to no page together."""
    return -(-plan.footprint // _PAGE) * _PAGE


def new_shared(num_bytes: int) -> int:
    """Return the file descriptor of new memory of zeros.

    It has no name, so nothing is left of it after its last process.
    """
    descriptor = os.memfd_create("varlen")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def map_shared(descriptor: int) -> mmap.mmap:
    """Return the memory of a file descriptor, which may be closed then."""
    return mmap.mmap(descriptor, 0)
