"""Files in a cache folder, which other users can neither write nor replace nor lock.

Compiled code, measured costs and fetched models are used as they are found, so a folder or file counts only if it is of
this user or of root. Paths are opened a folder at a time and never looked up twice: a link of another user is not
followed. docs/decisions/0075-files-of-others.md has the rules and their reasons.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe must not block whoever opens it.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_LINKS = 40
_MOST_NAMES = 100_000
_POLL_SECONDS = 0.05
# A message about a lock comes after this time: most locks are held for less.
_QUIET_SECONDS = 1.0
_SHOWN_COMMAND = 80


class CacheError(OSError):
    """A cache is not used; the message says why, and what to do."""


class LockedError(CacheError):
    """Another process holds a lock for too long; the message names the process."""


def cache_home() -> Path:
    """Return the user's folder for caches: `XDG_CACHE_HOME`, else `.cache` in the home.

    Raises:
        CacheError: neither is an absolute path.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says to ignore relative paths
    if Path(configured).is_absolute():
        return Path(configured)
    home = os.environ.get("HOME", "")
    if not Path(home).is_absolute():
        with suppress(KeyError):
            home = pwd.getpwuid(os.geteuid()).pw_dir
    if not Path(home).is_absolute():
        raise CacheError(
            f"user {os.geteuid()} has no home; set XDG_CACHE_HOME to the absolute path of a folder for caches"
        )
    return Path(home, ".cache")


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder of cache files. Each call checks it again.

    Attributes:
        of_package: whether it came with the package, whose owner is trusted then. Its files are for all users.
    """

    path: Path
    of_package: bool = False

    def make(self) -> None:
        """Make the folder, and those above it, for this user only.

        Raises:
            CacheError: it cannot be made, or others can write to it.
        """
        os.close(self._open(create=True))

    def names(self) -> list[str]:
        """Return the names of its entries, none without the folder.

        Raises:
            CacheError: others can write to it, or it has too many entries.
        """
        try:
            folder = self._open()
        except FileNotFoundError:
            return []
        try:
            # the descriptor itself cannot be read
            readable = os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            raise CacheError(f"{self.path} cannot be read: {error.strerror}") from None
        finally:
            os.close(folder)
        names = []
        try:
            with os.scandir(readable) as entries:
                for entry in entries:
                    names.append(entry.name)
                    if len(names) > _MOST_NAMES:
                        raise CacheError(f"{self.path} has more than {_MOST_NAMES} entries")
        finally:
            os.close(readable)
        return names

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a file.

        Raises:
            CacheError: it is larger than `most_bytes`; see also `reading`.
        """
        with self.reading(name) as descriptor:
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise CacheError(f"{self.path / name} has more than {most_bytes} bytes")
        return content

    def write(self, name: str, content: bytes) -> None:
        with self.writing(name) as path:
            path.write_bytes(content)

    @contextmanager
    def reading(self, name: str) -> Iterator[int]:
        """Yield a descriptor of a file.

        Raises:
            FileNotFoundError: there is none.
            CacheError: others can write to it, or it cannot be read.
        """
        folder = self._open()
        try:
            descriptor = os.open(name, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CacheError(_refused(self.path / name, error)) from None
        finally:
            os.close(folder)
        try:
            self._check_file(name, os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield the path of a new file, which replaces the old one afterwards.

        Raises:
            CacheError: the folder cannot be written, or others can write to it.
        """
        folder = self._open(create=True)
        # others cannot guess it, and the path leads into the open folder whatever its name is now
        new = f".{name}.{secrets.token_hex(8)}"
        try:
            try:
                os.close(os.open(new, os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600, dir_fd=folder))
                yield Path(f"/proc/self/fd/{folder}", new)
                os.chmod(new, 0o644 if self.of_package else 0o600, dir_fd=folder)
                os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(new, dir_fd=folder)
                raise
        except OSError as error:
            raise CacheError(_unwritable(self.path, error)) from None
        finally:
            os.close(folder)

    def remove(self, name: str) -> None:
        """Remove a file, unless it is gone or cannot be removed."""
        with suppress(OSError):
            folder = self._open()
            try:
                os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)

    @contextmanager
    def lock(
        self, name: str, seconds: float, report: Callable[[str], object] | None = None
    ) -> Iterator[None]:
        """Hold a lock, a file that stays and that no other user can open.

        Args:
            seconds: longest time to wait for it.
            report: function that gets a message if it has to wait, with the process that holds the lock.

        Raises:
            LockedError: another process holds it all the time.
            CacheError: the file cannot be opened, or others can write to it.
        """
        folder = self._open(create=True)
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o600, dir_fd=folder)
        except OSError as error:
            raise CacheError(_refused(self.path / name, error)) from None
        finally:
            os.close(folder)
        try:
            status = os.fstat(descriptor)
            self._check_file(name, status)
            if status.st_uid == os.geteuid():
                # older versions let every user open it, and so hold it
                os.fchmod(descriptor, 0o600)
            with held(descriptor, str(self.path / name), seconds, report):
                yield
        finally:
            os.close(descriptor)

    def _open(self, *, create: bool = False) -> int:
        if not self.path.is_absolute():
            raise CacheError(f"{self.path} is no absolute path, so it is not used for caches")
        chain = _Chain(self.path)
        try:
            chain.walk((0o755 if self.of_package else 0o700) if create else None)
            chain.check(self._package_owner())
            return chain.leave()
        finally:
            chain.close()

    def _package_owner(self) -> int | None:
        return self.path.parent.stat().st_uid if self.of_package else None

    def _check_file(self, name: str, status: os.stat_result) -> None:
        path = self.path / name
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"{path} is no regular file, so it is not used")
        if status.st_uid not in (0, os.geteuid(), self._package_owner()):
            raise CacheError(
                f"{path} is of user {status.st_uid}, so it is not used: remove it, or set XDG_CACHE_HOME"
                " (or HOME, or a model's cache_folder) to a folder of your own"
            )
        if self.of_package:
            # as open to others as the code of the package
            return
        if _others_write(status):
            raise CacheError(
                f"other users can write to {path}, so it is not used: chmod go-w {path}"
            )
        # 0 once it has been replaced
        if status.st_nlink > 1:
            raise CacheError(f"{path} is a hard link, so it is not used: remove it")


class _Chain:
    """The open folders from `/` to a path. No link of another user is followed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folders = [os.open("/", _FOLDER_FLAGS)]

    def walk(self, mode: int | None) -> None:
        names, links = [*self._path.parts[:0:-1]], 0
        while names:
            name = names.pop()
            if name == "..":
                if len(self._folders) > 1:
                    os.close(self._folders.pop())
                continue
            above = self._folders[-1]
            try:
                self._folders.append(os.open(name, _FOLDER_FLAGS, dir_fd=above))
            except FileNotFoundError:
                if mode is None:
                    raise
                self._create(name, mode)
                names.append(name)
            except NotADirectoryError:
                links += 1
                if links > _MOST_LINKS:
                    raise CacheError(
                        f"{self._path} has too many links, so it is not used"
                    ) from None
                target = self._target(name)
                if Path(target).is_absolute():
                    while len(self._folders) > 1:
                        os.close(self._folders.pop())
                names += [part for part in reversed(Path(target).parts) if part != "/"]
            except OSError as error:
                raise CacheError(_unwritable(self._path, error)) from None

    def check(self, package_owner: int | None) -> None:
        user = os.geteuid()
        for folder in reversed(self._folders):
            status = os.fstat(folder)
            owner = status.st_uid
            # root's: each file in it is checked itself
            if owner == package_owner or (owner == 0 and user != 0):
                return
            where = Path(f"/proc/self/fd/{folder}").readlink()
            if owner not in (0, user):
                raise CacheError(
                    f"{where} is of user {owner}, so {self._path} is not used:"
                    " set XDG_CACHE_HOME (or HOME, or a model's cache_folder) to a folder of your own"
                )
            if owner == user != 0 and status.st_mode & stat.S_ISVTX:
                return
            if owner != 0 and _others_write(status):
                raise CacheError(
                    f"other users can write to {where}, so {self._path} is not used: chmod go-w {where}"
                )

    def leave(self) -> int:
        return self._folders.pop()

    def close(self) -> None:
        while self._folders:
            os.close(self._folders.pop())

    def _create(self, name: str, mode: int) -> None:
        try:
            os.mkdir(name, mode, dir_fd=self._folders[-1])
            # whatever the umask
            os.chmod(name, mode, dir_fd=self._folders[-1])
        except FileExistsError:
            # another process, meanwhile
            pass
        except OSError as error:
            raise CacheError(_unwritable(self._path, error)) from None

    def _target(self, name: str) -> str:
        above = self._folders[-1]
        status = os.stat(name, dir_fd=above, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode) and status.st_uid in (0, os.geteuid()):
            return os.readlink(name, dir_fd=above)
        what = "a link of another user" if stat.S_ISLNK(status.st_mode) else "no folder"
        raise CacheError(f"{name} in {self._path} is {what}, so {self._path} is not used")


@contextmanager
def folder_lock(
    folder: Path, seconds: float, report: Callable[[str], object] | None = None
) -> Iterator[None]:
    """Hold a lock on a folder that is no cache, whoever may open it.

    Raises:
        LockedError: another process holds it all the time.
        OSError: the folder cannot be read, or its file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with held(descriptor, str(folder), seconds, report):
            yield
    finally:
        os.close(descriptor)


@contextmanager
def held(
    descriptor: int, name: str, seconds: float, report: Callable[[str], object] | None = None
) -> Iterator[None]:
    """Hold the lock of an open file or folder; see `CacheFolder.lock`.

    Args:
        name: its name in messages.

    Raises:
        LockedError: another process holds it all the time.
        CacheError: its file system has no locks.
    """
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError as error:
            # a file system without locks
            raise CacheError(f"{name} cannot be locked: {error.strerror}") from None
        if waited > seconds:
            raise LockedError(
                f"{name} is locked by {holder(descriptor)} for more than {seconds:g} s"
            )
        if report is not None and waited > _QUIET_SECONDS:
            report(
                f"waiting at most {seconds:g} s for {holder(descriptor)}, which has locked {name}"
            )
            report = None
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        # closing is not enough if a process was forked meanwhile
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def holder(descriptor: int) -> str:
    """Return the process that holds the lock of an open file, for a message."""
    pid = holder_pid(descriptor)
    if pid is None:
        return "a process of another container"
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
        command = Path(f"/proc/{pid}/cmdline").read_bytes()[: 4 * _SHOWN_COMMAND]
    except OSError:
        return f"process {pid}"
    text = command.replace(b"\0", b" ").decode(errors="replace").strip()
    shown = "".join(each if each.isprintable() else "?" for each in text)[:_SHOWN_COMMAND]
    return f"process {pid} of user {owner} ({shown})"


def holder_owner(descriptor: int) -> int | None:
    """Return the user whose process holds a lock; None if it is not known."""
    pid = holder_pid(descriptor)
    with suppress(OSError):
        return None if pid is None else Path(f"/proc/{pid}").stat().st_uid
    return None


def holder_pid(descriptor: int) -> int | None:
    """Return the process that holds a lock; None if it is not known."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    found = None
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # such as: 1: FLOCK  ADVISORY  WRITE 812 fe:00:1835 0 EOF
            fields = line.split()
            if len(fields) < 6 or fields[1] != "FLOCK" or not fields[4].isdecimal():
                continue
            where, _, inode = fields[5].rpartition(":")
            if inode == str(status.st_ino) and int(fields[4]):
                if where == device:
                    return int(fields[4])
                # stacked file systems show the device below
                found = int(fields[4])
    return found


def _others_write(status: os.stat_result) -> bool:
    """Return whether users other than owner and root may write."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid)


def _is_private(group: int) -> bool:
    """Return whether a group is root's, or one that has only this user."""
    if group == 0:
        return True
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def _refused(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return f"{path} is a link, so it is not used: remove it"
    return _unwritable(path, error)


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be used ({error.strerror or error}): set XDG_CACHE_HOME (or HOME, or a model's cache_folder)"
        f" to a folder that user {os.geteuid()} can write"
    )
