"""Processes that tests end, wait for, or run as another user."""

import fcntl
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The user that owns nothing.
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# Longer than the end of any process takes on a busy machine.
_SECONDS = 60.0


def is_gone(pid: int) -> bool:
    """Wait until a process has ended; return whether it has."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        try:
            # a zombie has ended too
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def as_user(user: int, work: Callable[[], object]) -> str:
    """Return what a function returns or raises in a process of another user, as text."""
    read, write = os.pipe()
    pid = _fork()
    if not pid:
        try:
            _become(user)
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


@contextmanager
def locked_by(user: int, path: Path) -> Iterator[int]:
    """Have a process of another user hold a lock; yield its id."""
    said, says = os.pipe()
    stopped, stop = os.pipe()
    pid = _fork()
    if not pid:
        try:
            os.close(stop)
            _become(user)
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
            os.write(says, b"locked")
            os.read(stopped, 1)
        finally:
            os._exit(0)
    os.close(says)
    os.close(stopped)
    try:
        assert os.read(said, 6) == b"locked"
        yield pid
    finally:
        os.close(stop)
        os.close(said)
        os.waitpid(pid, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        # the child starts no thread, and takes no lock that another thread may hold
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
