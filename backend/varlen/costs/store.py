"""Measured costs on disk, in one SQLite file: a second start measures nothing.

Costs are found by what decides them, such as model, device and libraries. Several servers may share one file. No
problem with the file is an error: a damaged file is renamed and a new one begun, and a file that cannot be opened,
read or written is not used. Each problem is logged as a warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import IO, TypeAlias, TypeVar

from varlen.costs.measurement import Measurement
from varlen.costs.model import MeasuredBatch

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
# Name and value of everything that decides costs, in readable form.
CostKey: TypeAlias = Mapping[str, str]

# A file with another schema has another name.
_FILE = "batch_costs_2.sqlite"
_LOCK = "measuring.lock"
# Seconds to wait while another process writes; a write takes milliseconds.
_BUSY_SECONDS = 2.0
_POLL_SECONDS = 0.05
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS costs (digest TEXT PRIMARY KEY, key TEXT NOT NULL, measured_at TEXT NOT NULL,"
    " allowed_seconds REAL NOT NULL, seconds REAL NOT NULL, is_complete INTEGER NOT NULL, spread REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS batches (digest TEXT NOT NULL, position INTEGER NOT NULL, lengths TEXT NOT NULL,"
    " seconds REAL NOT NULL, PRIMARY KEY (digest, position))",
    "CREATE TABLE IF NOT EXISTS linear_paths (digest TEXT PRIMARY KEY, key TEXT NOT NULL, paths TEXT NOT NULL)",
)
_SYSTEM_CACHE = Path("/var/cache")


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """A measurement and its key.

    Attributes:
        key: facts that decide these costs.
        measured_at: time of the measurement, with its time zone.
        allowed_seconds: the bound of the measurement.
        measurement: the measured batches.
    """

    key: CostKey
    measured_at: datetime
    allowed_seconds: float
    measurement: Measurement

    @classmethod
    def now(cls, key: CostKey, allowed_seconds: float, measurement: Measurement) -> StoredCosts:
        """Return costs that have just been measured."""
        return cls(key, datetime.now(timezone.utc), allowed_seconds, measurement)


class CostStore:
    """The stored costs of one folder. No method raises if the file is unusable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / _FILE
        self._warned: set[str] = set()

    def load(self, key: CostKey) -> StoredCosts | None:
        """Return the costs with this key, or None."""
        return self._try(lambda database: _read(database, digest_of(key)), None)

    def save(self, costs: StoredCosts) -> bool:
        """Store costs in place of older ones, and return whether that was possible."""

        def write(database: sqlite3.Connection) -> bool:
            _write(database, costs)
            return True

        return self._try(write, False)

    def load_paths(self, key: CostKey) -> Mapping[str, str] | None:
        """Return the path of each linear layer with this key, or None."""

        def read(database: sqlite3.Connection) -> Mapping[str, str] | None:
            row = database.execute(
                "SELECT paths FROM linear_paths WHERE digest = ?", (digest_of(key),)
            ).fetchone()
            return None if row is None else _checked_paths(json.loads(row[0]))

        return self._try(read, None)

    def save_paths(self, key: CostKey, paths: Mapping[str, str]) -> bool:
        """Store the path of each linear layer, and return whether that was possible."""

        def write(database: sqlite3.Connection) -> bool:
            database.execute(
                "INSERT OR REPLACE INTO linear_paths VALUES (?, ?, ?)",
                (digest_of(key), json.dumps(dict(key)), json.dumps(dict(paths))),
            )
            return True

        return self._try(write, False)

    def entries(self) -> list[StoredCosts]:
        """Return all stored costs, the newest first."""

        def read(database: sqlite3.Connection) -> list[StoredCosts]:
            rows = database.execute("SELECT digest FROM costs ORDER BY measured_at DESC").fetchall()
            found = (_read(database, digest) for (digest,) in rows)
            return [costs for costs in found if costs is not None]

        return self._try(read, [])

    @contextmanager
    def measuring(self, timeout: float) -> Iterator[None]:
        """Lock the folder against other processes that measure, which would slow each other down.

        Args:
            timeout: seconds to wait for the lock; after that it continues without it.
        """
        with ExitStack() as stack:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self._folder / _LOCK).open("w"))
                if not _lock(file, timeout):
                    _log.warning("another model is still being measured; costs may be too high")
            except OSError:
                # load and save say what is wrong with the folder
                pass
            yield

    def _try(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T) -> _T:
        """Return the result of `work`, or `otherwise` if the file cannot be used."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._work(work)
        except (sqlite3.Error, OSError) as error:
            self._warn(f"the cost cache {self._path} is not used: {error}")
        except (ValueError, TypeError) as error:
            self._warn(f"the cost cache {self._path} has a damaged entry: {error}")
        return otherwise

    def _warn(self, line: str) -> None:
        """Log a warning once."""
        if line not in self._warned:
            _log.warning("%s", line)
            self._warned.add(line)

    def _work(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        before = self._identity()
        try:
            return self._work_once(work)
        except sqlite3.OperationalError:
            # locked, read-only, full: the file itself is not damaged
            raise
        except sqlite3.DatabaseError as error:
            # not if another process has just replaced the file
            if before is not None and before == self._identity():
                self._rename_damaged(error)
            return self._work_once(work)

    def _work_once(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        # autocommit: each piece of work opens its own transaction if it needs one
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
        with closing(connection) as database:
            for statement in _SCHEMA:
                database.execute(statement)
            return work(database)

    def _identity(self) -> tuple[int, int] | None:
        """Return the device and inode of the file, or None if there is no file."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _rename_damaged(self, error: Exception) -> None:
        names = (self._path.with_name(f"{_FILE}.corrupt-{number}") for number in count(1))
        renamed = next(name for name in names if not name.exists())
        self._path.rename(renamed)
        # SQLite would apply the journal to the new file
        self._path.with_name(f"{_FILE}-journal").unlink(missing_ok=True)
        _log.warning("the cost cache is damaged (%s) and was renamed to %s", error, renamed)


def cache_folder(setting: str) -> Path:
    """Return the folder of a `cache_folder` setting; `auto` is `varlen` in the user's cache folder."""
    try:
        if setting != "auto":
            return Path(setting).expanduser()
        configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # the XDG specification says to ignore relative paths
        base = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        # a user without a home
        base = _SYSTEM_CACHE
    return base / "varlen"


def digest_of(key: CostKey) -> str:
    """Return a hash of a key: equal for equal keys."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()


def _read(database: sqlite3.Connection, digest: str) -> StoredCosts | None:
    """Return an entry, or None.

    Raises:
        ValueError, TypeError: it has values that cannot have been measured.
    """
    # one transaction, or another process may replace the entry between two statements
    database.execute("BEGIN")
    row = database.execute(
        "SELECT key, measured_at, allowed_seconds, seconds, is_complete, spread FROM costs WHERE digest = ?",
        (digest,),
    ).fetchone()
    batches = database.execute(
        "SELECT lengths, seconds FROM batches WHERE digest = ? ORDER BY position", (digest,)
    ).fetchall()
    database.execute("COMMIT")
    if row is None:
        return None
    key, measured_at, allowed, seconds, is_complete, spread = row
    measurement = Measurement(
        tuple(
            MeasuredBatch(tuple(map(_checked_length, json.loads(lengths))), _checked_float(spent))
            for lengths, spent in batches
        ),
        bool(is_complete),
        float(seconds),
        _checked_float(spread),
    )
    return StoredCosts(
        json.loads(key), datetime.fromisoformat(measured_at), float(allowed), measurement
    )


def _write(database: sqlite3.Connection, costs: StoredCosts) -> None:
    digest, measurement = digest_of(costs.key), costs.measurement
    database.execute("BEGIN IMMEDIATE")
    database.execute("DELETE FROM costs WHERE digest = ?", (digest,))
    database.execute("DELETE FROM batches WHERE digest = ?", (digest,))
    database.execute(
        "INSERT INTO costs VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            digest,
            json.dumps(dict(costs.key)),
            costs.measured_at.isoformat(),
            costs.allowed_seconds,
            measurement.seconds,
            measurement.is_complete,
            measurement.spread,
        ),
    )
    database.executemany(
        "INSERT INTO batches VALUES (?, ?, ?, ?)",
        [
            (digest, position, json.dumps(batch.lengths), batch.seconds)
            for position, batch in enumerate(measurement.batches)
        ],
    )
    database.execute("COMMIT")


def _checked_length(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a length in tokens")
    return value


def _checked_paths(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(path, str) for path in value.values()):
        raise ValueError(f"{value!r} does not name a path for each layer")
    return value


def _checked_float(value: object) -> float:
    if not isinstance(value, float) or not 0.0 < value < math.inf:
        raise ValueError(f"{value!r} is not a positive number")
    return value


def _lock(file: IO[str], timeout: float) -> bool:
    """Return whether a file could be locked within `timeout` seconds. Closing the file unlocks it."""
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
