"""Measured costs on disk, so that a second start measures nothing: one SQLite file in a cache folder.

Costs are found again by what decides them, such as checkpoint, device and libraries, which is kept with them in words.
Several servers may use one file. Nothing that is wrong with it is worth a failure: a file that is damaged is set
aside and a new one begun; one that cannot be opened, read or written is done without. Each gives a warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import IO, TypeAlias, TypeVar

from varlen.costs.measurement import Measurement, MixedBatch

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
# What decides costs: names and values, in words.
About: TypeAlias = Mapping[str, str]

# A file of another layout has another name.
_FILE = "batch_costs.sqlite"
_LOCK = "measuring.lock"
# How long another process may keep the file to itself, in seconds; what it does there takes milliseconds.
_BUSY_SECONDS = 2.0
_POLL_SECONDS = 0.05
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS costs (key TEXT PRIMARY KEY, about TEXT NOT NULL, measured_at TEXT NOT NULL,"
    " allowed_seconds REAL NOT NULL, seconds REAL NOT NULL, is_complete INTEGER NOT NULL,"
    " spread REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS samples (key TEXT NOT NULL, sequences INTEGER NOT NULL, length INTEGER NOT NULL,"
    " seconds REAL NOT NULL, PRIMARY KEY (key, sequences, length))",
    "CREATE TABLE IF NOT EXISTS mixed (key TEXT NOT NULL, place INTEGER NOT NULL, lengths TEXT NOT NULL,"
    " seconds REAL NOT NULL, PRIMARY KEY (key, place))",
)


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """What was measured, of what, and when.

    Attributes:
        about: what decides these costs.
        measured_at: when, with its time zone.
        allowed_seconds: how long it might have taken.
        measurement: itself.
    """

    about: About
    measured_at: datetime
    allowed_seconds: float
    measurement: Measurement

    @classmethod
    def now(cls, about: About, allowed_seconds: float, measurement: Measurement) -> StoredCosts:
        """Return what has just been measured."""
        return cls(about, datetime.now(timezone.utc), allowed_seconds, measurement)


class CostStore:
    """The costs that are kept in one folder. Nothing here raises for the state of the folder or the file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / _FILE
        self._warned: set[str] = set()

    def load(self, about: About) -> StoredCosts | None:
        """Return the costs that were measured under just these circumstances, or None."""
        return self._try(lambda database: _read(database, key_of(about)), None)

    def save(self, costs: StoredCosts) -> bool:
        """Keep costs in place of older ones, and return whether that was possible."""

        def write(database: sqlite3.Connection) -> bool:
            _write(database, costs)
            return True

        return self._try(write, False)

    def entries(self) -> list[StoredCosts]:
        """Return all that is kept, the newest first."""

        def read(database: sqlite3.Connection) -> list[StoredCosts]:
            keys = database.execute("SELECT key FROM costs ORDER BY measured_at DESC").fetchall()
            found = (_read(database, key) for (key,) in keys)
            return [costs for costs in found if costs is not None]

        return self._try(read, [])

    @contextmanager
    def measuring(self, timeout: float) -> Iterator[None]:
        """Keep other processes that use this folder from measuring meanwhile: they would slow each other down.

        Args:
            timeout: how long to wait for them, in seconds. After that it goes on beside them.
        """
        with ExitStack() as stack:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self._folder / _LOCK).open("w"))
                if not _lock(file, timeout):
                    _log.warning(
                        "another model is still being measured; costs may come out too high"
                    )
            except OSError:
                # load and save say what is wrong with the folder
                pass
            yield

    def _try(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T) -> _T:
        """Return what `work` returns, or `otherwise` where the file does not allow it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._work(work)
        except (sqlite3.Error, OSError) as error:
            self._warn(f"the cache of costs {self._path} is not used: {error}")
        except (ValueError, TypeError) as error:
            self._warn(f"the cache of costs {self._path} holds a damaged entry: {error}")
        return otherwise

    def _warn(self, line: str) -> None:
        """Say what is wrong, once."""
        if line not in self._warned:
            _log.warning("%s", line)
            self._warned.add(line)

    def _work(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        before = self._identity()
        try:
            return self._work_once(work)
        except sqlite3.OperationalError:
            # locked, read-only, full: the file itself is as it should be
            raise
        except sqlite3.DatabaseError as error:
            # not if another process has just done so
            if before is not None and before == self._identity():
                self._set_aside(error)
            return self._work_once(work)

    def _work_once(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        # autocommit: each piece of work opens its own transaction, if it needs one
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
        with closing(connection) as database:
            for statement in _SCHEMA:
                database.execute(statement)
            return work(database)

    def _identity(self) -> tuple[int, int] | None:
        """Return what tells the file from another of its name; None if there is none."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _set_aside(self, error: Exception) -> None:
        names = (self._path.with_name(f"{_FILE}.corrupt-{number}") for number in count(1))
        aside = next(name for name in names if not name.exists())
        self._path.rename(aside)
        # what SQLite would otherwise undo in the new file
        self._path.with_name(f"{_FILE}-journal").unlink(missing_ok=True)
        _log.warning("the cache of costs is damaged (%s): set aside as %s", error, aside)


def key_of(about: About) -> str:
    """Return the key of circumstances: equal for equal ones."""
    return hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()


def _read(database: sqlite3.Connection, key: str) -> StoredCosts | None:
    """Return an entry.

    Raises:
        ValueError, TypeError: it holds what was never measured.
    """
    # one transaction, or another process may replace the entry between two statements
    database.execute("BEGIN")
    row = database.execute(
        "SELECT about, measured_at, allowed_seconds, seconds, is_complete, spread FROM costs WHERE key = ?",
        (key,),
    ).fetchone()
    samples = database.execute(
        "SELECT sequences, length, seconds FROM samples WHERE key = ?", (key,)
    ).fetchall()
    mixed = database.execute(
        "SELECT lengths, seconds FROM mixed WHERE key = ? ORDER BY place", (key,)
    ).fetchall()
    database.execute("COMMIT")
    if row is None:
        return None
    about, measured_at, allowed, seconds, is_complete, spread = row
    measurement = Measurement(
        {(_whole(n), _whole(length)): _positive(spent) for n, length, spent in samples},
        tuple(
            MixedBatch(tuple(_whole(length) for length in json.loads(lengths)), _positive(spent))
            for lengths, spent in mixed
        ),
        bool(is_complete),
        float(seconds),
        _positive(spread),
    )
    return StoredCosts(
        json.loads(about), datetime.fromisoformat(measured_at), float(allowed), measurement
    )


def _write(database: sqlite3.Connection, costs: StoredCosts) -> None:
    key, measurement = key_of(costs.about), costs.measurement
    database.execute("BEGIN IMMEDIATE")
    for table in ("costs", "samples", "mixed"):
        database.execute(f"DELETE FROM {table} WHERE key = ?", (key,))  # noqa: S608  # our names
    database.execute(
        "INSERT INTO costs VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            key,
            json.dumps(dict(costs.about)),
            costs.measured_at.isoformat(),
            costs.allowed_seconds,
            measurement.seconds,
            measurement.is_complete,
            measurement.spread,
        ),
    )
    database.executemany(
        "INSERT INTO samples VALUES (?, ?, ?, ?)",
        [(key, n, length, seconds) for (n, length), seconds in measurement.samples.items()],
    )
    database.executemany(
        "INSERT INTO mixed VALUES (?, ?, ?, ?)",
        [
            (key, place, json.dumps(batch.lengths), batch.seconds)
            for place, batch in enumerate(measurement.mixed)
        ],
    )
    database.execute("COMMIT")


def _whole(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no number of sequences or tokens")
    return value


def _positive(value: object) -> float:
    if not isinstance(value, float) or not 0.0 < value < math.inf:
        raise ValueError(f"{value!r} is no time and no factor")
    return value


def _lock(file: IO[str], timeout: float) -> bool:
    """Return whether a file could be locked within so many seconds. Closing it lets go of it."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True
