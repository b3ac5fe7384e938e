"""The arena: memory of a model's intermediates, planned for each batch before it runs.

One per worker, on one device. Batches follow one another in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial

import torch
from torch import Tensor

from varlen.memory.chunk import Chunk, CudaMemory, DeviceChunk, HostChunk, MappedChunk
from varlen.memory.planner import HOST_ALIGNMENT, Layout, PlannedMemory
from varlen.memory.usage import Dims

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


class Arena(PlannedMemory):
    """Memory for one engine's batches. One thread allocates at a time."""

    _pages: Chunk

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
        self.device = device
        super().__init__(layout, largest, partial(_new_chunk, device=device, grows=grows), room)

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
        return self._pages.memory[: self._pages.reserved_bytes]


def _new_chunk(capacity: int, device: torch.device, *, grows: bool) -> Chunk:
    if device.type != "cuda":
        return HostChunk(capacity)
    return MappedChunk(capacity, CudaMemory(device)) if grows else DeviceChunk(capacity, device)
