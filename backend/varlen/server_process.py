"""The process that the server gives a model: its log, its metrics, its end, and what it can read."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import time
from collections.abc import Callable
from threading import Event, Thread

import numpy as np
import triton_python_backend_utils as pb_utils

from varlen.config import LogLevel
from varlen.errors import ConfigError
from varlen.metrics import Exporter, Metric, Readings, Stats

_log = logging.getLogger(__name__)

# mallopt's number for the size from which the C library maps memory for one use and gives it back at once.
_M_MMAP_THRESHOLD = -3
# Left alone, it grows to 32 MiB, and what requests of random sizes free stays in the heap of each thread.
_MAPPED_BYTES = 1 << 20
# How often small blocks are looked through, which takes a millisecond or two, and the work that calls for it, in
# seconds of any core.
_TRIM_SECONDS = 1.0
_TRIM_AFTER_SECONDS = 0.05

# Ends process $2 when its parent is no longer $1, and itself when there is no such process.
_WATCHDOG = r"""
while sleep 1 && [ -d "/proc/$2" ]; do
  grep -q "^PPid:[[:space:]]*$1\$" "/proc/$2/status" || exec kill -9 "$2"
done
"""


def check_numpy() -> None:
    """Refuse a numpy that this server's python backend cannot read arrays with.

    Backends built before numpy 2 hand out arrays of a wrong stride under it: token ids come
    garbled, and text ends the process.

    Raises:
        ConfigError: it cannot.
    """
    import torch

    # an array that the python backend makes itself; numpy's own would come back as it went in
    made = pb_utils.Tensor.from_dlpack("numbers", torch.arange(4)).as_numpy()
    if made.tolist() != [0, 1, 2, 3]:
        raise ConfigError(
            f"this server's python backend garbles arrays of numpy {np.__version__}: install numpy<2"
        )


def return_large_memory() -> None:
    """Have the C library give large freed blocks back to the system, so that the process stays as small as it is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


class MemoryTrimmer:
    """Has the C library give small freed blocks back to the system too, as far as whole pages are free.

    Requests of random sizes leave gaps in the heap of every thread. They are looked through once a second while the
    process works, by a thread of its own.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._stop = Event()
        self._thread = Thread(target=self._loop, name="varlen-trimmer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        trimmed_at = 0.0
        while self._trim is not None and not self._stop.wait(_TRIM_SECONDS):
            if time.process_time() - trimmed_at > _TRIM_AFTER_SECONDS:
                self._trim(0)
                trimmed_at = time.process_time()


def start_exporter(
    args: dict[str, str], stats: Stats, read: Callable[[], Readings]
) -> Exporter | None:
    """Return the metrics' exporter, or None when the server runs without metrics.

    Args:
        args: as `initialize` gets them.
        stats, read: see `Exporter`.
    """
    families: dict[str, pb_utils.MetricFamily] = {}

    def make_metric(
        kind: str, name: str, about: str, labels: dict[str, str], buckets: list[float] | None
    ) -> Metric:
        if name not in families:
            families[name] = pb_utils.MetricFamily(
                name=name, description=about, kind=getattr(pb_utils.MetricFamily, kind)
            )
        if buckets is None:
            return families[name].Metric(labels=labels)
        return families[name].Metric(labels=labels, buckets=buckets)

    labels = {"model": args["model_name"], "instance": args["model_instance_name"]}
    try:
        return Exporter(stats, read, make_metric, labels)
    except pb_utils.TritonModelException as error:
        _log.info("the server takes no metrics, so none are kept: %s", error)
        return None


def start_watchdog() -> subprocess.Popen[bytes]:
    """Return a process that ends this one when the server has died without telling it.

    A process, not a thread: when the server is killed under load, this process's main thread waits
    for it for ever and holds the GIL, so no Python thread would run again.
    """
    command = ["/bin/sh", "-c", _WATCHDOG, "varlen-watchdog", str(os.getppid()), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


class _ServerLog(logging.Handler):
    """Writes our log lines into the server's log. Slow, so only for lifecycle events and faults, unless asked for."""

    def emit(self, record: logging.LogRecord) -> None:
        line = f"varlen: {self.format(record)}"
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(line)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(line)
        else:
            pb_utils.Logger.log_info(line)


def log_to_server(level: LogLevel = "info") -> None:
    """Send the lines of the logger `varlen` to the server's log, from this level on."""
    logger = logging.getLogger("varlen")
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(_ServerLog())
