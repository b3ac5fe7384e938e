"""The planner: offsets of all buffers of a batch, such that live buffers never overlap.

Greedy by size: the largest buffer first, each into the smallest gap that holds it. Integers only;
the same sizes give the same plan, whatever was planned before.

Source: TurboTransformers' allocator (Fang et al. 2021, arXiv:2010.05680, algorithm 1), in one unbounded chunk.
"""

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from varlen.memory.usage import Buffer, Dims, conflicts, live_sizes

# Largest number of cached plans; the least recently used are dropped. A plan is a tuple of about ten numbers.
_KEPT_PLANS = 4096


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
