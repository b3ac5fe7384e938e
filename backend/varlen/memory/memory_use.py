"""Use of memory: intermediates of one arena or of several together, and adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TypeAlias

from varlen.telemetry.metrics import MetricsSnapshot, SnapshotMetric

# The number of an adapter that was read into memory, and of the one that made room; negative for none.
Swap: TypeAlias = tuple[int, int]


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
        return cls(*map(sum, zip(*(use.values() for use in uses), strict=True)))

    def values(self) -> tuple[float, ...]:
        return _values(self)

    def metrics(self) -> MetricsSnapshot:
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


class AdapterUse:
    """Adapters in the memory of one worker. One thread records, and others may read."""

    def __init__(self, count: int) -> None:
        """Start with none of `count` adapters in memory."""
        self._loads, self._evictions, self._held = [0] * count, [0] * count, [0] * count

    def record(self, swaps: Iterable[Swap]) -> None:
        """Count adapters that the worker has exchanged since the last call."""
        for loaded, evicted in swaps:
            if loaded >= 0:
                self._loads[loaded] += 1
                self._held[loaded] = 1
            if evicted >= 0:
                self._evictions[evicted] += 1
                self._held[evicted] = 0

    def forget(self) -> None:
        """Start with the memory of the next worker; totals go on."""
        self._held = [0] * len(self._held)

    @staticmethod
    def metrics(
        uses: Sequence[AdapterUse], adapters: Sequence[tuple[str, str]], num_bytes: int
    ) -> MetricsSnapshot:
        """Return the gauges and totals of several workers together.

        Args:
            adapters: names, and reasons why adapters are refused.
            num_bytes: memory of one adapter in a worker.
        """
        found: dict[SnapshotMetric | tuple[SnapshotMetric, str], float] = {}
        for number, (name, _) in enumerate(adapters if uses else ()):
            loads, evictions, held = (
                sum(counts[number] for counts in each)
                for each in zip(
                    *((use._loads, use._evictions, use._held) for use in uses), strict=True
                )
            )
            found[SnapshotMetric.ADAPTER_LOADS, name] = loads
            found[SnapshotMetric.ADAPTER_EVICTIONS, name] = evictions
            found[SnapshotMetric.ADAPTER_BYTES, name] = held * num_bytes
        return found
