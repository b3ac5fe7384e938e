"""A lock on a folder: one process at a time works there."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder once no other process holds it."""
    handle = _locked(folder)
    try:
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def exclusive_scratch(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if absent, and may be removed."""
    while True:
        folder.mkdir(exist_ok=True)
        handle = _locked(folder)
        try:
            # the last holder may have removed the folder that this process waited for
            if folder.exists() and os.path.samestat(folder.stat(), os.fstat(handle)):
                yield
                return
        finally:
            os.close(handle)


def _locked(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except BaseException:
        os.close(handle)
        raise
    return handle
