"""A process of a model, for the process that starts it.

That is the engine's process, or the leader of ranks or stages. On a server, the process that completes a configuration
starts it, and the engine's takes it over: it imports torch in between, for more than a second.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from varlen import errors
from varlen.config import Device, EngineConfig
from varlen.costs.store import digest_of, find_cache
from varlen.errors import EngineError, ModelFaultError, VarlenError
from varlen.execution.model_info import ModelInfo
from varlen.execution.thread_executor import CoreShare
from varlen.execution.workers.messages import (
    CHILD,
    MAX_MESSAGE,
    STORED,
    STORED_PREFIX,
    WAITING,
    peer_of,
    receive_control,
    send_control,
)
from varlen.models.checkpoint_folder import Checkpoint
from varlen.processes import start_module

_log = logging.getLogger(__name__)

# Where a driver of NVIDIA shows its GPUs, on Linux and on Windows' Linux.
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
# Nothing in it may start threads before it forks, since they would not be forked: neither numpy nor the tokenizer.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_start = partial(start_module, CHILD, environment=_ENVIRONMENT, stdin=subprocess.DEVNULL)
# Sockets of whole messages.
_MESSAGES = socket.AF_UNIX, socket.SOCK_SEQPACKET
# Seconds for a process to finish a batch, and then to end.
_END_SECONDS = 10.0
# Seconds that a stage waits beyond the time of the stages before it: the first that waits in vain reports.
_LATER_SECONDS = 0.5
# Seconds after each attempt to load the model again.
_PAUSES = (1.0, 5.0, 0.0)
ENDED = "the process that loads the model ended; the server's log says why"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process is to load.

    Attributes:
        fields: the message that says it.
        descriptors: file descriptors that came with the message.
    """

    control: socket.socket
    fields: dict[str, Any]
    config: EngineConfig
    descriptors: Sequence[int]

    def open_checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self.fields["folder"], **self.config.of_checkpoint)

    @property
    def generates(self) -> bool:
        return bool(self.fields["generates"])

    @property
    def number(self) -> int | None:
        """Its number among the ranks or stages; None if it leads."""
        return self.fields.get("number")

    @property
    def gpu(self) -> int:
        return int(self.fields["gpu"]) + (self.number or 0)


class ControlledProcess:
    """A process of a model and its control socket. Not for two threads.

    The socket carries whole messages, log lines and errors among them.
    """

    def __init__(self, *arguments: str, new_session: bool, folder: Path | None = None) -> None:
        """Start the process, or take over one that waits for this folder.

        Args:
            arguments: `MEMBER` if the process that starts it leads it, and it ends with that one; `STORED` if it
                imports torch only if the stored model does not fit.
            new_session: whether it has a session of its own. Linux schedules a session as one: in another one, each
                step of generation would wait twice for the time of others.

        Raises:
            EngineError: see `start_module`.
        """
        self._process: subprocess.Popen[bytes] | None = None
        if folder is not None:
            self._control = socket.socket(*_MESSAGES)
            with suppress(OSError):
                self._control.connect(_address(folder))
                self.pid, user = peer_of(self._control)
                if user == os.getuid():
                    return
            self._control.close()
        self._control, theirs = socket.socketpair(*_MESSAGES)
        with theirs:
            self._process = _start(theirs, *arguments, new_session=new_session)
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, which only the parent of a process gets."""
        return None if self._process is None else self._process.poll()

    def fileno(self) -> int:
        return self._control.fileno()

    def send(self, message: dict[str, object], descriptors: Sequence[int] = ()) -> None:
        """Send a message, perhaps with file descriptors.

        Raises:
            OSError: the process has ended.
        """
        send_control(self._control, message, descriptors)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next message that is not a log line, and its file descriptors.

        Raises:
            EOFError, OSError: the process has ended.
            VarlenError: the error that it reports.
        """
        while (received := self.receive_one()) is None:
            pass
        return received

    def receive_one(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its file descriptors; None if it is a log line.

        Raises:
            EOFError, OSError, VarlenError: see `receive`.
        """
        message, descriptors = receive_control(self._control)
        if "log" in message:
            _log.log(*message["log"])
            return None
        if "error" in message:
            name, text = message["error"]
            raise getattr(errors, name)(text)
        return message, descriptors

    def last_words(self) -> str:
        """Return the error that a process has reported before it ended; empty without one."""
        try:
            self._control.setblocking(False)
            self.receive()
        except VarlenError as error:
            return str(error)
        except (EOFError, OSError):
            pass
        return ""

    def end(self, seconds: float = _END_SECONDS) -> None:
        """End the process, whose connections are closed; kill it after some seconds."""
        # as it ends, its end is closed
        with suppress(OSError), self._control:
            self._control.shutdown(socket.SHUT_WR)
            self._control.settimeout(seconds)
            try:
                while self._control.recv(MAX_MESSAGE):
                    pass
            except (TimeoutError, BlockingIOError):
                os.kill(self.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()


def start_early(folder: Path, config: EngineConfig, *, generates: bool) -> None:
    """Start a process that waits for the engine of a model on the CPU.

    This one ends, and process 1 has to ask for its exit code, which a server does not.
    """
    if not excludes_gpu(config.device) or config.num_processes > 1:
        # a leader that is stopped ends with its parent
        return
    arguments = _arguments(_stored_path(folder, config, generates=generates))
    with socket.socket(*_MESSAGES) as address, suppress(OSError, EngineError):
        address.bind(_address(folder))
        _start(address, WAITING, *arguments, new_session=not generates)


def _arguments(stored: str) -> list[str]:
    return [STORED] if os.access(stored, os.R_OK) else []


def _address(folder: Path) -> str:
    """Return where the process of a model of this server waits."""
    processes = Path("/proc/self/ns/pid").readlink()
    return "\0varlen-" + digest_of({"model": f"{folder} {os.getppid()} {processes}"})


def excludes_gpu(device: Device) -> bool:
    """Return whether a model surely runs on the CPU; imports no torch."""
    has_gpu_files = any(path.exists() for path in _GPU_FILES)
    return device == "cpu" or (device == "auto" and not has_gpu_files)


def _stored_path(folder: Path, config: EngineConfig, *, generates: bool) -> str:
    """Return the file of a compiled model; empty for models that are not stored."""
    cache = None if generates or config.num_processes > 1 else find_cache(config.cache_folder)
    if cache is None:
        return ""
    key = {"folder": str(folder), "config": str(replace(config, device="cpu"))}
    return str(cache / f"{STORED_PREFIX}{digest_of(key)[:32]}")


class Connected(NamedTuple):
    """A worker: its connection for work, its process id, and its shared memory."""

    connection: Connection
    pid: int
    descriptors: Sequence[int] = ()


class RestartLimit:
    """Allows few restarts in any period."""

    def __init__(
        self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._times: deque[float] = deque()

    def __str__(self) -> str:
        return f"{self._most} others within {self._seconds:.0f} s"

    def allow(self) -> bool:
        """Count a restart and return True, unless there were too many."""
        now = self._clock()
        while self._times and self._times[0] <= now - self._seconds:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True


class ModelProcess:
    """The process that loads a model.

    It forks its workers, or is its own only one. A process that has ended is started again, with the same checkpoint.
    Any thread may call `connect`.

    Attributes:
        share: tells workers whether their batch runs alone.
        restarts: limit of starts after the first; None is no limit.
        is_lost: whether the process has ended and no other one has started.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        generates: bool,
        restarts: RestartLimit | None = None,
        gpu: int = 0,
    ) -> None:
        """Start the process and load the model.

        Args:
            config: the settings; the device is "cpu", or "cuda" of ranks.
            gpu: number of the GPU of rank 0.

        Raises:
            CheckpointError, ConfigError: the checkpoint or a setting is refused.
            EngineError: the process failed.
        """
        self.config = config
        self.restarts = restarts
        self.is_lost = False
        self._lock = Lock()
        self._folder = folder
        self._files = _files(folder)
        self._generates, self._gpu = generates, gpu
        self.info = self._load()
        # after the load, which may be refused
        self.share = CoreShare()

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self, ended: int | None = None, reason: str = "") -> Connected:
        """Return a new worker.

        Args:
            ended: process id of the worker that it replaces.

        Raises:
            ModelFaultError: the process has ended too often.
            EngineError: the process ended and cannot be started again.
        """
        with self._lock:
            with suppress(EOFError, OSError):
                if ended != self.pid:
                    return self._connect(ended)
            self._load_again(self._end_of_process(reason))
            try:
                worker = self._connect()
            except (EOFError, OSError):
                self._process.end()
                raise EngineError(ENDED) from None
            self.is_lost = False
            return worker

    def close(self) -> None:
        """End the process, once the workers' connections are closed."""
        with self._lock:
            self._process.end()
            self.share.close()

    def _connect(self, ended: int | None = None) -> Connected:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process.send({"ended": ended}, [theirs.fileno(), self.share.file])
            answer, descriptors = self._process.receive()
            pid, code = answer["pid"], answer["code"]
            if code is not None:
                message = "worker process %d ended with code %s; %d replaces it"
                _log.warning(message, ended, code, pid)
            return Connected(Connection(ours.detach()), pid, descriptors)

    def _end_of_process(self, reason: str) -> str:
        """End the process; return why it has ended."""
        self.is_lost = True
        # of a model that several processes hold, it is the end of one of them
        reason = self._process.last_words() or reason
        self._process.end()
        return reason or f"worker process {self.pid} ended with code {self._process.code}"

    def _load(self) -> ModelInfo:
        generates = self._generates
        stored = ""
        if self.config.device == "cpu":
            stored = _stored_path(self._folder, self.config, generates=generates)
        self._process = ControlledProcess(
            *_arguments(stored), new_session=not generates, folder=self._folder
        )
        setup = {
            "folder": str(self._folder),
            "config": asdict(self.config),
            "generates": generates,
            "stored": stored,
            "gpu": self._gpu,
            "log_level": self.config.log_level.upper(),
        }
        try:
            self._process.send(setup)
            message, _ = self._process.receive()
            facts = message["model"]
            # JSON has no tuples
            return ModelInfo(
                **facts
                | {
                    "outputs": tuple(facts["outputs"]),
                    "adapters": tuple((name, reason) for name, reason in facts["adapters"]),
                }
            )
        except (EOFError, OSError):
            self._process.end()
            raise EngineError(ENDED) from None
        except BaseException:
            self._process.end()
            raise

    def _load_again(self, reason: str) -> None:
        """Load the model that was loaded before, and no other.

        Raises:
            ModelFaultError: it was loaded again too often.
            EngineError: it cannot be loaded, or has changed.
        """
        if self.restarts is not None and not self.restarts.allow():
            raise ModelFaultError(f"{reason}, after {self.restarts}")
        _log.warning("%s; the model is loaded again", reason)
        for pause in _PAUSES:
            if _files(self._folder) != self._files:
                raise EngineError("the files of the checkpoint have changed; reload the model")
            try:
                info = self._load()
            except VarlenError as error:
                _log.error("the model could not be loaded again: %s", error)
                time.sleep(pause)
                continue
            if info.limits == self.info.limits:
                _log.warning("the model is loaded again, in process %d", self.pid)
                return
            self._process.end()
            raise EngineError("the cores or the memory have changed; reload the model")
        raise EngineError(ENDED)


def longest_wait(config: EngineConfig, before: int) -> float:
    """Return the longest wait of a stage for a batch, in seconds.

    All stages get a batch at once, so it waits for all `before` stages before it.
    """
    return before * (config.rank_timeout_seconds + _LATER_SECONDS)


def _files(folder: Path) -> list[tuple[str, int, int]]:
    found = sorted(path for path in folder.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]
