"""How much memory a process has resident, and the most that it had while something ran.

Linux keeps the peak itself, and begins anew when 5 is written to /proc/self/clear_refs.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

_SAMPLE_SECONDS = 0.001
_SELF = Path("/proc/self")


def resident_bytes(pid: int | None = None) -> int:
    """Return the memory that a process has resident now, this one if none is given."""
    pages = (Path("/proc") / str(pid or os.getpid()) / "statm").read_text(encoding="ascii").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes(pid: int | None = None) -> int:
    """Return the most memory that a process had resident since it began, or since its peak was forgotten."""
    status = (Path("/proc") / str(pid or os.getpid()) / "status").read_text(encoding="ascii")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


class ResidentPeak:
    """The most that this process had resident inside a `with`, in bytes above what it had before.

    Attributes:
        above: the peak, known when the `with` has ended.
    """

    above = 0

    def __init__(self) -> None:
        self._highest = 0
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> ResidentPeak:
        self._before = resident_bytes()
        if not _forget_peak():
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sampler is None:
            peak = peak_resident_bytes()
        else:
            self._ended.set()
            self._sampler.join()
            peak = self._highest
        self.above = max(0, peak - self._before)

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._highest = max(self._highest, resident_bytes())


def _forget_peak() -> bool:
    """Let the kernel count the peak from now; return whether it does."""
    try:
        (_SELF / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
