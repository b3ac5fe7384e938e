"""A chunk of memory: a fixed capacity, reserved up to the largest plan.

On a CPU the capacity is address space. Pages are allocated when plans first reach them, and are released from
the end without moving anything. On a GPU the capacity is one allocation, since graphs keep addresses.
"""

import mmap
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

# Memory is reserved and released in steps of a huge page.
_STEP = 2 << 20


class Chunk(Protocol):
    """Memory for a batch's intermediates.

    Attributes:
        memory: `[capacity]` uint8, on its device. Only what is reserved may be touched.
        reserved_bytes: allocated bytes, from its start.
    """

    memory: Tensor
    reserved_bytes: int

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
        """Touch the pages up to `size`, so that no op meets a page fault."""
        wanted = self._in_steps(size)
        if wanted > self.reserved_bytes:
            self.memory[self.reserved_bytes : wanted].zero_()
            self.reserved_bytes = wanted

    def release(self, size: int) -> None:
        """Return the pages after `size` to the system."""
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
