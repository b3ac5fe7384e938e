"""The arena: memory of a model's intermediates, planned for each batch before it runs.

One per worker, on one device. Batches follow one another in it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from varlen.memory.chunk import Chunk, CudaMemory, DeviceChunk, HostChunk, MappedChunk
from varlen.memory.pages import HOST_ALIGNMENT, PlannedMemory, footprint_of
from varlen.memory.planner import Layout, ShapePlan
from varlen.memory.usage import Dims, Shape, shapes_at

# Alignment of offsets in bytes; on a GPU, the alignment of its allocator.
_ALIGNMENT = {"cpu": HOST_ALIGNMENT, "cuda": 256}
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


class Arena(PlannedMemory):
    """Memory for one engine's batches. One thread allocates at a time."""

    _pages: Chunk

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
        self.device = device
        super().__init__(layout, largest, partial(_new_chunk, device=device, grows=grows))

    @property
    def memory(self) -> Tensor:
        """Everything that is allocated, `[reserved_bytes]` uint8."""
        return self._pages.memory[: self._pages.reserved_bytes]

    def allocate(self, dims: Dims) -> Region:
        """Return the region of the next batch, which always fits.

        Regions of earlier batches become invalid. Batches of one shape get the same region.

        Raises:
            ValueError: a dimension is larger than the same one of the largest batch.
        """
        (region,) = self._regions([self.plan(dims)])
        return region

    def allocate_several(self, parts: Sequence[Dims]) -> list[Region]:
        """Return the regions of parts that run at the same time; none if too large."""
        plans = [self.layout.plan(dims) for dims in parts]
        return self._regions(plans) if footprint_of(plans) <= self.capacity else []

    def _regions(self, plans: Sequence[ShapePlan]) -> list[Region]:
        memory = self._pages.memory
        return [
            Region(memory[begin : begin + plan.footprint], plan.offsets)
            for begin, plan in zip(self.reserve(plans), plans, strict=True)
        ]


def _new_chunk(capacity: int, device: torch.device, *, grows: bool) -> Chunk:
    if device.type != "cuda":
        return HostChunk(capacity)
    return MappedChunk(capacity, CudaMemory(device)) if grows else DeviceChunk(capacity, device)
