"""A lock of all processes that compile ops into one folder.

Numba stores compiled code without a lock. Two processes that store different signatures of one function at the same
time can swap their code, which then runs on data of the wrong type. So the first calls of compiled ops hold this lock.
"""

import fcntl
import logging
import os
import pickletools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)

_FILE = "varlen.lock"


def remove_damaged(folder: Path) -> None:
    """Remove the index files that numba cannot read, so that it compiles again.

    Call it with the lock held; numba itself raises whatever reading a cut file raises.
    """
    for path in folder.glob("*.nbi"):
        try:
            with path.open("rb") as file:
                # parsed, not run: its version, then the names of compiled code
                deque(pickletools.genops(file), maxlen=0)
                deque(pickletools.genops(file), maxlen=0)
        except Exception as error:
            _log.warning("compiled code is damaged and is compiled again: %s: %r", path.name, error)
            with suppress(OSError):
                path.unlink()


class _Holder:
    """The thread of this process that holds the lock."""

    def __init__(self) -> None:
        self.threads = threading.RLock()
        self.holds = False


_holder = _Holder()


@contextmanager
def compile_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a thread that holds it already goes on.

    Args:
        folder: where numba stores compiled code; there is one per process.

    Raises:
        OSError: the lock file cannot be created.
    """
    with _holder.threads:
        if _holder.holds:
            yield
            return
        # another user's file can be locked, but not written
        file = os.open(folder / _FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            _holder.holds = True
            yield
        finally:
            _holder.holds = False
            # closing is not enough if a process was forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)
