"""Resident memory of processes, now, at its peak and over time, and their processor time.

Linux records the peak itself, and restarts the record when 5 is written to /proc/self/clear_refs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_PEAK_SECONDS = 0.001


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process now; by default of this one."""
    pages = _process_file(pid, "statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE")


def family_bytes(pid: int) -> int:
    """Return the resident memory of a process and all its descendants; shared pages count once."""
    total = 0
    for member in _family(pid):
        # one may end meanwhile
        with suppress(OSError):
            lines = _process_file(member, "smaps_rollup").splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def family_seconds(pid: int) -> float:
    """Return the processor time of a process and all its descendants that run, in seconds."""
    total = 0.0
    for member in _family(pid):
        # one may end meanwhile
        with suppress(OSError):
            # CPUCLOCK_SCHED of Linux: the clock of a process has its id in it, and counts nanoseconds
            total += time.clock_gettime((~member << 3) | 2)
    return total


def peak_resident_bytes(pid: int | None = None) -> int:
    """Return the peak resident memory of a process since its start or the last `reset_peak`."""
    lines = _process_file(pid, "status").splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def reset_peak() -> bool:
    """Restart the kernel's record of this process's peak; return whether it did."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def model_process(server_pid: int, model: str) -> int:
    """Return the id of the Python process in which a server runs a model."""
    # the name of its one instance, without and with an instance group in the configuration
    instances = {f"{model}_0", f"{model}_0_0"}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                words = (process / "cmdline").read_text("utf-8", errors="replace").split("\0")
                is_stub = words[0].endswith("triton_python_backend_stub")
                if is_stub and str(server_pid) in words and instances & set(words):
                    return int(process.name)
    raise RuntimeError(f"the server has no process for the model {model}")


@contextmanager
def sampled_memory(
    pid: int, seconds: float, read: Callable[[int], int] = resident_bytes
) -> Iterator[list[int]]:
    """Yield a list that grows by what `read` returns for a process, at intervals."""
    samples: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        # the process may end first
        with suppress(OSError):
            while not ended.wait(seconds):
                samples.append(read(pid))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


@dataclass(slots=True)
class ResidentPeak:
    """Peak resident memory above that at the beginning, in bytes, known at the end."""

    above: int = 0


@contextmanager
def resident_peak() -> Iterator[ResidentPeak]:
    """Yield the peak of this process inside a `with`."""
    before, peak = resident_bytes(), ResidentPeak()
    if reset_peak():
        yield peak
        highest = peak_resident_bytes()
    else:
        with sampled_memory(os.getpid(), _PEAK_SECONDS) as samples:
            yield peak
        highest = max(samples, default=before)
    peak.above = max(0, highest - before)


def children_of(pid: int) -> list[int]:
    """Return the ids of the children of a process."""
    found: list[int] = []
    with suppress(OSError):
        # each thread has children of its own
        for thread in Path("/proc", str(pid), "task").iterdir():
            found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


def hosts_of(pid: int) -> list[int]:
    """Return the ids of the processes that load models for a process, and run.

    They may be children of another one, which may never ask for their exit codes.
    """
    parents = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if (process / "comm").read_text("utf-8", errors="replace") == f"varlen {pid}\n":
                fields = (process / "stat").read_text("utf-8", errors="replace").rpartition(")")[2]
                state, parent = fields.split()[:2]
                if state != "Z":
                    parents[int(process.name)] = int(parent)
    # forks of one have its name
    return [host for host, parent in parents.items() if parent not in parents]


def _family(pid: int) -> Iterator[int]:
    yield pid
    for child in {*children_of(pid), *hosts_of(pid)}:
        yield from _family(child)


def _process_file(pid: int | None, name: str) -> str:
    return Path("/proc", str(pid or os.getpid()), name).read_text(encoding="ascii")
