"""Pages of memory: of a batch's intermediates, and those that processes share.

Intermediates are allocated as plans reach them, and released from the end. On a CPU the capacity is address space, and
nothing moves. Nothing here imports torch: a worker of compiled ops has none.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Protocol

import numpy as np

from varlen.memory.memory_use import MemoryUse
from varlen.memory.planner import Layout, ShapePlan
from varlen.memory.usage import Dims

# Memory that no batch of a window needed is released. In batches; docs/decisions/0011-arena.md compares sizes.
_WINDOW = 64
_PAGE = 4096
# Memory is reserved and released in steps of a huge page.
_STEP = 2 << 20
# Alignment of buffers, in bytes: a cache line.
HOST_ALIGNMENT = 64


class Pages(Protocol):
    """Memory of a fixed capacity, allocated from its start."""

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
    """The largest footprint of each window of batches, in bytes."""

    def __init__(self, window: int) -> None:
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


class PlannedMemory:
    """Memory of one program's intermediates, by the plan of each batch.

    Attributes:
        largest: upper bound of each dimension; a batch within it always fits.
        max_tokens: upper bound of the dimension `tokens`.
        capacity: largest size, in bytes: the footprint of the largest batch.
    """

    def __init__(self, layout: Layout, largest: Dims, pages: Callable[[int], Pages]) -> None:
        """Plan the largest batch.

        Args:
            pages: returns memory of a capacity.

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
        self.capacity = max(1, self._largest_plan.footprint)
        self._pages = pages(self.capacity)
        self._high_water = HighWater(_WINDOW)
        self._last = (0, 0)

    def use(self) -> MemoryUse:
        footprint, peak = self._last
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

    def plan(self, dims: Dims) -> ShapePlan:
        """Return a plan that fits; batches of one shape get the same one.

        Raises:
            ValueError: a dimension is larger than the same one of the largest batch.
        """
        for name, most in self.largest.items():
            if dims[name] > most:
                raise ValueError(f"a batch of {dims[name]} {name}; the arena holds {most}")
        plan = self.layout.plan(dims)
        return plan if plan.footprint <= self.capacity else self._largest_plan

    def reserve(self, plans: Sequence[ShapePlan]) -> list[int]:
        """Reserve memory for plans that run at the same time; return the begin of each.

        Places of earlier batches become invalid.
        """
        footprint = footprint_of(plans)
        reached = self._high_water.add(footprint)
        if reached is not None:
            self._pages.release(reached)
        if footprint > self._pages.reserved_bytes:
            self._pages.reserve(footprint)
        self._last = footprint, sum(plan.peak_live for plan in plans)
        return list(accumulate(map(_room, plans[:-1]), initial=0))


def footprint_of(plans: Sequence[ShapePlan]) -> int:
    """Return the bytes of plans, one behind another."""
    return sum(map(_room, plans[:-1])) + plans[-1].footprint


def _room(plan: ShapePlan) -> int:
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
