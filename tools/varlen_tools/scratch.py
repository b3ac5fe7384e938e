"""Temporary folders that the next start removes if their process was killed.

Each folder is locked as long as a process uses it: the kernel releases the lock when the last one that has its
descriptor ends, however it ends. Only the standard library is imported, as in `local_server`.
"""

import fcntl
import os
import shutil
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
