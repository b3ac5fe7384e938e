"""What a server holds: processes, threads, descriptors, memory, shared memory; before and after.

A variable in the environment of a server marks it and every process that it starts, also one that has lost its parent
or has a session of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

MIB = 1 << 20

MARK = "VARLEN_CAMPAIGN_SERVER"

# Growth that is no leak: pools of the server that fill, and heaps that are trimmed once a second.
_MOST_GROWTH_MIB, _MOST_GROWTH = 48.0, 0.06
_MOST_DESCRIPTORS, _MOST_THREADS = 6, 4
_SETTLE_SECONDS = 30.0
# A watchdog looks once a second, and a worker ends with its connections.
_END_SECONDS = 15.0
_POLL_SECONDS = 0.5
# A watchdog starts it each second; it comes and goes.
_SLEEP = "sleep"
# The process that renders templates, and its grammars.
_SANDBOX = "sandbox"


@dataclass(frozen=True, slots=True)
class State:
    """The processes of a server, and what they hold together.

    Attributes:
        processes: number by role: server, stub, worker, sandbox, watchdog, other.
        descriptors: open files, sockets and pipes.
        threads: threads of all processes.
        memory_mib: resident, without sandboxes, whose grammars have a bound of their own; pages that processes share
            count once.
        shared_mib: MiB of their regions in /dev/shm. The server never shrinks them.
    """

    processes: Mapping[str, int]
    descriptors: int
    threads: int
    memory_mib: float
    shared_mib: float

    @classmethod
    def of(cls, mark: str) -> State:
        """Return the state of the processes with this mark now."""
        processes: Counter[str] = Counter()
        descriptors, threads, memory, regions = 0, 0, 0, set[str]()
        for pid in marked(mark):
            # one may end meanwhile
            with suppress(OSError):
                folder = Path("/proc", str(pid))
                role = role_of(pid)
                if role in ("", _SLEEP):
                    continue
                found = list(folder.joinpath("fd").iterdir())
                threads += len(list(folder.joinpath("task").iterdir()))
                if role != _SANDBOX:
                    memory += _proportional_kib(folder) * 1024
                regions |= _regions(folder)
                descriptors += len(found)
                processes[role] += 1
        return cls(
            dict(sorted(processes.items())),
            descriptors,
            threads,
            memory / MIB,
            sum({path.name: _file_bytes(path) for path in map(Path, regions)}.values()) / MIB,
        )

    def growth(self, after: State) -> list[str]:
        """Return what a later state holds more than this one, beyond what is no leak."""
        found = []
        if after.processes != self.processes:
            found.append(f"processes: {dict(self.processes)} became {dict(after.processes)}")
        if after.descriptors > self.descriptors + _MOST_DESCRIPTORS:
            found.append(f"descriptors: {self.descriptors} became {after.descriptors}")
        if after.threads > self.threads + _MOST_THREADS:
            found.append(f"threads: {self.threads} became {after.threads}")
        most = self.memory_mib * (1 + _MOST_GROWTH) + _MOST_GROWTH_MIB
        if after.memory_mib > most:
            found.append(f"memory: {self.memory_mib:.0f} MiB became {after.memory_mib:.0f} MiB")
        return found

    def cells(self, suffix: str) -> dict[str, str | int | float]:
        """Return the cells of a row, each name with a suffix."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["processes"] = sum(self.processes.values())
        return {
            f"{name}_{suffix}": round(value, 1) if isinstance(value, float) else value
            for name, value in values.items()
        }


def settled(mark: str, before: State | None = None) -> State:
    """Return the state of these processes once they hold no more than before.

    Connections close, workers end and heaps are trimmed a little after the last request.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    # the served processes release memory once a second
    time.sleep(2.5)
    state = State.of(mark)
    while before and before.growth(state) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        state = State.of(mark)
    return state


def marked(mark: str) -> list[int]:
    """Return the ids of the running processes with this mark."""
    entry, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            # one may end meanwhile, and processes of other users cannot be read; a zombie has no environment
            with suppress(OSError):
                if entry in folder.joinpath("environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def left_over(mark: str, seconds: float = _END_SECONDS) -> list[int]:
    """Return what still runs of the processes with this mark after some seconds."""
    deadline = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


def role_of(pid: int) -> str:
    """Return the role of a process of a server; empty if it has ended."""
    command_line = ""
    with suppress(OSError):
        command_line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    for mark, role in (
        ("triton_python_backend_stub", "stub"),
        ("varlen.execution.workers.child", "worker"),
        ("varlen.sandbox.host", _SANDBOX),
        ("varlen-watchdog", "watchdog"),
        ("tritonserver", "server"),
    ):
        if mark in command_line:
            return role
    if command_line.startswith("sleep"):
        return _SLEEP
    return "other" if command_line else ""


def _proportional_kib(folder: Path) -> int:
    lines = folder.joinpath("smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _regions(folder: Path) -> set[str]:
    """Return the mapped files in /dev/shm that belong to the server's Python processes."""
    lines = folder.joinpath("maps").read_text(errors="replace").splitlines()
    # the process may have a /dev/shm of its own
    return {f"{folder}/root{line.split()[-1]}" for line in lines if "_shm_region_" in line}


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
