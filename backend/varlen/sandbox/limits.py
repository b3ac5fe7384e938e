"""Limits of a process of the sandbox, which the kernel enforces in any library.

Processor time is counted, not the time of day: a busy machine makes no request fail.
"""

import resource
import signal
from dataclasses import dataclass
from pathlib import Path

# Exit code of a process that ran out of memory in Python.
OUT_OF_MEMORY = 3


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one grammar, or of one call of a template.

    Attributes:
        seconds: processor time.
    """

    seconds: float
    num_bytes: int


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate at most this number of bytes from now on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    _, present = resource.getrlimit(resource.RLIMIT_AS)
    if present != resource.RLIM_INFINITY:
        most = min(most, present)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def start_timer(seconds: float) -> None:
    """End this process after some processor time, unless the timer is stopped."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def stop_timer() -> float:
    """Stop the timer; return the processor time that was left, in seconds."""
    return signal.setitimer(signal.ITIMER_PROF, 0)[0]


def private_bytes() -> int:
    """Return the memory of this process that no other process shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
