"""Draining: a server that is about to stop first takes no new work.

The command `varlen drain` marks the server in a file in shared memory, in three steps: probes are refused, so that
proxies look elsewhere; then all new requests are; and the server is ended once none is open. The name of a file has the
process id of the server and its start time, the state, and a random end. Files of other users count as none.
docs/decisions/0067-draining.md has the reasons.
"""

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from varlen.errors import DrainingError

DrainState: TypeAlias = Literal["serving", "draining", "refusing"]
"""`draining` refuses probes only, `refusing` every new request."""

STATES: tuple[DrainState, ...] = get_args(DrainState)
FOLDER = Path("/dev/shm")  # noqa: S108  # the server needs it, also where the root is read-only
_PREFIX = "varlen_drain_"
# Field 22 of /proc/PID/stat, counted from what follows the name of the process.
_START_TIME = 19
# Shortest time for which a state that was read holds, and its largest part that reading takes: a user may fill the
# folder with files.
_READ_SECONDS = 0.1
_READ_PART = 0.05


class DrainWatch:
    """Reads the state of this process's server. Any thread may call it.

    Args:
        marker: beginning of the files of the server, see `marker_of`.
    """

    def __init__(self, marker: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._marker = marker
        self._clock = clock
        self._holds_until = float("-inf")
        self._state: DrainState = "serving"

    @property
    def state(self) -> DrainState:
        """The state, usually at most a tenth of a second old."""
        began = self._clock()
        if began > self._holds_until:
            self._state, now = read_state(self._marker), self._clock()
            self._holds_until = now + max(_READ_SECONDS, (now - began) / _READ_PART)
        return self._state

    def check(self, *, is_probe: bool) -> None:
        """Refuse a request that this replica takes no more.

        Raises:
            DrainingError: every request is refused; or probes are, and the request is one.
        """
        state = self.state
        if state == "refusing" or (is_probe and state == "draining"):
            raise DrainingError("this replica is shutting down; send the request to another one")


def marker_of(pid: int, folder: Path = FOLDER) -> Path | None:
    """Return how the files of a server begin; None without such a process."""
    started = start_time(pid)
    return None if started is None else folder / f"{_PREFIX}{pid}_{started}"


def read_state(marker: Path) -> DrainState:
    """Return the state of a server by its files; `serving` without one."""
    found = {state for _, state in _files(marker)}
    return next((state for state in reversed(STATES) if state in found), "serving")


def write_state(marker: Path, state: DrainState) -> None:
    """Set the state of a server; `serving` removes its files.

    Raises:
        OSError: the folder cannot be written, or root has drained the server.
    """
    older = [path for path, _ in _files(marker)]
    if state != "serving":
        new = marker.with_name(f"{marker.name}.{state}.{secrets.token_hex(8)}")
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for path in older:
        path.unlink(missing_ok=True)


def _files(marker: Path) -> Iterator[tuple[Path, DrainState]]:
    """Yield the files of a server, made by this user or root, and their states."""
    with suppress(OSError), os.scandir(marker.parent) as entries:
        for entry in entries:
            if not entry.name.startswith(f"{marker.name}."):
                continue
            word = entry.name.removeprefix(f"{marker.name}.").partition(".")[0]
            state = next((each for each in STATES if each == word), None)
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_own = status.st_uid in (0, os.geteuid())
                # another name for a file of this user is of whoever made the name
                if state and is_own and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    yield Path(entry.path), state


def remove_stale_markers(folder: Path = FOLDER) -> None:
    """Remove the files of servers that have ended."""
    for path in folder.glob(f"{_PREFIX}*"):
        marker = path.with_name(path.name.partition(".")[0])
        pid = marker.name.removeprefix(_PREFIX).split("_")[0]
        if pid.isdecimal() and marker_of(int(pid), folder) != marker:
            # of another user, perhaps
            with suppress(OSError):
                path.unlink()


def start_time(pid: int) -> str | None:
    """Return the start time of a process, in ticks since the system's start."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the name of the process may hold anything, but ends with the last parenthesis
    return status.rpartition(")")[2].split()[_START_TIME]
