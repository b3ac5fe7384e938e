"""Resident memory of processes: now, at its peak, and while something runs.

Linux counts the peak itself, and restarts the count when 5 is written to /proc/self/clear_refs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from varlen_bench.harness.summary import flatness

_PEAK_SECONDS = 0.001
_SERVER_SECONDS = 1.0
# Share of the first samples of a server that do not count: its queues fill.
_FILLING = 0.1


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process now; by default of this one."""
    pages = (Path("/proc") / str(pid or os.getpid()) / "statm").read_text(encoding="ascii").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes(pid: int | None = None) -> int:
    """Return the peak resident memory of a process since its start or the last `reset_peak`."""
    status = (Path("/proc") / str(pid or os.getpid()) / "status").read_text(encoding="ascii")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def reset_peak() -> bool:
    """Restart the kernel's count of this process's peak; return whether it did."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def model_process(server_pid: int, model: str) -> int:
    """Return the id of the Python process in which a server runs a model.

    Raises:
        RuntimeError: there is none.
    """
    # its one instance; the second form is of a model whose configuration has an instance group
    instances = {f"{model}_0", f"{model}_0_0"}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            words = _command_line(entry)
            is_stub = words[0].endswith("triton_python_backend_stub")
            if is_stub and str(server_pid) in words and instances & set(words):
                return int(entry.name)
    raise RuntimeError(f"the server has no process for the model {model}")


class _Sampler:
    """A thread that calls a function at intervals inside a `with`."""

    def __init__(self, sample: Callable[[], None], seconds: float) -> None:
        self._sample = sample
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._sample()
            except OSError:
                return


class ResidentPeak:
    """The peak of this process's resident memory inside a `with`, above its start, in bytes.

    Attributes:
        above: the peak, known after the `with`.
    """

    above = 0

    def __enter__(self) -> ResidentPeak:
        self._before = self._highest = resident_bytes()
        self._sampler = None if reset_peak() else _Sampler(self._sample, _PEAK_SECONDS)
        if self._sampler is not None:
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is None:
            self._highest = peak_resident_bytes()
        else:
            self._sampler.stop()
        self.above = max(0, self._highest - self._before)

    def _sample(self) -> None:
        self._highest = max(self._highest, resident_bytes())


class ResidentSamples:
    """The resident memory of another process, sampled every second inside a `with`.

    Attributes:
        samples: in bytes, in order.
    """

    def __init__(self, pid: int) -> None:
        self.samples: list[int] = []
        self._sampler = _Sampler(lambda: self.samples.append(resident_bytes(pid)), _SERVER_SECONDS)

    def __enter__(self) -> ResidentSamples:
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.stop()

    def flatness(self) -> float | None:
        """Return the flatness of the samples after the first tenth; None without samples."""
        samples = self.samples[int(_FILLING * len(self.samples)) :]
        return flatness(samples) if samples else None


def _command_line(process: Path) -> list[str]:
    """Return the words of a process's command line; one empty word if it has none."""
    try:
        return (process / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return [""]
