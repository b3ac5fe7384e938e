"""Use of the memory of intermediates, of one arena or of several together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter

from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Use of an arena; of several, the sum.

    Attributes:
        reserved_bytes: memory allocated now.
        footprint_bytes: footprint of the last batch's plan.
        peak_live_bytes: most bytes live at one op of that batch; no plan can use fewer.
        chunks: allocations that the arena is made of.
        plan_seconds: time spent planning since the start.
        plan_hits, plan_misses: batches whose plan was cached, and was not.
    """

    reserved_bytes: int = 0
    footprint_bytes: int = 0
    peak_live_bytes: int = 0
    chunks: int = 0
    plan_seconds: float = 0.0
    plan_hits: int = 0
    plan_misses: int = 0

    @classmethod
    def total(cls, uses: Iterable[MemoryUse]) -> MemoryUse:
        """Return the use of several arenas together."""
        return cls(*map(sum, zip(*(use.values() for use in uses), strict=True)))

    def values(self) -> tuple[float, ...]:
        """Return the values of all fields, in order."""
        return _values(self)

    def metrics(self) -> MetricsSnapshot:
        """Return the gauges and totals of it."""
        return {
            SnapshotMetric.ARENA_RESERVED: self.reserved_bytes,
            SnapshotMetric.ARENA_CHUNKS: self.chunks,
            SnapshotMetric.ARENA_FOOTPRINT: self.footprint_bytes,
            SnapshotMetric.ARENA_PEAK_LIVE: self.peak_live_bytes,
            SnapshotMetric.PLAN_SECONDS: self.plan_seconds,
            SnapshotMetric.PLAN_CACHE_HITS: self.plan_hits,
            SnapshotMetric.PLAN_CACHE_MISSES: self.plan_misses,
        }


# much faster than `astuple`, which copies deeply
_values = attrgetter(*(field.name for field in fields(MemoryUse)))
