"""Starts the processes of models, perhaps before the engine's process has what it sends them.

A process imports torch first, which takes longer than all that the engine's process does until its model loads.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from varlen.config import Device
from varlen.processes import start_module
from varlen.tasks import ITERATIVE_TASKS, Task

# Modules that the processes run: the host of workers, and the steps of a model that generates.
HOST = "varlen.execution.workers.host"
STEPS = "varlen.execution.workers.steps"
# The same of a model that several processes hold: the leader of one that runs batches, and all that do not lead.
BATCHES = "varlen.execution.workers.batches"
RANK = "varlen.execution.workers.group.rank"
# Where a driver of NVIDIA shows its GPUs, on Linux and on Windows' Linux.
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
# Nothing in it may start threads before it forks, since they would not be forked: neither numpy nor the tokenizer.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A process that waits for its model.

    Attributes:
        process: the process.
        control: the engine's end of its control socket.
    """

    process: subprocess.Popen[bytes]
    control: socket.socket


_early: dict[str, StartedProcess] = {}


def excludes_gpu(device: Device) -> bool:
    """Return whether a model surely runs on the CPU; imports no torch."""
    has_gpu_files = any(path.exists() for path in _GPU_FILES)
    return device == "cpu" or (device == "auto" and not has_gpu_files)


@contextmanager
def started_early(task: Task) -> Iterator[None]:
    """Start the process of a CPU model that is loaded meanwhile.

    Args:
        task: task of the model.

    Raises:
        EngineError: see `start_module`.
    """
    module = STEPS if task in ITERATIVE_TASKS else HOST
    _early[module] = _start(module)
    try:
        yield
    finally:
        unused = _early.pop(module, None)
        if unused is not None:
            unused.control.close()
            unused.process.kill()
            unused.process.wait()


def started_process(module: str) -> StartedProcess:
    """Return the process that was started early for this module, or start one.

    Raises:
        EngineError: see `start_module`.
    """
    return _early.pop(module, None) or _start(module)


def _start(module: str) -> StartedProcess:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = start_module(
            module,
            theirs,
            _ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            # Linux schedules a session as one: in another one, each step would wait twice for the time of others
            new_session=module not in (STEPS, RANK),
        )
    return StartedProcess(process, control)
