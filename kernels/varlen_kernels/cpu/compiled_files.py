"""Checksums of the files of compiled code: numba compiles a damaged one again.

Numba raises whatever reading a cut file raises, and runs machine code whose bytes have changed. It replaces files and
never writes into them, so a recorded file with other content is damaged, and another file of its name is new.
"""

import json
import logging
import os
import pickletools
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

_log = logging.getLogger(__name__)

_RECORD = "varlen.sums"
# An index file has a version, then the names of data files; a data file has compiled code.
_PICKLES = {".nbi": 2, ".nbc": 1}


@dataclass(frozen=True, slots=True)
class _Sum:
    """Which file was recorded, and the CRC-32 of its content."""

    inode: int
    crc: int


def remove_damaged(folder: Path) -> None:
    """Remove the files of compiled code that are damaged, so that numba compiles again.

    Call it with the lock of the folder held, before any of its code is loaded.

    Raises:
        OSError: a damaged file cannot be removed, so its code must not be used.
    """
    recorded, sound = _read_record(folder), dict[str, _Sum]()
    for path, found, content in _files(folder):
        before = recorded.get(path.name)
        if before is not None and before.inode == found.inode:
            reason = "" if before == found else "its content has changed"
        else:
            reason = _parse_error(content, _PICKLES[path.suffix])
        if not reason:
            sound[path.name] = found
            continue
        _log.warning("compiled code is damaged and is compiled again: %s: %s", path.name, reason)
        path.unlink(missing_ok=True)
    _write_record(folder, sound)


def record(folder: Path) -> None:
    """Record the checksums of files of compiled code that are new."""
    recorded, sums = _read_record(folder), dict[str, _Sum]()
    for path, found, _ in _files(folder):
        before = recorded.get(path.name)
        # a recorded file that has changed is damaged, and stays so
        sums[path.name] = before if before and before.inode == found.inode else found
    _write_record(folder, sums)


def _read_record(folder: Path) -> dict[str, _Sum]:
    """Return the recorded checksums by file name; none if the record cannot be read."""
    try:
        content = json.loads((folder / _RECORD).read_text())
        return {name: _Sum(*entry) for name, entry in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_record(folder: Path, sums: dict[str, _Sum]) -> None:
    new = folder / f"{_RECORD}.new"
    # another user's folder may not be writable
    with suppress(OSError):
        new.write_text(json.dumps({name: [each.inode, each.crc] for name, each in sums.items()}))
        new.replace(folder / _RECORD)


def _files(folder: Path) -> Iterator[tuple[Path, _Sum, bytes]]:
    """Yield each file of compiled code with its checksum and content."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLES:
            # another process may replace it
            with suppress(OSError), path.open("rb") as file:
                content = file.read()
                inode = os.fstat(file.fileno()).st_ino
                yield path, _Sum(inode, zlib.crc32(content)), content


def _parse_error(content: bytes, pickles: int) -> str:
    """Return why numba cannot read a file, empty if it can; runs nothing."""
    stream = BytesIO(content)
    try:
        for _ in range(pickles):
            deque(pickletools.genops(stream), maxlen=0)
    except Exception as error:
        return repr(error)
    return ""
