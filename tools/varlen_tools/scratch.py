"""Temporary folders and shared memory that killed processes leave, and the next start removes.

Each folder is locked as long as a process uses it: the kernel releases the lock when the last one that has its
descriptor ends, however it ends.

A killed server leaves the regions of its models, and a server one for each killed model process. The kernel says
whether a file is in use: it gives a lease for writing only on files that no process has open or mapped, in any
container. So regions of running servers are never touched. Only the standard library is imported, as in `run_server`.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# Folders without it are of other programs, and of versions that did not lock them.
_SUFFIX = ".locked"


@dataclass(frozen=True, slots=True)
class ScratchFolder:
    """A temporary folder of this user.

    Attributes:
        lock: descriptor with the lock of the folder; a child process that inherits it keeps the folder too.
    """

    path: Path
    lock: int


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[ScratchFolder]:
    """Yield a new folder, and remove it; first remove folders of killed processes.

    Args:
        prefix: beginning of its name, and of the names of those that are removed.
        parent: folder that gets it; None is the one for temporary files.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_abandoned(prefix, parent)
    folder = _create(prefix, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        os.close(folder.lock)


def remove_abandoned(prefix: str, parent: Path) -> list[Path]:
    """Remove the folders of this user that no process uses, and return them."""
    removed = []
    for path in sorted(parent.glob(f"{prefix}*{_SUFFIX}")):
        # in use, of another user, or removed meanwhile
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    removed.append(path)
            finally:
                os.close(lock)
    return removed


def _create(prefix: str, parent: Path) -> ScratchFolder:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=parent))
        # another process may have removed it before it was locked
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            # on a file system without locks no process removes it
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return ScratchFolder(path, lock)
            os.close(lock)


FOLDER = Path("/dev/shm")  # noqa: S108  # the one folder of POSIX shared memory
# The names that the server gives to the regions of Python backends.
_REGION = re.compile(r"triton_\w+_backend_shm_region_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Region:
    """A region of shared memory that no process uses; its size is in bytes."""

    path: Path
    size: int


def unused_regions(folder: Path = FOLDER) -> list[Region]:
    """Return the regions of servers that no process has open or mapped.

    Regions of other users are left out, unless this is root.
    """
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with _claim(path) as region:
            if region is not None:
                found.append(region)
    return found


def remove_unused(folder: Path = FOLDER) -> list[Region]:
    """Remove these regions, and return them."""
    removed = []
    for each in unused_regions(folder):
        # again, since a process may have opened it meanwhile
        with _claim(each.path) as region, suppress(OSError):
            if region is not None:
                region.path.unlink()
                removed.append(region)
    return removed


@contextmanager
def _claim(path: Path) -> Iterator[Region | None]:
    """Yield an unused region, or None; no process can open the region inside the context."""
    if not _REGION.fullmatch(path.name):
        yield None
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # of another user, or removed meanwhile
        yield None
        return
    try:
        yield _leased(path, descriptor)
    finally:
        # ends the lease
        os.close(descriptor)


def _leased(path: Path, descriptor: int) -> Region | None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        # in use, of another user, or a system without leases
        return None
    return Region(path, status.st_size)


def described(regions: list[Region]) -> str:
    """Return the number of regions and their size, for messages."""
    return f"{len(regions)} regions, {sum(region.size for region in regions):,} bytes"
