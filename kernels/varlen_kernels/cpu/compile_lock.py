"""A lock of all processes that compile ops into one folder.

Numba stores compiled code without a lock. Two processes that store different signatures of one function at the same
time can swap their code, which then runs on data of the wrong type. So the first calls of compiled ops hold this lock.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from varlen_kernels.cpu import compiled_files

_FILE = "varlen.lock"


class _Holder:
    """The thread of this process that holds the lock."""

    def __init__(self) -> None:
        self.threads = threading.RLock()
        self.holds = False


_holder = _Holder()


@contextmanager
def compile_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a thread that holds it already goes on.

    The files of compiled code are recorded when it is released.

    Args:
        folder: folder where numba stores compiled code; there is one per process.

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
            try:
                yield
            finally:
                compiled_files.record(folder)
        finally:
            _holder.holds = False
            # closing is not enough if a process was forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)
