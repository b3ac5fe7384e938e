"""The stub process of a model: its log, its metrics, its memory and its end."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import numpy as np
import triton_python_backend_utils as pb_utils

from varlen.config import LogLevel
from varlen.errors import ConfigError
from varlen.processes import log_by, set_log_level, trim_heap
from varlen.server.draining import start_time
from varlen.server.shared_memory import pool_file
from varlen.telemetry.metrics import Exporter, Metric, MetricsSnapshot, Series, Stats

_log = logging.getLogger(__name__)

# Seconds between two trims of the heap, and the CPU seconds without which a trim is skipped.
_TRIM_SECONDS = 1.0
_TRIM_AFTER_SECONDS = 0.05

# Within these seconds a server loads its first models.
_START_SECONDS = 600.0

# A process whose GPU has hung has this many seconds to end by itself.
_END_SECONDS = 5
_STDERR = 2

# Watches process $2 and its parent, the server $1, by their states and start times, fields 3 and 22 of their stat: an
# id may belong to another process later. Kills the process once the server is not its parent. If the process ends
# first, the server answers nothing of what it held, and says that it is ready: this says so, and stops the server
# unless $5 is empty or 0. Removes the pool $4 of the process $3 after both.
_WATCHDOG = r"""
server=$1 pid=$2 name=$3 pool=$4 stops=$5
stat_of() {
  # the name in field 2 may hold anything but ends with the last ")"
  read -r stat 2>/dev/null <"/proc/$1/stat" || return 1
  stat=${stat##*) }
  case $stat in Z* | X*) return 1 ;; esac
  # state, parent and start time
  set -- $stat
  parent=$2 started=${20}
}
stat_of "$server" && server_started=$started
stat_of "$pid" && pid_started=$started
while stat_of "$pid" && [ "$started" = "$pid_started" ]; do
  [ "$parent" = "$server" ] || { kill -9 "$pid"; break; }
  sleep 1
done
[ -n "$pool" ] || exit 0
if stat_of "$server" && [ "$started" = "$server_started" ]; then
  echo "varlen: the process of $name has ended: the server never answers the requests that it held" >&2
  case $stops in "" | 0) ;; *) kill "$server" ;; esac
fi
while stat_of "$server" && [ "$started" = "$server_started" ]; do sleep 1; done
rm -f "$pool"
"""

# If set, and not 0, a model process that ends stops the server.
_STOP_VARIABLE = "VARLEN_STOP_WITH_MODEL"


def check_numpy() -> None:
    """Refuse a numpy whose arrays this server's python backend corrupts.

    Backends built before numpy 2 give its arrays a wrong stride: token ids are wrong, and text ends
    the process.

    Raises:
        ConfigError: the backend corrupts arrays of this numpy.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return
    # half a second, and its memory: only where it is needed
    import torch

    # an array that the python backend makes itself: one of numpy's would come back unchanged
    made = pb_utils.Tensor.from_dlpack("numbers", torch.arange(4)).as_numpy()
    if made.tolist() != [0, 1, 2, 3]:
        raise ConfigError(
            f"this server's python backend corrupts arrays of numpy {np.__version__}: install numpy<2"
        )


def close_inherited_sockets() -> None:
    """Close the sockets that this process has from the server.

    A model that is loaded while the server serves inherits its ports and the connections of its clients, so no
    client would see that the server has closed its connection. The server may have closed one since then, so what it
    has now does not tell: a socket that came through exec is inheritable, and one that Python opened is not.
    """
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        # the folder itself was one, and is closed again
        with suppress(OSError):
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
            if descriptor > _STDERR and is_socket and os.get_inheritable(descriptor):
                os.close(descriptor)


def server_caches() -> bool:
    """Return whether the server of this process has a response cache.

    The server loads the library of its cache before its models.
    """
    try:
        # paths in it may be in any encoding
        return b"libtritoncache_" in Path(f"/proc/{os.getppid()}/maps").read_bytes()
    except OSError:
        # unknown: answers out of a cache could be wrong
        return True


def server_starts() -> bool:
    """Return whether the server of this process has started a short time ago."""
    seconds = int(start_time(os.getppid()) or 0) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) < seconds + _START_SECONDS


class MemoryTrimmer:
    """A thread that returns free heap pages to the system while the process works."""

    def __init__(self) -> None:
        self._stop = Event()
        self._thread = Thread(target=self._loop, name="varlen-trimmer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        trimmed_at = 0.0
        while not self._stop.wait(_TRIM_SECONDS):
            if time.process_time() - trimmed_at > _TRIM_AFTER_SECONDS:
                trim_heap()
                trimmed_at = time.process_time()


def start_exporter(
    args: dict[str, str],
    stats: Stats,
    snapshot: Callable[[], MetricsSnapshot],
    adapters: Sequence[str],
) -> Exporter | None:
    """Return the metrics' exporter, or None when the server runs without metrics."""
    families: dict[Metric, pb_utils.MetricFamily] = {}

    def make_series(metric: Metric, labels: dict[str, str]) -> Series:
        if metric not in families:
            families[metric] = pb_utils.MetricFamily(
                name=metric.value,
                description=metric.description,
                kind=getattr(pb_utils.MetricFamily, metric.kind),
            )
        if metric.buckets is None:
            return families[metric].Metric(labels=labels)
        return families[metric].Metric(labels=labels, buckets=metric.buckets)

    labels = {
        "model": args["model_name"],
        "version": args["model_version"],
        "instance": args["model_instance_name"],
    }
    try:
        return Exporter(stats, snapshot, make_series, labels, adapters)
    except pb_utils.TritonModelException as error:
        _log.info("the server runs without metrics: %s", error)
        return None


def start_watchdog(name: str) -> subprocess.Popen[bytes]:
    """Return a process that kills this one after the server has died.

    A process, not a thread: when the server is killed under load, this process's main thread waits
    for it forever and holds the GIL, so no Python thread runs again.
    """
    arguments = (
        os.getppid(),
        os.getpid(),
        name,
        pool_file() or "",
        os.environ.get(_STOP_VARIABLE, ""),
    )
    command = ["/bin/sh", "-c", _WATCHDOG, "varlen-watchdog", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def end_process_soon() -> None:
    """Have the system end this process after some seconds, whatever it does then.

    After a hang of a GPU, the end of Python may wait for the GPU, and the server for this process.
    """
    signal.alarm(_END_SECONDS)


class _ServerLog(logging.Handler):
    """Writes log records into the server's log.

    Each line is a round trip to the server, so only lifecycle events and faults are logged by default.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"varlen: {self._model}: {self.format(record)}"
            if record.levelno >= logging.ERROR:
                pb_utils.Logger.log_error(line)
            elif record.levelno >= logging.WARNING:
                pb_utils.Logger.log_warn(line)
            else:
                pb_utils.Logger.log_info(line)
        except Exception:
            # a line that cannot be logged must not end the thread that logs it
            self.handleError(record)


def log_to_server(name: str, version: str, level: LogLevel = "info") -> None:
    """Send records of varlen and its kernels, from this level on, to the server's log.

    Args:
        name, version: name and version of the model that this process runs; each line begins with them.
        level: lowest level that is logged.
    """
    set_log_level(level)
    log_by(_ServerLog(f"{name} v{version}"))
