"""The planner: offsets of all buffers, such that live buffers never overlap.

Greedy by size: the largest buffer first, each into the smallest gap that holds it. Integers only;
the same sizes give the same plan, whatever was planned before.

Source: TurboTransformers' allocator (Fang et al. 2021, arXiv:2010.05680, algorithm 1), in one unbounded chunk.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """The offsets of all buffers of one batch.

    Attributes:
        offsets: offset of each buffer, in bytes.
        footprint: bytes from the start of the first buffer to the end of the last.
    """

    offsets: tuple[int, ...]
    footprint: int


def plan(sizes: Sequence[int], conflicts: Sequence[int], alignment: int) -> Plan:
    """Return an offset for each buffer: the tightest gap that holds it, else the end.

    Args:
        sizes: size of each buffer, in bytes.
        conflicts: a mask for each buffer, of the buffers that are live when it is; see `usage.conflicts`.
        alignment: every offset is a multiple of it, in bytes.
    """
    offsets = [0] * len(sizes)
    footprint = 0
    placed: list[tuple[int, int, int]] = []
    for buffer in largest_first(sizes):
        size = -(-sizes[buffer] // alignment) * alignment
        offset = best_offset(placed, conflicts[buffer], size)
        insort(placed, (offset, offset + size, buffer))
        offsets[buffer] = offset
        footprint = max(footprint, offset + size)
    return Plan(tuple(offsets), footprint)


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Return the numbers of the buffers in the order in which they are placed."""
    return sorted(range(len(sizes)), key=lambda buffer: -sizes[buffer])


def best_offset(placed: Sequence[tuple[int, int, int]], conflicts: int, size: int) -> int:
    """Return the start of the tightest gap between the placed buffers, else their end.

    Args:
        placed: (offset, end, buffer) of each placed buffer, ascending.
        conflicts: a mask of the buffers that must not be overlapped.
        size: bytes that the gap must hold.
    """
    end, best, tightest = 0, None, None
    for offset, until, other in placed:
        if not conflicts >> other & 1:
            continue
        gap = offset - end
        if size <= gap and (tightest is None or gap < tightest):
            best, tightest = end, gap
        end = max(end, until)
    return end if best is None else best
