"""Measures the run time of batches for a cost model, within a time limit.

The speed of a shared machine changes within seconds. A reference batch therefore runs now and then, and every
measured time is normalized by the references around it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from varlen.config import Execution
from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.costs.model import CostModel, MeasuredBatch, powers_of_two

# A batch is repeated until it has run for this many seconds, so that interruptions of a few milliseconds do not count,
# and at least three times: the median then ignores a first run that allocates memory or compiles kernels.
_REPEATED_SECONDS = 0.2
_FEWEST_REPEATS = 3
_MOST_REPEATS = 9
# The longest sequence of a batch, as shares of the longest allowed: attention is a large, a small and no part of the
# cost.
_LONGEST = (1, 1 / 8, 1 / 64)
# The reference is one sequence of this share of the longest: long enough to time well, short enough to run often.
_REFERENCE_LENGTH = 0.25
# Share of the time that the reference takes. It runs every 0.3 s if it takes 30 ms, and speeds a second apart hardly
# resemble each other.
_REFERENCE_SHARE = 0.1
# The speed at a moment is the median of this many references around it; a single one may have been interrupted.
_REFERENCES_AROUND = 3


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured batches.

    Attributes:
        batches: shapes to measure, at least one.
        spread: 90th percentile of the reference batch's time, divided by the 10th; about 1.1 on an idle machine.
    """

    batches: tuple[MeasuredBatch, ...]
    is_complete: bool
    seconds: float
    spread: float = 1.0

    def model(self, execution: Execution) -> CostModel:
        return CostModel(self.batches, execution)

    def errors(self, model: CostModel) -> list[float]:
        """Return the relative error per batch: 0.1 if 1.1 s is predicted for 1 s."""
        return [model.seconds(batch.shape) / batch.seconds - 1 for batch in self.batches]


def plan_batches(limits: BatchLimits, max_length: int) -> list[tuple[int, ...]]:
    """Return the lengths of each batch to measure, in order; the same ones every time.

    1, 4, 16 and so on sequences, one of the longest length and the others of random lengths up to it. Small batches
    come first, as time may run out, but the longest sequence comes second: it tells what attention costs.
    """
    numbers = random.Random(0)
    batches: set[tuple[int, ...]] = set()
    for longest in sorted({max(1, int(share * max_length)) for share in _LONGEST}):
        for count in [*powers_of_two(limits.max_sequences)[::2], limits.max_sequences]:
            lengths = [longest, *(numbers.randint(1, longest) for _ in range(count - 1))]
            while not limits.allow(len(lengths), sum(lengths), longest):
                lengths.pop()
            batches.add(tuple(lengths))
    shortest, *others = sorted(batches, key=lambda lengths: (sum(lengths), lengths))
    longest_alone = (max_length,)
    others = [lengths for lengths in others if lengths != longest_alone]
    return list(dict.fromkeys([shortest, longest_alone, *others]))


def measure(
    run: Callable[[list[int]], object],
    limits: BatchLimits,
    *,
    max_length: int,
    seconds: float,
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> Measurement:
    """Return the measured costs of batches.

    The first two batches are always measured. The others run only if they should end within the time limit.

    Args:
        run: runs a batch of sequences of these lengths, in tokens.
        max_length: longest sequence, in tokens; a batch may hold one.
        report: gets a line of progress now and then.

    Raises:
        MemoryError: there is too little memory for the shortest or the longest sequence.
    """
    planned = plan_batches(limits, max_length)
    stopwatch = _Stopwatch(run, clock, seconds, [max(1, int(_REFERENCE_LENGTH * max_length))])
    times: dict[tuple[int, ...], float] = {}
    quarters = iter((1, 2, 3))
    quarter = next(quarters)
    for number, lengths in enumerate(planned):
        is_needed = number < 2
        if not is_needed and not stopwatch.has_time_for(
            _FEWEST_REPEATS * _upper_bound(times, lengths)
        ):
            continue
        try:
            times[lengths] = stopwatch.time(lengths)
        except MemoryError:
            if is_needed:
                raise
            continue
        done = max(len(times) / len(planned), stopwatch.elapsed / seconds)
        if quarter <= 4 * done < 4:
            report(
                f"measured {len(times)} of {len(planned)} batches,"
                f" {stopwatch.elapsed:.1f} s of at most {seconds:g}"
            )
            quarter = next((each for each in quarters if each > 4 * done), 5)
    return Measurement(
        tuple(MeasuredBatch(lengths, stopwatch.normalized_median(lengths)) for lengths in times),
        len(times) == len(planned),
        stopwatch.elapsed,
        stopwatch.spread,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Midpoint and duration of one run of a batch, in seconds."""

    at: float
    seconds: float


class _Stopwatch:
    """Times batches, and the reference batch between them."""

    def __init__(
        self,
        run: Callable[[list[int]], object],
        clock: Callable[[], float],
        allowed: float,
        reference: list[int],
    ) -> None:
        self._run = run
        self._clock = clock
        self._allowed = allowed
        self._reference = reference
        self._began = clock()
        self._runs: dict[tuple[int, ...], list[_Run]] = {}
        self._references: list[_Run] = []

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    @property
    def spread(self) -> float:
        """Slow runs of the reference relative to fast ones; see `Measurement`."""
        # the first one may allocate memory or compile kernels
        times = [run.seconds for run in self._references[1:]]
        if len(times) < 2:
            return 1.0
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        return deciles[-1] / deciles[0]

    def has_time_for(self, seconds: float) -> bool:
        return self.elapsed + seconds <= self._allowed

    def time(self, lengths: tuple[int, ...]) -> float:
        """Run a batch often enough, at least once, and return the median of its seconds."""
        runs: list[_Run] = []
        while not runs or (not _has_enough_repeats(runs) and self.has_time_for(runs[-1].seconds)):
            self._run_reference_if_due()
            runs.append(self._time_once(list(lengths)))
        self._runs[lengths] = runs
        return statistics.median(run.seconds for run in runs)

    def normalized_median(self, lengths: tuple[int, ...]) -> float:
        """Return the median seconds of a batch at the usual speed of the machine."""
        usual = statistics.median(run.seconds for run in self._references)

        def slowness(at: float) -> float:
            nearest = sorted(self._references, key=lambda run: abs(run.at - at))
            return statistics.median(run.seconds for run in nearest[:_REFERENCES_AROUND]) / usual

        return statistics.median(run.seconds / slowness(run.at) for run in self._runs[lengths])

    def _run_reference_if_due(self) -> None:
        if self._references:
            last = self._references[-1]
            if self._clock() - last.at < last.seconds / _REFERENCE_SHARE:
                return
        self._references.append(self._time_once(self._reference))

    def _time_once(self, lengths: list[int]) -> _Run:
        began = self._clock()
        self._run(lengths)
        ended = self._clock()
        return _Run((began + ended) / 2, ended - began)


def _has_enough_repeats(runs: list[_Run]) -> bool:
    if len(runs) < _FEWEST_REPEATS:
        return False
    return len(runs) >= _MOST_REPEATS or sum(run.seconds for run in runs) >= _REPEATED_SECONDS


def _upper_bound(times: dict[tuple[int, ...], float], lengths: tuple[int, ...]) -> float:
    """Return an upper bound of the seconds of a batch, from measured ones.

    Cost is assumed to grow no faster than tokens or squared lengths.
    """
    shape = BatchShape.of(lengths)

    def bounds() -> Iterator[float]:
        for other, seconds in times.items():
            known = BatchShape.of(other)
            yield seconds * max(1.0, shape.tokens / known.tokens, shape.squares / known.squares)

    return min(bounds())
