"""The arena: the memory in which a model's intermediates live, planned for each batch before it runs.

One per engine, on one device. Batches follow one another in it; the shares of one batch, which run
side by side, lie one behind the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from varlen.memory.chunk import Chunk, DeviceChunk, HostChunk
from varlen.memory.high_water import HighWater
from varlen.memory.layout import Layout, ShapePlan

# Batches after which memory that none of them needed is given back; docs/decisions/0011-arena.md compares.
_WINDOW = 64
# Offsets are multiples of it, in bytes: a cache line; on a GPU, what its allocator gives.
_ALIGNMENT = {"cpu": 64, "cuda": 256}

# Shares of a batch each begin at a multiple of the alignment, so together they take a little more than the whole.
_ROOM_BETWEEN_SHARES = 1 << 16

# (tokens, sequences)
Shape: TypeAlias = tuple[int, int]


def alignment_of(device: torch.device) -> int:
    """Return of what every offset on a device is a multiple, in bytes."""
    return _ALIGNMENT[device.type]


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the arena, laid out for one run of the program.

    Attributes:
        memory: `[footprint]` uint8.
        offsets: of each buffer in it, in bytes.
    """

    memory: Tensor
    offsets: tuple[int, ...]

    def view(self, buffer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a buffer's memory, uninitialised. It is valid until a buffer that shares its place is written."""
        begin = self.offsets[buffer]
        size = prod(shape) * dtype.itemsize
        return self.memory[begin : begin + size].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What an arena holds.

    Attributes:
        reserved_bytes: memory that is real now.
        footprint_bytes: how far the last batch's plans reach.
        peak_live_bytes: the most bytes that were live at one op of it; no plan can use fewer.
        chunks: allocations that it is made of.
    """

    reserved_bytes: int
    footprint_bytes: int
    peak_live_bytes: int
    chunks: int = 1


class Arena:
    """The memory of one engine. Not for two threads at once; the regions that it hands out are.

    Attributes:
        layout: plans for it.
        max_tokens: a batch of at most so many always fits.
        device: where it is.
        capacity: the most bytes that it ever takes.
    """

    def __init__(
        self, layout: Layout, max_tokens: int, device: torch.device, limit: int | None = None
    ) -> None:
        """Take room for the largest batch: address space on a CPU, memory on a GPU.

        Args:
            layout: of the program that runs here.
            max_tokens: of the largest batch; as a whole it fits into `limit`.
            device: CPU or CUDA.
            limit: the most bytes to take.

        Raises:
            MemoryError: there is not as much.
        """
        self.layout = layout
        self.max_tokens = max_tokens
        self.device = device
        # Nothing is larger in a smaller batch, so these offsets serve each one whose own plan, greedy
        # as it is, would reach further.
        self._ceiling = layout.plan(max_tokens, max_tokens)
        wanted = self._ceiling.footprint + _ROOM_BETWEEN_SHARES
        self.capacity = wanted if limit is None else min(limit, wanted)
        self._chunk: Chunk = (
            DeviceChunk(self.capacity, device)
            if device.type == "cuda"
            else HostChunk(self.capacity)
        )
        self._high_water = HighWater(_WINDOW)
        self._last = (0, 0)

    @property
    def memory(self) -> Tensor:
        """All that is real of it, `[reserved_bytes]` uint8."""
        return self._chunk.memory[: self._chunk.reserved_bytes]

    def use(self) -> MemoryUse:
        """Return what it holds. From any thread."""
        footprint, peak = self._last
        return MemoryUse(self._chunk.reserved_bytes, footprint, peak)

    def bytes_needed(self, tokens: int) -> int:
        """Return the bytes that one sequence of so many tokens takes. From any thread."""
        return self.layout.plan(tokens, 1).footprint

    def carve(self, shapes: Sequence[Shape]) -> list[Region] | None:
        """Return a region for each share of the next batch; None if they do not fit side by side.

        Regions handed out before are void.

        Args:
            shapes: (tokens, sequences) of each share; together at most `max_tokens`.
        """
        return self._carve([self.layout.plan(*shape) for shape in shapes])

    def carve_whole(self, tokens: int, sequences: int) -> Region:
        """Return a region for the next batch, which runs as a whole and always fits.

        Regions handed out before are void. Batches of one shape get the same one.

        Raises:
            ValueError: the batch has more than `max_tokens`.
        """
        if tokens > self.max_tokens:
            raise ValueError(f"a batch of {tokens} tokens; the arena holds {self.max_tokens}")
        plan = self.layout.plan(tokens, sequences)
        regions = self._carve([plan]) or self._carve([self._ceiling])
        assert regions is not None
        return regions[0]

    def _carve(self, plans: Sequence[ShapePlan]) -> list[Region] | None:
        footprint = sum(plan.footprint for plan in plans)
        if footprint > self.capacity:
            return None
        reached = self._high_water.add(footprint)
        if reached is not None:
            self._chunk.release(reached)
        self._chunk.reserve(footprint)
        self._last = footprint, sum(plan.peak_live for plan in plans)
        regions, begin = [], 0
        for plan in plans:
            end = begin + plan.footprint
            regions.append(Region(self._chunk.memory[begin:end], plan.offsets))
            begin = end
        return regions
