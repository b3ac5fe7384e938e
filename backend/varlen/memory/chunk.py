"""A chunk of memory: a fixed capacity, reserved up to the largest plan.

On a CPU the capacity is address space. Pages are allocated when plans first reach them, and are released from
the end without moving anything. On a GPU the capacity is one allocation, or address space too: graphs keep addresses.
"""

import mmap
import weakref
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from varlen.memory.cuda_memory import CudaMemory

# Memory is reserved and released in steps of a huge page; on a GPU in larger ones: each takes four calls.
_STEP, _GPU_STEP = 2 << 20, 16 << 20


class Chunk(Protocol):
    """Memory for a batch's intermediates.

    Attributes:
        memory: `[capacity]` uint8, on its device. Only what is reserved may be touched.
    """

    memory: Tensor

    @property
    def reserved_bytes(self) -> int:
        """Allocated bytes, from its start."""

    def reserve(self, size: int) -> None:
        """Allocate the first `size` bytes that are not allocated yet."""

    def release(self, size: int) -> None:
        """Release the memory after the first `size` bytes; its content is lost."""


class HostChunk:
    """Address space of the host, in huge pages where the system has them."""

    def __init__(self, capacity: int) -> None:
        """Map address space for `capacity` bytes, at least 1, and allocate no memory yet.

        Raises:
            MemoryError: the system has too little address space.
        """
        self._capacity = capacity
        try:
            self._pages = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no address space for {capacity} bytes") from error
        with suppress(OSError):
            # a kernel without huge pages serves small ones
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.reserved_bytes = 0

    def reserve(self, size: int) -> None:
        wanted = self._in_steps(size)
        if wanted > self.reserved_bytes:
            self.memory[self.reserved_bytes : wanted].zero_()
            self.reserved_bytes = wanted

    def release(self, size: int) -> None:
        kept = self._in_steps(size)
        if kept < self.reserved_bytes:
            self._pages.madvise(mmap.MADV_DONTNEED, kept, self.reserved_bytes - kept)
            self.reserved_bytes = kept

    def _in_steps(self, size: int) -> int:
        return min(self._capacity, -(-size // _STEP) * _STEP)


class DeviceChunk:
    """Memory of a GPU, allocated at once."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.reserved_bytes = capacity

    def reserve(self, size: int) -> None:
        """Do nothing: all of it is allocated."""

    def release(self, size: int) -> None:
        """Do nothing: graphs hold the addresses."""


class MappedChunk:
    """Address space of a GPU, with memory where plans reach."""

    def __init__(self, capacity: int, space: CudaMemory) -> None:
        """Reserve addresses for `capacity` bytes, and allocate no memory yet.

        Args:
            capacity: size of the largest plan, in bytes.
        """
        self._space = space
        self._step = -(-_GPU_STEP // space.granularity) * space.granularity
        size = self._steps(capacity) * self._step
        self._address = space.reserve(size)
        # memory of each step that has any, from the first one
        self._handles: list[int] = []
        self.memory = space.tensor(self._address, size)[:capacity]
        weakref.finalize(self, _free, space, self._address, size, self._step, self._handles)

    @property
    def reserved_bytes(self) -> int:
        return min(len(self._handles) * self._step, len(self.memory))

    def reserve(self, size: int) -> None:
        """Map memory for the first `size` bytes where there is none.

        Raises:
            MemoryError: the GPU has too little; what is mapped stays.
        """
        while len(self._handles) < self._steps(size):
            address = self._address + len(self._handles) * self._step
            self._handles.append(self._space.map(address, self._step))

    def release(self, size: int) -> None:
        if len(self._handles) > self._steps(size):
            self._space.wait()
            _unmap(self._space, self._address, self._step, self._handles, self._steps(size))

    def _steps(self, size: int) -> int:
        return -(-size // self._step)


def _unmap(space: CudaMemory, address: int, step: int, handles: list[int], kept: int) -> None:
    """Release the memory of all steps but the first ones."""
    while len(handles) > kept:
        handle = handles.pop()
        space.unmap(address + len(handles) * step, step, handle)


def _free(space: CudaMemory, address: int, size: int, step: int, handles: list[int]) -> None:
    """Release the memory of a chunk that no one holds, and its addresses."""
    space.wait()
    _unmap(space, address, step, handles, 0)
    space.free(address, size)
