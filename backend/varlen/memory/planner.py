"""The planner: offsets of all buffers, such that live buffers never overlap.

Greedy by size: the largest buffer first, each into the smallest gap that holds it. Integers only;
the same sizes and chunks give the same plan, whatever was planned before.

Source: TurboTransformers' allocator (Fang et al. 2021, arXiv:2010.05680, algorithm 1).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

# A new chunk is a fifth larger than its first buffer, and at least two megabytes, as in the paper.
_GROWTH_PERCENT = 120
_LEAST_BYTES = 2 << 20
_CHUNK_STEP = 32

# Order in which chunks are tried: as they were opened, or by size.
Order: TypeAlias = Literal["opened", "smallest_first", "largest_first"]


class Place(NamedTuple):
    """The place of a buffer.

    Attributes:
        chunk: number of the chunk.
        offset: in bytes from the chunk's start.
    """

    chunk: int
    offset: int


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of a plan.

    Attributes:
        alignment: every offset is a multiple of it, in bytes.
        growth_percent: size of a new chunk, relative to the buffer that it is opened for.
        least_bytes: size of the smallest new chunk.
        order: order in which chunks are tried.
    """

    alignment: int = 1
    growth_percent: int = _GROWTH_PERCENT
    least_bytes: int = _LEAST_BYTES
    order: Order = "opened"

    def new_chunk(self, size: int) -> int:
        """Return the size of the chunk to open for a buffer."""
        grown = _round_up(size * self.growth_percent // 100, _CHUNK_STEP)
        return max(self.least_bytes, grown)

    def in_order(self, chunks: Sequence[int]) -> list[int]:
        """Return the chunk numbers in the order in which they are tried.

        Args:
            chunks: size of each, in bytes.
        """
        numbers = range(len(chunks))
        if self.order == "opened":
            return list(numbers)
        descending = self.order == "largest_first"
        return sorted(numbers, key=chunks.__getitem__, reverse=descending)


@dataclass(frozen=True, slots=True)
class Plan:
    """The places of all buffers of one batch.

    Attributes:
        places: place of each buffer.
        chunks: sizes in bytes; existing chunks first, then new ones.
        extents: used bytes of each chunk, from its start.
    """

    places: tuple[Place, ...]
    chunks: tuple[int, ...]
    extents: tuple[int, ...]

    @property
    def footprint(self) -> int:
        """Bytes used of all chunks."""
        return sum(self.extents)


def plan(
    sizes: Sequence[int],
    conflicts: Sequence[int],
    *,
    chunks: Sequence[int] = (),
    rules: Rules = Rules(),
) -> Plan:
    """Return a place for each buffer.

    A buffer goes to the first chunk with space for it: into the tightest gap, else behind the live buffers.

    Args:
        sizes: size of each buffer, in bytes.
        conflicts: for each buffer, a mask of the buffers that are live when it is; see `usage.conflicts`.
        chunks: sizes of the existing chunks, in bytes.
        rules: for offsets and new chunks.
    """
    capacities = list(chunks)
    extents = [0] * len(capacities)
    # of each chunk: (offset, end, buffer), by offset
    placed: list[list[tuple[int, int, int]]] = [[] for _ in capacities]
    places = [Place(0, 0)] * len(sizes)
    for buffer in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = _round_up(sizes[buffer], rules.alignment)
        for chunk in rules.in_order(capacities):
            offset = _best_offset(placed[chunk], conflicts[buffer], size, capacities[chunk])
            if offset is not None:
                break
        else:
            chunk, offset = len(capacities), 0
            capacities.append(rules.new_chunk(size))
            extents.append(0)
            placed.append([])
        places[buffer] = Place(chunk, offset)
        extents[chunk] = max(extents[chunk], offset + size)
        insort(placed[chunk], (offset, offset + size, buffer))
    return Plan(tuple(places), tuple(capacities), tuple(extents))


def _best_offset(
    placed: Sequence[tuple[int, int, int]], conflicts: int, size: int, capacity: int
) -> int | None:
    """Return the offset of the tightest gap in a chunk, or None."""
    end, best, tightest = 0, None, capacity + 1
    for offset, until, other in placed:
        if not conflicts >> other & 1:
            continue
        gap = offset - end
        if size <= gap < tightest:
            best, tightest = end, gap
        end = max(end, until)
    if best is None and capacity - end >= size:
        return end
    return best


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
