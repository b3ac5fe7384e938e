"""Costs of batches: measured within a time limit, and kept on disk.

The speed of a shared machine changes within seconds: every time is normalized by a reference batch that runs now and
then.

A second start measures nothing. A file of JSON holds each entry, whose key has all that decides costs. Servers may
share one folder. Problems with it are warnings: a damaged entry is replaced, and a folder that cannot be read or
written, or that other users can write to, is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from varlen.config import Execution
from varlen.costs.model import BatchLimits, BatchShape, CostModel, MeasuredBatch, powers_of_two
from varlen_kernels.cache_files import CacheError, CacheFolder, LockedError, cache_home

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
# Name and value of everything that decides costs, in readable form.
CostKey: TypeAlias = Mapping[str, str]

# Our own files that count.
_CODE = (".py", ".json")
# Entries of another layout have other names.
_COSTS, _TEXTS, _SUFFIX = "costs_3-", "texts_1-", ".json"
_LOCK = "measuring.lock"
# The costs of a model with large batches have 200 KB.
_MOST_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """A measurement and its key.

    Attributes:
        key: facts that decide these costs.
        measured_at: time of the measurement, with its time zone.
    """

    key: CostKey
    measured_at: datetime
    allowed_seconds: float
    measurement: Measurement

    @classmethod
    def now(cls, key: CostKey, allowed_seconds: float, measurement: Measurement) -> StoredCosts:
        return cls(key, datetime.now(timezone.utc), allowed_seconds, measurement)


class CostStore:
    """The stored costs of one folder. No method raises if the folder is unusable.

    Args:
        folder: the folder; None stores nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else CacheFolder(folder)

    def load(self, key: CostKey) -> StoredCosts | None:
        return self._read(_COSTS, key, _costs_of)

    def save(self, costs: StoredCosts) -> bool:
        """Store costs in place of older ones, and return whether that was possible."""
        measurement = costs.measurement
        entry = {
            "measured_at": costs.measured_at.isoformat(),
            "allowed_seconds": costs.allowed_seconds,
            "seconds": measurement.seconds,
            "is_complete": measurement.is_complete,
            "spread": measurement.spread,
            "batches": [[list(batch.lengths), batch.seconds] for batch in measurement.batches],
        }
        return self._write(_COSTS, costs.key, entry)

    def load_texts(self, key: CostKey) -> Mapping[str, str] | None:
        """Return texts by name, such as the fastest path of each layer."""
        return self._read(_TEXTS, key, lambda _, entry: _checked_texts(entry["texts"]))

    def save_texts(self, key: CostKey, texts: Mapping[str, str]) -> bool:
        return self._write(_TEXTS, key, {"texts": dict(texts)})

    def entries(self) -> list[StoredCosts]:
        """Return all stored costs, the newest first."""
        try:
            names = [] if self._folder is None else self._folder.names()
        except OSError as error:
            _warn(f"the cost cache is not used: {error}")
            return []
        found = [
            self._read_file(name, _costs_of)
            for name in names
            if name.startswith(_COSTS) and name.endswith(_SUFFIX)
        ]
        present = [costs for costs in found if costs is not None]
        return sorted(present, key=lambda costs: costs.measured_at, reverse=True)

    @contextmanager
    def measuring(self, timeout: float) -> Iterator[None]:
        """Lock the folder against other processes that measure, which would slow each other down.

        Args:
            timeout: seconds to wait for the lock; after that it continues without it.
        """
        with ExitStack() as stack:
            try:
                if self._folder is not None:
                    stack.enter_context(self._folder.lock(_LOCK, timeout, _log.info))
            except LockedError as error:
                _log.warning(
                    "another model is still being measured; costs may be too high: %s", error
                )
            except OSError:
                # load and save say what is wrong with the folder
                pass
            yield

    def _read(
        self, kind: str, key: CostKey, read: Callable[[CostKey, dict[str, Any]], _T]
    ) -> _T | None:
        def of_key(stored: CostKey, entry: dict[str, Any]) -> _T:
            if stored != key:
                raise ValueError("it has another key")
            return read(stored, entry)

        return self._read_file(_file_of(kind, key), of_key)

    def _read_file(self, name: str, read: Callable[[CostKey, dict[str, Any]], _T]) -> _T | None:
        if self._folder is None:
            return None
        try:
            entry = json.loads(self._folder.read(name, _MOST_BYTES))
            return read(_checked_texts(entry["key"]), entry)
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(f"the cost cache is not used: {error}")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            _warn(f"the cost cache {self._folder.path} has a damaged entry {name}: {error!r}")
        return None

    def _write(self, kind: str, key: CostKey, entry: Mapping[str, object]) -> bool:
        if self._folder is None:
            return False
        content = json.dumps({"key": dict(key), **entry}).encode()
        try:
            self._folder.write(_file_of(kind, key), content)
        except OSError as error:
            _warn(f"the cost cache is not used: {error}")
            return False
        return True


def cache_folder(setting: str) -> Path:
    """Return the folder of a `cache_folder` setting; `auto` is `varlen` in the user's cache folder.

    Raises:
        CacheError: the user has no folder for caches.
    """
    if setting == "auto":
        return cache_home() / "varlen"
    try:
        return Path(setting).expanduser().absolute()
    except RuntimeError:
        raise CacheError(
            f"cache_folder is {setting}, and user {os.geteuid()} has no home; set an absolute path"
        ) from None


def find_cache(setting: str) -> Path | None:
    """Return the folder of a `cache_folder` setting; logs and returns None without one."""
    try:
        return cache_folder(setting)
    except CacheError as error:
        _warn(f"nothing is stored, so each start measures again: {error}")
        return None


@cache
def _warn(line: str) -> None:
    """Log a warning once in a process, which has several stores."""
    _log.warning("%s", line)


def digest_of(key: CostKey) -> str:
    """Return a hash of a key: equal for equal keys."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()


def code_hash(folders: Sequence[Path]) -> str:
    """Return a hash of the code and the tables in some folders, 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in _CODE:
                digest.update(path.name.encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def cpu_name() -> str:
    """Return the name of the CPU's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # an Arm kernel names no model
    return names[0] if names else platform.machine()


def _file_of(kind: str, key: CostKey) -> str:
    return f"{kind}{digest_of(key)}{_SUFFIX}"


def _costs_of(key: CostKey, entry: Mapping[str, Any]) -> StoredCosts:
    """Return the costs in an entry.

    Raises:
        ValueError, TypeError, KeyError: it has values that cannot have been measured.
    """
    measurement = Measurement(
        tuple(
            MeasuredBatch(tuple(map(_checked_length, lengths)), _checked_float(spent))
            for lengths, spent in entry["batches"]
        ),
        bool(entry["is_complete"]),
        float(entry["seconds"]),
        _checked_float(entry["spread"]),
    )
    measured_at = datetime.fromisoformat(entry["measured_at"])
    if measured_at.tzinfo is None:
        raise ValueError(f"{entry['measured_at']!r} has no time zone")
    return StoredCosts(key, measured_at, float(entry["allowed_seconds"]), measurement)


def _checked_length(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a length in tokens")
    return value


def _checked_texts(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(path, str) for path in value.values()):
        raise ValueError(f"{value!r} does not have texts by name")
    return value


def _checked_float(value: object) -> float:
    if not isinstance(value, float) or not 0.0 < value < math.inf:
        raise ValueError(f"{value!r} is not a positive number")
    return value


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
