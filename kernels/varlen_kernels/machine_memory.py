"""Memory of this machine, or of the container that this process runs in."""

import os
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
# Limits of a container: `memory.max` is "max" if there is no limit.
_CONTAINER = Path("/sys/fs/cgroup")


def memory_limit() -> int:
    """Return the bytes that all processes here may use together."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _container_limit()
    return installed if limit is None else min(installed, limit)


def free_memory() -> int:
    """Return the bytes that further processes may use.

    They include what the system can drop from its cache of files.
    """
    kilobytes = _fields(_MACHINE).get("MemAvailable")
    free = memory_limit() if kilobytes is None else kilobytes * 1024
    limit, used = _container_limit(), _number(_CONTAINER / "memory.current") or 0
    if limit is None:
        return free
    used -= _fields(_CONTAINER / "memory.stat").get("inactive_file", 0)
    return max(0, min(free, limit - used))


def _container_limit() -> int | None:
    return _number(_CONTAINER / "memory.max")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines `NAME: NUMBER unit` or `NAME NUMBER`, none without the file."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {name: int(number) for name, number, *_ in lines}
