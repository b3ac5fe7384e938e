"""A lock of all processes that compile the same code.

One of them compiles it, and the others wait for what it stores.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def compile_lock(file: Path) -> Iterator[None]:
    """Hold a lock file, which stays.

    Args:
        file: it is created if it is absent.

    Raises:
        OSError: it cannot be created.
    """
    # another user's file can be locked, but not written
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # closing is not enough if a process was forked meanwhile
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
