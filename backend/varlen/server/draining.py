"""Draining: a server that is about to stop first takes no new work.

On SIGTERM the server closes HTTP at once, and answers gRPC requests that still come with an error that no proxy sends
to another replica. So the command `varlen drain` marks the server in a file in shared memory, in three steps: probes
are refused, so that proxies look elsewhere; then all new requests are; and the server is ended once none is open.

The name of the file holds the process id of the server and its start time, so that it never marks a later process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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
_LONGEST = max(map(len, STATES))
# Longest time for which a state that was read holds.
_READ_SECONDS = 0.1


class DrainWatch:
    """Reads the state of this process's server. Any thread may call it.

    Args:
        marker: file of the server, see `marker_of`.
        clock: clock in seconds.
    """

    def __init__(self, marker: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._marker = marker
        self._clock = clock
        self._read_at = float("-inf")
        self._state: DrainState = "serving"

    @property
    def state(self) -> DrainState:
        """The state, at most a tenth of a second old."""
        now = self._clock()
        if now - self._read_at > _READ_SECONDS:
            self._state, self._read_at = read_state(self._marker), now
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
    """Return the file that marks a server; None without such a process."""
    started = _start_time(pid)
    return None if started is None else folder / f"{_PREFIX}{pid}_{started}"


def read_state(marker: Path) -> DrainState:
    """Return the state in a file; `serving` without one of this user."""
    try:
        descriptor = os.open(marker, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return "serving"
    try:
        # everybody may write to the folder
        if os.fstat(descriptor).st_uid not in (0, os.geteuid()):
            return "serving"
        text = os.read(descriptor, _LONGEST).decode(errors="replace")
    finally:
        os.close(descriptor)
    return text if text in STATES else "serving"


def write_state(marker: Path, state: DrainState) -> None:
    """Set the state of a server; `serving` removes the file."""
    if state == "serving":
        marker.unlink(missing_ok=True)
        return
    new = marker.with_name(f"{marker.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "w") as file:
        file.write(state)
    # readers see the old state or the new one
    new.replace(marker)


def remove_stale_markers(folder: Path = FOLDER) -> None:
    """Remove the files of servers that have ended."""
    for path in folder.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).split("_")[0]
        if pid.isdecimal() and marker_of(int(pid), folder) != path:
            # of another user, perhaps
            with suppress(OSError):
                path.unlink()


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, in ticks since the system's start."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the name of the process may hold anything, but ends with the last parenthesis
    return status.rpartition(")")[2].split()[_START_TIME]
