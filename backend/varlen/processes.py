"""Starts Python processes of this package from any program; their logs and memory.

Requests of random sizes leave gaps in the heap of every thread.
"""

import ctypes
import gc
import logging
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from varlen.errors import EngineError

_LOGGERS = ("varlen", "varlen_kernels")
# Options of prctl, on Linux: the signal when the thread ends that started this process, and its name.
_SET_PARENT_DEATH_SIGNAL = 1
_SET_NAME = 15
# mallopt's parameter: blocks from this size on are mapped, and returned to the system when freed.
_M_MMAP_THRESHOLD = -3
# By default it grows to 32 MiB, and blocks that requests of random sizes free stay in the heap of each thread.
_MAPPED_BYTES = 1 << 20

# Permissions of private mappings that nothing can write to.
_READ = ("--p", "-xp")

_C_LIBRARY = ctypes.CDLL(None)


def start_module(
    name: str,
    connection: socket.socket,
    *arguments: str,
    environment: Mapping[str, str],
    stdin: int,
    new_session: bool = True,
) -> "subprocess.Popen[bytes]":
    """Start `python -m NAME FD ARGUMENTS`; return the process.

    Args:
        stdin: standard input of the process, as of `subprocess.Popen`.
        new_session: whether it has a session of its own; if not, it leaves the process group by itself.

    Raises:
        EngineError: there is no Python command of this version.
    """
    return subprocess.Popen(
        [python_command(), "-m", name, str(connection.fileno()), *arguments],
        # a signal for the server's group is not for it: it ends with its connection
        start_new_session=new_session,
        stdin=stdin,
        pass_fds=[connection.fileno()],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def end_with_parent() -> None:
    """Have the system end this process with the thread that started it.

    A control socket tells of that end too, but not a process that waits for another one.
    """
    _C_LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def name_process(name: str) -> None:
    """Set what `ps -o comm` shows, at most 15 characters."""
    _C_LIBRARY.prctl(_SET_NAME, name.encode())


def log_by(handler: logging.Handler) -> None:
    """Send log records of varlen and its kernels to a handler, and to no other."""
    for name in _LOGGERS:
        logging.getLogger(name).propagate = False
        logging.getLogger(name).handlers[:] = [handler]


def set_log_level(level: str) -> None:
    """Set the lowest level of log records of varlen and its kernels."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(level.upper())


def freeze_objects() -> None:
    """Leave the objects that are loaded now out of later garbage collections.

    A full collection visits all of them, 270,000 with torch, while all threads wait for 0.1 s. In a forked process it
    would write to every page that holds one.
    """
    gc.collect()
    gc.freeze()


def return_large_memory() -> None:
    """Have the C library return large freed blocks to the system at once."""
    mallopt = getattr(_C_LIBRARY, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim_heap() -> None:
    """Return free pages to the system, which takes a millisecond or two."""
    trim = getattr(_C_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


def drop_library_pages() -> None:
    """Unmap pages of libraries that were only read, such as code that only loads run.

    What runs later maps its pages again, from the system's cache. A page that this process has changed stays. No other
    thread may load a library meanwhile: its data could lie where the system has shown code.
    """
    with suppress(OSError, AttributeError), Path("/proc/self/smaps").open() as lines:
        for line in lines:
            first, *rest = line.split()
            if "-" in first:
                place, permissions, is_library = first, rest[0], ".so" in rest[-1]
            elif (
                first == "Anonymous:" and rest[0] == "0" and is_library and permissions[1:] in _READ
            ):
                begin, end = (int(each, 16) for each in place.split("-"))
                pages = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
                _C_LIBRARY.madvise(*pages, mmap.MADV_DONTNEED)


def python_command() -> str:
    """Return the path of this Python's command.

    A program that embeds Python, such as the server, reports the first `python3` of PATH as its own.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    beside = Path(sys.exec_prefix, "bin", name)
    found = str(beside) if beside.exists() else shutil.which(name) or sys.executable
    if not found:
        raise EngineError(f"there is no command {name}, which worker processes need")
    return found
