"""The layout of one program: a plan for each shape of batch, made when it is first asked for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from varlen.memory.planner import Rules, plan
from varlen.memory.usage import Buffer, conflicts, live_sizes

# Plans that are kept, the least recently used going first. One is a tuple of about ten numbers.
_KEPT_PLANS = 4096
# Of the one chunk that a layout plans into. How much of it there is, is the arena's concern.
_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """Where the buffers of one shape of batch lie.

    Attributes:
        offsets: of each buffer, in bytes.
        footprint: bytes from the first buffer's start to the last one's end.
        peak_live: the most bytes that are live at one op; no plan can use fewer.
    """

    offsets: tuple[int, ...]
    footprint: int
    peak_live: int


class Layout:
    """Plans for one program's batches. A plan depends on its batch's shape alone, never on what ran before.

    Attributes:
        buffers: what is planned.
        plan: returns the `ShapePlan` for so many tokens and sequences; those used last are kept.
        plan_seconds: time spent planning since the start.
    """

    def __init__(self, buffers: Sequence[Buffer], alignment: int) -> None:
        """Make no plan yet.

        Args:
            buffers: of the program.
            alignment: every offset is a multiple of it, in bytes.
        """
        self.buffers = tuple(buffers)
        self._conflicts = conflicts([buffer.lifetimes for buffer in buffers])
        self._live = live_sizes([usage for buffer in buffers for usage in buffer.usages])
        self._rules = Rules(alignment=alignment)
        self.plan_seconds = 0.0
        self.plan: Callable[[int, int], ShapePlan]
        self._cache = self.plan = lru_cache(_KEPT_PLANS)(self._plan)

    @property
    def plan_hits(self) -> int:
        """Plans that were asked for and at hand."""
        return self._cache.cache_info().hits

    @property
    def plan_misses(self) -> int:
        """Plans that had to be made."""
        return self._cache.cache_info().misses

    def max_tokens_that_fit(self, size: int, most: int) -> int:
        """Return how many tokens a batch may have, `most` at most, to fit into `size` bytes; 0 if not even one fits.

        It fits with any number of sequences, since a batch never has more sequences than tokens.
        """
        fits, too_many = 0, most + 1
        while fits + 1 < too_many:
            middle = (fits + too_many) // 2
            if self.plan(middle, middle).footprint <= size:
                fits = middle
            else:
                too_many = middle
        return fits

    def _plan(self, tokens: int, sequences: int) -> ShapePlan:
        began = time.perf_counter()
        sizes = [buffer.size.at(tokens, sequences) for buffer in self.buffers]
        made = plan(sizes, self._conflicts, chunks=[_UNBOUNDED], rules=self._rules)
        peak = max((size.at(tokens, sequences) for size in self._live), default=0)
        self.plan_seconds += time.perf_counter() - began
        return ShapePlan(tuple(place.offset for place in made.places), made.footprint, peak)
