"""Shared memory of large answers: checked before they are computed, and before they are sent.

The server's python backend copies a response into its pool, a file in shared memory that grows and never shrinks. It
grows by the whole response unless one free part of the pool holds it. A send that finds no memory leaves its client
without an answer, so it must not happen.

A model can have what is free, and its pool. A response of at most a third of that always finds a part of its size:
either as much is free, or the pool is at least twice as large.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from varlen.errors import EngineError, QueueFullError, RequestError

_FOLDER = "/dev/shm"  # noqa: S108  # only asked for sizes, and locked
# Smaller responses are not checked.
_LARGE_BYTES = 1 << 20
# The pool grows in steps of the server's option shm-growth-byte-size, 1 MiB by default.
_GROWTH_BYTES = 2 << 20
_SHARE = 3
# Which argument of the python backend's process names its pool.
_POOL_ARGUMENT = 2


def check_answer(size: int) -> None:
    """Refuse a request whose answer has too little shared memory, before it runs.

    Args:
        size: of the answer in bytes; 0 if it is unknown.

    Raises:
        RequestError: the answer is too large for this server.
        QueueFullError: it is too large for the memory that is left now.
    """
    if size < _LARGE_BYTES:
        return
    memory = os.statvfs(_FOLDER)
    largest = memory.f_blocks * memory.f_frsize // _SHARE
    if size > largest:
        raise RequestError(
            f"the answer has {size} bytes; the shared memory of this server is enough for {largest}:"
            " send fewer rows at once"
        )
    # stricter than before the send: other answers may take what is free now
    if not _fits_always(size):
        raise QueueFullError(
            f"the server has too little shared memory for an answer of {size} bytes; try again later"
        )


@contextmanager
def sending(size: int) -> Iterator[None]:
    """Send a response within this context.

    Large responses are sent one at a time, by all models of the server.
    The response must not outlive it: its memory is free once the object is gone.

    Args:
        size: of the response, in bytes.

    Raises:
        EngineError: it has too little shared memory.
    """
    if size < _LARGE_BYTES:
        yield
        return
    folder = os.open(_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if size + _GROWTH_BYTES > _free_bytes() and not _fits_always(size):
            raise EngineError(
                f"the server has too little shared memory for an answer of {size} bytes"
            )
        yield
    finally:
        os.close(folder)


def _fits_always(size: int) -> bool:
    """Return whether a response of `size` bytes fits, however the pool has grown."""
    return _SHARE * size <= _free_bytes() + _pool_bytes()


def _free_bytes() -> int:
    memory = os.statvfs(_FOLDER)
    return memory.f_bavail * memory.f_frsize


def _pool_bytes() -> int:
    """Return the size of the python backend's pool; 0 in other processes."""
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if len(arguments) <= _POOL_ARGUMENT or b"/" in arguments[_POOL_ARGUMENT]:
        return 0
    pool = Path(_FOLDER, os.fsdecode(arguments[_POOL_ARGUMENT]))
    return pool.stat().st_size if pool.is_file() else 0
