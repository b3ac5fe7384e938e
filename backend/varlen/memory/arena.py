"""The arena: memory of a model's intermediates, planned for each batch before it runs.

One per worker, on one device. Batches follow one another in it.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from varlen.memory.chunk import Chunk, DeviceChunk, HostChunk, MappedChunk
from varlen.memory.cuda_memory import CudaMemory
from varlen.memory.layout import Layout
from varlen.memory.memory_use import MemoryUse
from varlen.memory.usage import Dims

# Memory that no batch of a window needed is released. In batches; docs/decisions/0011-arena.md compares sizes.
_WINDOW = 64
# Alignment of offsets in bytes: a cache line; on a GPU, the alignment of its allocator.
_ALIGNMENT = {"cpu": 64, "cuda": 256}


def alignment_of(device: torch.device) -> int:
    """Return the alignment of offsets on a device, in bytes."""
    return _ALIGNMENT[device.type]


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


class Arena:
    """Memory for one engine's batches. One thread allocates at a time.

    Attributes:
        largest: upper bound of each dimension; a batch within it always fits.
        max_tokens: upper bound of the dimension `tokens`.
        capacity: largest size of the arena, in bytes: the footprint of the largest batch.
    """

    def __init__(
        self, layout: Layout, largest: Dims, device: torch.device, *, grows: bool = False
    ) -> None:
        """Reserve address space for the largest batch, or memory.

        Args:
            layout: plan of the program that runs here.
            grows: whether a GPU allocates memory as batches need it, not for the largest one at once. A CPU does.

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
        self.capacity = max(1, self._largest_plan.footprint)
        self._chunk = _new_chunk(self.capacity, device, grows=grows)
        self._high_water = HighWater(_WINDOW)
        self._last = (0, 0)

    @property
    def memory(self) -> Tensor:
        """Everything that is allocated, `[reserved_bytes]` uint8."""
        return self._chunk.memory[: self._chunk.reserved_bytes]

    def use(self) -> MemoryUse:
        """Return the use of the arena, which is one chunk. From any thread."""
        footprint, peak = self._last
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
        reached = self._high_water.add(plan.footprint)
        if reached is not None:
            self._chunk.release(reached)
        if plan.footprint > self._chunk.reserved_bytes:
            self._chunk.reserve(plan.footprint)
        self._last = plan.footprint, plan.peak_live
        return Region(self._chunk.memory[: plan.footprint], plan.offsets)


def _new_chunk(capacity: int, device: torch.device, *, grows: bool) -> Chunk:
    if device.type != "cuda":
        return HostChunk(capacity)
    return MappedChunk(capacity, CudaMemory(device)) if grows else DeviceChunk(capacity, device)
