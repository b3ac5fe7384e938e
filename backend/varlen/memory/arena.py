"""The arena: memory of a model's intermediates, planned for each batch before it runs.

One per worker, on one device. Batches follow one another in it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from varlen.memory.chunk import Chunk, CudaMemory, DeviceChunk, HostChunk, MappedChunk
from varlen.memory.memory_use import MemoryUse
from varlen.memory.planner import plan
from varlen.memory.usage import Buffer, Dims, Shape, conflicts, live_sizes, shapes_at

# Memory that no batch of a window needed is released. In batches; docs/decisions/0011-arena.md compares sizes.
_WINDOW = 64
_PAGE = 4096
# Alignment of offsets in bytes: a cache line; on a GPU, the alignment of its allocator.
_ALIGNMENT = {"cpu": 64, "cuda": 256}
# Largest number of cached plans; the least recently used are dropped. A plan is a tuple of about ten numbers.
_KEPT_PLANS = 4096
# Messages of torch's host allocator and of oneDNN; neither has an exception of its own.
_ON_THE_HOST = ("DefaultCPUAllocator", "could not create a primitive")
# Message of the driver, which allocates graphs and pinned memory without torch's allocator.
_ON_THE_GPU = "CUDA error: out of memory"


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError instead of torch's errors about too little memory, on any device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError("too little memory on the GPU") from error
    except RuntimeError as error:
        if _ON_THE_GPU in str(error):
            raise MemoryError("too little memory on the GPU") from error
        if not any(said in str(error) for said in _ON_THE_HOST):
            raise
        raise MemoryError("too little memory on the host") from error


def alignment_of(device: torch.device) -> int:
    """Return the alignment of offsets on a device, in bytes."""
    return _ALIGNMENT[device.type]


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """The places of all buffers for one shape of batch.

    Attributes:
        offsets: offset of each buffer, in bytes.
        footprint: bytes from the start of the first buffer to the end of the last.
        peak_live: most bytes live at one op; no plan can use fewer.
    """

    offsets: tuple[int, ...]
    footprint: int
    peak_live: int


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

    def plan(self, dims: Dims) -> ShapePlan:
        """Return the plan for a batch of these dimensions; recent ones are cached."""
        return self._kept_plans(tuple([dims[name] for name in self.dim_names]))

    @property
    def plan_hits(self) -> int:
        return self._kept_plans.cache_info().hits

    @property
    def plan_misses(self) -> int:
        return self._kept_plans.cache_info().misses

    def _plan(self, key: tuple[int, ...]) -> ShapePlan:
        began = time.perf_counter()
        dims = dict(zip(self.dim_names, key, strict=True))
        sizes = [buffer.size.at(dims) for buffer in self.buffers]
        made = plan(sizes, self._conflicts, self._alignment)
        peak = max((size.at(dims) for size in self._live), default=0)
        self.plan_seconds += time.perf_counter() - began
        return ShapePlan(made.offsets, made.footprint, peak)


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


class Arena:
    """Memory for one engine's batches. One thread allocates at a time.

    Attributes:
        largest: upper bound of each dimension; a batch within it always fits.
        max_tokens: upper bound of the dimension `tokens`.
        capacity: largest size of the arena, in bytes: the footprint of the largest batch of its programs.
    """

    def __init__(
        self,
        layout: Layout,
        largest: Dims,
        device: torch.device,
        *,
        grows: bool = False,
        room: int = 0,
    ) -> None:
        """Reserve address space for the largest batch, or memory.

        Args:
            layout: plan of the program that runs here.
            grows: whether a GPU allocates memory as batches need it, not for the largest one at once. A CPU does.
            room: bytes that programs in `beside` need.

        Raises:
            MemoryError: the device has too little.
        """
        self.layout = layout
        self.largest = largest
        self.max_tokens = largest["tokens"]
        self.device = device
        # No buffer is larger in a smaller batch, so these offsets serve each batch whose own greedy
        # plan would need more.
        self._largest_plan = layout.plan(largest)
        # an anonymous mapping has at least one byte
        self.capacity = max(1, self._largest_plan.footprint, room)
        self._chunk = _new_chunk(self.capacity, device, grows=grows)
        self._high_water = HighWater(_WINDOW)

    def beside(self, layout: Layout, largest: Dims) -> "Arena":
        """Return an arena in the same memory for another program, whose batches run between."""
        other = copy(self)
        other.layout, other.largest, other.max_tokens = layout, largest, largest["tokens"]
        other._largest_plan = layout.plan(largest)
        assert other._largest_plan.footprint <= self.capacity
        return other

    @property
    def memory(self) -> Tensor:
        """Everything that is allocated, `[reserved_bytes]` uint8."""
        return self._chunk.memory[: self._chunk.reserved_bytes]

    def use(self) -> MemoryUse:
        footprint, peak = self._high_water.last
        plans = self.layout
        return MemoryUse(
            self._chunk.reserved_bytes,
            footprint,
            peak,
            1,
            plans.plan_seconds,
            plans.plan_hits,
            plans.plan_misses,
        )

    def release(self) -> None:
        """Return the memory to the system, where it grows; the next batch takes its own."""
        self._chunk.release(0)

    def allocate(self, dims: Dims) -> Region:
        """Return the region of the next batch, which always fits.

        Regions of earlier batches become invalid. Batches of one shape get the same region.

        Raises:
            ValueError: a dimension is larger than the same one of the largest batch.
        """
        for name, most in self.largest.items():
            if dims[name] > most:
                raise ValueError(f"a batch of {dims[name]} {name}; the arena holds {most}")
        plan = self.layout.plan(dims)
        if plan.footprint > self.capacity:
            plan = self._largest_plan
        (region,) = self._reserve([plan])
        return region

    def allocate_several(self, parts: Sequence[Dims]) -> list[Region]:
        """Return regions of parts that run at the same time; none if too large together."""
        if len(parts) == 1:
            return [self.allocate(parts[0])]
        plans = [self.layout.plan(dims) for dims in parts]
        return self._reserve(plans) if _footprint(plans) <= self.capacity else []

    def _reserve(self, plans: Sequence[ShapePlan]) -> list[Region]:
        """Return regions of these plans, one behind another."""
        footprint = _footprint(plans)
        reached = self._high_water.add(footprint)
        if reached is not None:
            self._chunk.release(reached)
        if footprint > self._chunk.reserved_bytes:
            self._chunk.reserve(footprint)
        self._high_water.last = footprint, sum(plan.peak_live for plan in plans)
        begins = accumulate(map(_room, plans), initial=0)
        return [
            Region(self._chunk.memory[begin : begin + plan.footprint], plan.offsets)
            for begin, plan in zip(begins, plans, strict=False)
        ]


def _footprint(plans: Sequence[ShapePlan]) -> int:
    return sum(map(_room, plans[:-1])) + plans[-1].footprint


def _room(plan: ShapePlan) -> int:
    """Return the bytes up to the next region: cores write to no page together."""
    return -(-plan.footprint // _PAGE) * _PAGE


def _new_chunk(capacity: int, device: torch.device, *, grows: bool) -> Chunk:
    if device.type != "cuda":
        return HostChunk(capacity)
    return MappedChunk(capacity, CudaMemory(device)) if grows else DeviceChunk(capacity, device)
