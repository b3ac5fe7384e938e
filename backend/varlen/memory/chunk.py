"""A chunk of memory: room of one size, of which only what plans have reached takes real memory.

On a CPU the room is address space. Pages come as plans first reach them, and can be given back from
the end without anything moving. On a GPU the room is one allocation, since graphs keep addresses.
"""

import mmap
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

# Memory is taken and given back in steps of a huge page.
_STEP = 2 << 20


class Chunk(Protocol):
    """Room for a batch's intermediates.

    Attributes:
        memory: `[capacity]` uint8, on its device. Only what is reserved may be touched.
        reserved_bytes: how much of it is real, from its start.
    """

    memory: Tensor
    reserved_bytes: int

    def reserve(self, size: int) -> None:
        """Make the first `size` bytes real, if they are not."""

    def release(self, size: int) -> None:
        """Give back what lies behind the first `size` bytes; what was written there is lost."""


class HostChunk:
    """Address space of the host, in huge pages where the system has them."""

    def __init__(self, capacity: int) -> None:
        """Take address space for `capacity` bytes, at least 1, and no memory yet.

        Raises:
            MemoryError: the system refuses as much.
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
        """Touch the pages up to `size`, so that no op meets a page fault."""
        wanted = self._in_steps(size)
        if wanted > self.reserved_bytes:
            self.memory[self.reserved_bytes : wanted].zero_()
            self.reserved_bytes = wanted

    def release(self, size: int) -> None:
        """Give the pages behind `size` back to the system."""
        kept = self._in_steps(size)
        if kept < self.reserved_bytes:
            self._pages.madvise(mmap.MADV_DONTNEED, kept, self.reserved_bytes - kept)
            self.reserved_bytes = kept

    def _in_steps(self, size: int) -> int:
        return min(self._capacity, -(-size // _STEP) * _STEP)


class DeviceChunk:
    """Memory of a GPU, all of it taken at once."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.reserved_bytes = capacity

    def reserve(self, size: int) -> None:
        """Do nothing: all of it is real."""

    def release(self, size: int) -> None:
        """Do nothing: graphs hold the addresses."""
