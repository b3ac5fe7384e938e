"""The layout of one program: a memory plan for each batch shape."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from varlen.memory.planner import plan
from varlen.memory.usage import Buffer, Dims, conflicts, live_sizes

# Largest number of cached plans; the least recently used are dropped. A plan is a tuple of about ten numbers.
_KEPT_PLANS = 4096


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
        """Number of plans found in the cache."""
        return self._kept_plans.cache_info().hits

    @property
    def plan_misses(self) -> int:
        """Number of plans made."""
        return self._kept_plans.cache_info().misses

    def max_tokens_that_fit(self, size: int, most: int, largest: Callable[[int], Dims]) -> int:
        """Return the largest batch that fits into `size` bytes, in tokens; 0 if none.

        Args:
            size: number of bytes.
            most: upper bound of the result.
            largest: returns the largest dimensions of a batch of this number of tokens. No size falls when a
                dimension grows, so the offsets of this batch serve all batches of its tokens.
        """
        fits, too_many = 0, most + 1
        while fits + 1 < too_many:
            middle = (fits + too_many) // 2
            if self.plan(largest(middle)).footprint <= size:
                fits = middle
            else:
                too_many = middle
        return fits

    def _plan(self, key: tuple[int, ...]) -> ShapePlan:
        began = time.perf_counter()
        dims = dict(zip(self.dim_names, key, strict=True))
        sizes = [buffer.size.at(dims) for buffer in self.buffers]
        made = plan(sizes, self._conflicts, self._alignment)
        peak = max((size.at(dims) for size in self._live), default=0)
        self.plan_seconds += time.perf_counter() - began
        return ShapePlan(made.offsets, made.footprint, peak)
