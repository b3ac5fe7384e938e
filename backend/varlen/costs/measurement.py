"""What batches cost, measured within a bound of time.

A coarse grid of batches of one length comes first. Batches of mixed lengths follow, which say how well it predicts
what will be served, and then a finer grid, so that a table can be made of it whenever time is over.

A machine that others share has not one speed: on two cores of one, the same batch took half as long a few seconds
later. So a reference batch runs now and then, and every time counts relative to the reference around it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from varlen.config import Execution
from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.measurement_plan import MeasurementPlan, Point
from varlen.costs.table import CostTable

# Seconds by (sequences, length in tokens).
Samples: TypeAlias = dict[Point, float]

# A batch that is no long one runs once unmeasured.
_LONG_SECONDS = 0.05
# It is repeated for so long, but not more often.
_REPEATED_SECONDS = 0.2
_MOST_REPEATS = 9
# Without so many repeats it does not count, unless they were long: a slow moment is a small part of such a one.
_LEAST_REPEATS = 3
_ENOUGH_SECONDS = 0.5
# The reference: one sequence of this share of the longest. It takes a tenth of the time, and the speed at a moment is
# the median of so many of its runs around it.
_REFERENCE_LENGTH = 0.25
_REFERENCE_SHARE = 0.1
_REFERENCES_AROUND = 3
# Attention makes a sequence of twice the length cost more than twice as much, by up to this exponent.
_GROWTH = 1.25
# The coarse grid's share of the time, and how much more than it says a mixed batch may take.
_COARSE_SHARE = 0.7
_MIXED_ROOM = 1.5
# How often the mixed batches are fed to a table. Each time it takes over a tenth of what they differ, or less.
_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """A batch of mixed lengths that ran.

    Attributes:
        lengths: of its sequences, in tokens.
        seconds: what it took.
    """

    lengths: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured.

    Attributes:
        samples: seconds by (sequences, length); enough for a `CostTable`.
        mixed: batches of mixed lengths.
        is_complete: whether all was measured that was planned.
        seconds: what measuring took.
        spread: by what factor the slowest repeat of a batch took longer than the fastest, in the median of batches;
            little more than 1 on a machine that does nothing else.
    """

    samples: Samples
    mixed: tuple[MixedBatch, ...]
    is_complete: bool
    seconds: float
    spread: float = 1.0

    @property
    def batches(self) -> int:
        """How many were measured."""
        return len(self.samples) + len(self.mixed)

    def grid_table(self, execution: Execution) -> CostTable:
        """Return the costs as the grid alone has them."""
        return CostTable(self.samples, execution)

    def table(self, execution: Execution) -> CostTable:
        """Return the costs: the grid, corrected by the mixed batches."""
        table = self.grid_table(execution)
        for _ in range(_ROUNDS):
            for batch in self.mixed:
                table.refine(BatchShape.of(batch.lengths), batch.seconds)
        return table

    def errors(self, table: CostTable) -> list[float]:
        """Return by what share a table is off for each mixed batch: 0.1 where it says 1.1 s and it took 1."""
        return [
            table.seconds(BatchShape.of(batch.lengths)) / batch.seconds - 1 for batch in self.mixed
        ]


def measure(
    run: Callable[[list[int]], object],
    limits: BatchLimits,
    *,
    max_length: int,
    seconds: float,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> Measurement:
    """Return what batches cost, measured for as long as is allowed.

    What any table needs is measured even if it takes longer: one sequence and several of the shortest length, and one
    of the longest. No other batch runs if it is expected to end after the bound.

    Args:
        run: runs a batch of sequences of these lengths, in tokens.
        limits: of a batch.
        max_length: of a sequence, in tokens; a batch may hold one.
        seconds: the bound.
        clock: in seconds.
        say: takes a line of progress now and then.

    Raises:
        MemoryError: there was too little for what any table needs.
    """
    plan = MeasurementPlan.of(limits, max_length)
    reference = [max(1, int(_REFERENCE_LENGTH * max_length))]
    watch = _Stopwatch(run, clock, seconds, reference, plan.batches, say)
    samples = _measure_grid(watch, {}, plan.needed, is_needed=True)
    samples = _measure_grid(watch, samples, plan.coarse, share=_COARSE_SHARE)
    table = CostTable(_enough(samples, plan.needed), limits.execution)
    mixed = _measure_mixed(watch, plan.mixed, table)
    # what of the coarse grid was put off for the mixed batches comes first
    rest = [*(point for point in plan.coarse if point not in samples), *plan.fine]
    samples = _measure_grid(watch, samples, rest)
    settled = {(n, length): watch.settled([length] * n) for n, length in samples}
    return Measurement(
        _enough(settled, plan.needed),
        tuple(MixedBatch(tuple(lengths), watch.settled(lengths)) for lengths in mixed),
        watch.is_complete,
        watch.elapsed,
        watch.spread,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A batch that ran: when half of it was done, and what it took, in seconds."""

    at: float
    seconds: float


class _Stopwatch:
    """Times batches as long as there is time, and the reference between them."""

    def __init__(
        self,
        run: Callable[[list[int]], object],
        clock: Callable[[], float],
        seconds: float,
        reference: list[int],
        planned: int,
        say: Callable[[str], None],
    ) -> None:
        self._run = run
        self._clock = clock
        self._allowed = seconds
        self._reference = reference
        self._planned = planned
        self._say = say
        self._began = clock()
        self._measured = 0
        self._runs: dict[tuple[int, ...], list[_Run]] = {}
        self._references: list[_Run] = []
        self._spreads: list[float] = []
        self._quarters_said = 0

    @property
    def elapsed(self) -> float:
        """Seconds since it was started."""
        return self._clock() - self._began

    @property
    def is_complete(self) -> bool:
        """Whether all that was planned has been measured."""
        return self._measured == self._planned

    @property
    def spread(self) -> float:
        """How unlike repeats were; see `Measurement`."""
        return statistics.median(self._spreads) if self._spreads else 1.0

    def time(
        self, lengths: list[int], *, expected: float, share: float = 1.0, is_needed: bool = False
    ) -> float | None:
        """Return the median of what a batch takes in seconds, or None if there is too little time or memory for it.

        Args:
            lengths: of its sequences, in tokens.
            expected: what it is likely to take, in seconds.
            share: of all the time, after which it may not end.
            is_needed: whether it runs all the same.
        """
        until = share * self._allowed
        if not is_needed and self.elapsed + _runs(expected) * expected > until:
            return None
        try:
            runs = self._repeat(lengths, until)
        except MemoryError:
            if is_needed:
                raise
            return None
        times = [run.seconds for run in runs]
        if not is_needed and not _counts(times):
            return None
        self._runs[tuple(lengths)] = runs
        self._measured += 1
        self._spreads.append(max(times) / min(times))
        self._tell()
        return statistics.median(times)

    def settled(self, lengths: list[int]) -> float:
        """Return the median of what a batch took, had the machine always been as fast as it mostly was."""
        usual = statistics.median(run.seconds for run in self._references)

        def slowness(at: float) -> float:
            around = sorted(self._references, key=lambda run: abs(run.at - at))
            seconds = [run.seconds for run in around[:_REFERENCES_AROUND]]
            return statistics.median(seconds) / usual

        return statistics.median(
            run.seconds / slowness(run.at) for run in self._runs[tuple(lengths)]
        )

    def _repeat(self, lengths: list[int], until: float) -> list[_Run]:
        """Return its repeats: one at least, and no further ones past the bound."""
        self._refer()
        # the first batch of a shape may take memory and compile kernels; of a long one that is a small part
        first = self._time(lengths)
        runs = [first] if first.seconds >= _LONG_SECONDS else []
        while not runs or not (
            self.elapsed + first.seconds > until or _is_enough([run.seconds for run in runs])
        ):
            self._refer()
            runs.append(self._time(lengths))
        return runs

    def _refer(self) -> None:
        """Time the reference if that is due and there is time."""
        if not self._references:
            self._time(self._reference)
            self._references.append(self._time(self._reference))
            return
        last = self._references[-1]
        is_due = self._clock() - last.at >= last.seconds / _REFERENCE_SHARE
        if is_due and self.elapsed + last.seconds <= self._allowed:
            self._references.append(self._time(self._reference))

    def _time(self, lengths: list[int]) -> _Run:
        began = self._clock()
        self._run(lengths)
        ended = self._clock()
        return _Run((began + ended) / 2, ended - began)

    def _tell(self) -> None:
        """Say how far it is, once in a quarter of the way."""
        way = max(self._measured / self._planned, self.elapsed / self._allowed)
        if self._quarters_said < int(4 * way) < 4:
            self._quarters_said = int(4 * way)
            self._say(
                f"measured {self._measured} of {self._planned} batches,"
                f" {self.elapsed:.1f} s of at most {self._allowed:g}"
            )


def _measure_grid(
    watch: _Stopwatch,
    known: Samples,
    points: list[Point],
    *,
    share: float = 1.0,
    is_needed: bool = False,
) -> Samples:
    """Return samples with those of more points."""
    samples = dict(known)
    for count, length in points:
        seconds = watch.time(
            [length] * count,
            expected=_expected(samples, count, length),
            share=share,
            is_needed=is_needed,
        )
        if seconds is not None:
            samples[count, length] = seconds
    return samples


def _counts(times: list[float]) -> bool:
    """Return whether a batch was repeated often enough, or for long enough, to be relied on."""
    return len(times) >= _LEAST_REPEATS or sum(times) >= _ENOUGH_SECONDS


def _is_enough(times: list[float]) -> bool:
    """Return whether more repeats would be worth little."""
    return len(times) >= _MOST_REPEATS or (_counts(times) and sum(times) >= _REPEATED_SECONDS)


def _runs(expected: float) -> int:
    """Return how often a batch that takes so many seconds runs at least."""
    repeats = next(n for n in range(1, _LEAST_REPEATS + 1) if _counts([expected] * n))
    return repeats + (expected < _LONG_SECONDS)


def _expected(samples: Samples, count: int, length: int) -> float:
    """Return what a batch is likely to cost at most; 0 if nothing is known that is smaller or larger."""
    smaller = [
        seconds * (count / n) * (length / tokens) ** _GROWTH
        for (n, tokens), seconds in samples.items()
        if n <= count and tokens <= length
    ]
    larger = [s for (n, tokens), s in samples.items() if n >= count and tokens >= length]
    return min([*smaller, *larger], default=0.0)


def _enough(samples: Samples, needed: list[Point]) -> Samples:
    """Return samples that are enough for a table, and none that would mislead it.

    A length goes of which one sequence alone was not measured. So does one whose batches are all smaller than some of
    a longer one: time was over before its larger ones, and what those cost is better read off the lengths around it.
    """
    alone = {length for count, length in samples if count == 1}
    samples = {point: seconds for point, seconds in samples.items() if point[1] in alone}
    most = {length: max(n for n, other in samples if other == length) for _, length in samples}
    kept = {length for _, length in needed}
    kept |= {
        length
        for length in most
        if most[length] >= max(most[other] for other in most if other >= length)
    }
    enough = {point: seconds for point, seconds in samples.items() if point[1] in kept}
    if {count for count, _ in enough} == {1}:
        # a batch holds no more than one: a second costs as much again, as in any table
        _, shortest = needed[0]
        enough[2, shortest] = 2 * enough[1, shortest]
    return enough


def _measure_mixed(
    watch: _Stopwatch, batches: list[list[int]], table: CostTable
) -> list[list[int]]:
    """Return the batches that were measured."""
    return [
        lengths
        for lengths in batches
        if watch.time(lengths, expected=_MIXED_ROOM * table.seconds(BatchShape.of(lengths)))
        is not None
    ]
