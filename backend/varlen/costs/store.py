"""Measured costs on disk, a JSON file for each entry: a second start measures nothing.

The key of costs has all that decides them: model, device, libraries and others. Servers may share one folder. No
problem with it is an error but a warning: a damaged entry is replaced, and a folder that cannot be read or written, or
that other users can write to, is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from varlen.costs.measurement import Measurement
from varlen.costs.model import MeasuredBatch
from varlen_kernels.cache_files import CacheError, CacheFolder, LockedError, cache_home

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
# Name and value of everything that decides costs, in readable form.
CostKey: TypeAlias = Mapping[str, str]

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
        """Return what `read` makes of an entry; None without one of this key."""

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
        except (ValueError, TypeError, KeyError, RecursionError) as error:
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
