"""Shared memory of large answers: checked before they are computed, and before they are sent.

The server's python backend copies a response into its pool, a file in shared memory that grows and never shrinks. A
send that finds no memory leaves its client without an answer, so it must not happen: a response of at most a third of
what is free and of the pool, less the steps in which it grows, always finds a part of its size
(docs/decisions/0036-memory-of-answers.md). The server makes the pool readable to every user; `hide_pool` ends that
before a request comes.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from varlen.errors import EngineError, QueueFullError, RequestError
from varlen_kernels.cache_files import holder, holder_owner

_log = logging.getLogger(__name__)

_FOLDER = "/dev/shm"  # noqa: S108  # only asked for sizes, and locked
# Smaller responses are not checked.
_LARGE_BYTES = 1 << 20
# A pool this many times as large as a response has a free part for it, between small messages.
_POOL_SHARE = 2
# Which arguments of the python backend's process are the name of its pool and the step in which it grows, in bytes.
_POOL_ARGUMENT = 2
_STEP_ARGUMENT = 4
_DEFAULT_STEP = 1 << 20
# A send takes milliseconds; a process that has stopped while it holds the lock must not stop the others.
_LOCK_SECONDS = 30.0
_POLL_SECONDS = 0.002
# Time between two looks at who holds the lock.
_LOOK_SECONDS = 0.25


def hide_pool() -> None:
    """Let only this process's user read the pool: requests and answers pass through it.

    The server sets the mode of the file, so its umask changes nothing.
    """
    if file := pool_file():
        with suppress(FileNotFoundError):
            file.chmod(0o600)


def pool_file() -> Path | None:
    """Return the file of this process's pool; None in any other process."""
    return _pool_file(_arguments())


def check_answer(size: int) -> None:
    """Refuse a request whose answer has too little shared memory, before it runs.

    Args:
        size: size of the answer in bytes; 0 if it is unknown.

    Raises:
        RequestError: the answer is too large for this server.
        QueueFullError: it is too large for the memory that is left now.
    """
    if size < _LARGE_BYTES:
        return
    memory = os.statvfs(_FOLDER)
    total, pool = memory.f_blocks * memory.f_frsize, _Pool.of_process()
    largest = max(pool.size // _POOL_SHARE, (total - pool.growth(0)) // (_POOL_SHARE + 1), 0)
    if size > largest:
        raise RequestError(
            f"the answer has {size} bytes; the shared memory of this server is enough for {largest}:"
            " send fewer rows at once"
        )
    # stricter than before the send: other answers may take what is free now
    if not pool.fits_always(size):
        raise QueueFullError(
            f"the server has too little shared memory left for an answer of {size} bytes:"
            " send fewer rows at once, or try again later"
        )


@contextmanager
def sending(size: int) -> Iterator[None]:
    """Send a response within this context.

    Large responses are sent one at a time, by all models of the server.
    The response must not outlive it: its memory is free once the object is gone.

    Args:
        size: size of the response, in bytes.

    Raises:
        EngineError: it has too little shared memory, or another model does not end its send.
    """
    if size < _LARGE_BYTES:
        yield
        return
    folder = os.open(_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(folder)
        pool = _Pool.of_process()
        if pool.growth(size) > _free_bytes() and not pool.fits_always(size):
            raise EngineError(
                f"the server has too little shared memory for an answer of {size} bytes"
            )
        yield
    finally:
        os.close(folder)


def _lock(folder: int) -> None:
    """Lock the folder of shared memory until its descriptor is closed.

    A lock of another user, who may open the folder too, is not waited for: answers are then sent without it.
    """
    began = time.monotonic()
    looks_at = began + _LOOK_SECONDS
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        now = time.monotonic()
        if now > looks_at:
            if holder_owner(folder) not in (None, 0, os.geteuid()):
                _log.warning(
                    "%s is locked by %s; large answers do not wait", _FOLDER, holder(folder)
                )
                return
            looks_at = now + _LOOK_SECONDS
        if now - began > _LOCK_SECONDS:
            raise EngineError("the large answers of other models are not sent in time")
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class _Pool:
    """The python backend's pool of this process.

    Attributes:
        step: step in which it grows, in bytes: the server's option shm-growth-byte-size.
    """

    size: int
    step: int

    @classmethod
    def of_process(cls) -> "_Pool":
        """Return the pool; one of no size in processes that are not the python backend's."""
        arguments = _arguments()
        file = _pool_file(arguments)
        if file is None:
            return cls(0, _DEFAULT_STEP)
        step = arguments[_STEP_ARGUMENT]
        return cls(
            file.stat().st_size if file.is_file() else 0,
            int(step) if step.isdigit() else _DEFAULT_STEP,
        )

    def growth(self, size: int) -> int:
        """Return how much free memory is enough to grow by a response of `size` bytes."""
        # whole steps for the response, and one for small messages
        return size + 2 * self.step

    def fits_always(self, size: int) -> bool:
        in_pool = _POOL_SHARE * size
        return in_pool <= self.size or in_pool + self.growth(size) <= _free_bytes() + self.size


def _arguments() -> list[bytes]:
    return Path("/proc/self/cmdline").read_bytes().split(b"\0")


def _pool_file(arguments: list[bytes]) -> Path | None:
    """Return the file of the pool; None in processes that are not the python backend's."""
    if len(arguments) <= _STEP_ARGUMENT or b"/" in arguments[_POOL_ARGUMENT]:
        return None
    return Path(_FOLDER, os.fsdecode(arguments[_POOL_ARGUMENT]))


def _free_bytes() -> int:
    memory = os.statvfs(_FOLDER)
    return memory.f_bavail * memory.f_frsize
