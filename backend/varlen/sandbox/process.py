"""The engine's side of the sandbox: a host process, and the processes that it forks."""

import json
import logging
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from threading import Lock
from typing import Any, Literal, TypeAlias, TypeVar

from varlen.errors import EngineError, RequestError, VarlenError
from varlen.processes import start_module
from varlen.sandbox.frames import QueuedFrames
from varlen.sandbox.limits import OUT_OF_MEMORY, SandboxLimits

_log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["grammar", "template"]

_T = TypeVar("_T")

_HOST = "varlen.sandbox.host"
_MAX_MESSAGE = 1 << 16
# The host has one thread, and a process one heap.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
}
_END_SECONDS = 10.0
_ATTEMPTS = 2
_UNLOADED = "the model is being unloaded"
_HOST_ENDED = "the sandbox of grammars and templates ended; the server's log says why"
# A crash, or an allocation that failed, in a library.
_MEMORY_SIGNALS = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


class Sandbox:
    """The host of a model's processes. Any thread may call it.

    It starts with the first call, and again after it ended.
    """

    def __init__(self, setup: Callable[[], Mapping[str, object]], limits: SandboxLimits) -> None:
        """Make a sandbox that is not started.

        Args:
            setup: returns `tokens` and `template`, the arguments of `GrammarServer` and `TemplateServer`.
        """
        self._setup = setup
        self.limits = limits
        self._lock = Lock()
        self._host: _Host | None = None
        self._processes: weakref.WeakSet[SandboxProcess] = weakref.WeakSet()
        self.is_closed = False

    def start(self) -> None:
        """Start the host, and return while it still loads."""
        with self._lock:
            self._started()

    def refusal(self, kind: Kind) -> str | None:
        """Return why no process of a kind can be forked; None if one can.

        Raises:
            EngineError: the host ended.
        """
        return self._call(lambda host: host.refused.get(kind))

    def fork(self, kind: Kind) -> "SandboxProcess":
        """Return a new process.

        Raises:
            EngineError: the host ended and cannot be started again.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise EngineError(f"no process can be started: {error.strerror}") from None
        with theirs:
            try:
                return self._call(
                    lambda host: self._added(
                        SandboxProcess(self, host, ours, host.fork(kind, theirs))
                    )
                )
            except BaseException:
                ours.close()
                raise

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            for process in [*self._processes]:
                process.close()
            if self._host is not None:
                self._host.close()

    def end(self, host: "_Host", pid: int) -> int | None:
        """End a process; return its exit code, None if its host has ended."""
        with self._lock:
            if self._host is not host:
                return None
            try:
                return host.end(pid)
            except (EOFError, OSError):
                return None

    def _call(self, use: Callable[["_Host"], _T]) -> _T:
        with self._lock:
            for _ in range(_ATTEMPTS):
                host = self._started()
                try:
                    host.await_ready()
                    return use(host)
                except (EOFError, OSError):
                    _log.warning("the process that starts grammars and templates has ended")
                    host.close()
                    self._host = None
        raise EngineError(_HOST_ENDED)

    def _added(self, process: "SandboxProcess") -> "SandboxProcess":
        self._processes.add(process)
        return process

    def _started(self) -> "_Host":
        if self.is_closed:
            raise EngineError(_UNLOADED)
        if self._host is None:
            setup = {**self._setup(), "limits": asdict(self.limits)}
            try:
                self._host = _Host(setup)
            except OSError as error:
                raise EngineError(f"no process can be started: {error.strerror}") from None
        return self._host


class _Host:
    """A host process. Not for two threads at once."""

    def __init__(self, setup: Mapping[str, object]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = start_module(_HOST, theirs, environment=_ENVIRONMENT, stdin=subprocess.PIPE)
        self._process = process
        # also without a call of `close`, the process ends and is waited for
        self._end = weakref.finalize(self, _end_host, self._control, process)
        assert process.stdin is not None
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(setup).encode())
        except OSError:
            _log.warning("the process that starts grammars and templates could not read its setup")
        self.refused: dict[str, str] = {}
        self._is_ready = False

    def await_ready(self) -> None:
        if not self._is_ready:
            self.refused = self._receive()["refused"]
            self._is_ready = True

    def fork(self, kind: Kind, connection: socket.socket) -> int:
        socket.send_fds(self._control, [_encoded({"fork": kind})], [connection.fileno()])
        answer = self._receive()
        if "error" in answer:
            raise EngineError(answer["error"])
        pid: int = answer["pid"]
        return pid

    def end(self, pid: int) -> int | None:
        self._control.send(_encoded({"end": pid}))
        code: int | None = self._receive()["code"]
        return code

    def close(self) -> None:
        self._end()

    def _receive(self) -> dict[str, Any]:
        if not (data := self._control.recv(_MAX_MESSAGE)):
            raise EOFError
        message: dict[str, Any] = json.loads(data)
        return message


class SandboxProcess(QueuedFrames):
    """A process of a sandbox. Not for two threads at once."""

    def __init__(self, sandbox: Sandbox, host: _Host, connection: socket.socket, pid: int) -> None:
        super().__init__(connection)
        self._sandbox = sandbox
        self._host = host
        self._pid = pid
        self._has_ended = False

    def end(self) -> int | None:
        """End the process; return its exit code, None if it is not known."""
        self.close()
        if self._has_ended:
            return None
        self._has_ended = True
        return self._sandbox.end(self._host, self._pid)

    def failure(self, what: str) -> VarlenError:
        """Return the error of a process that has ended by itself.

        Args:
            what: start of the message: what was refused.
        """
        limits, code = self._sandbox.limits, self.end()
        if code == -signal.SIGPROF:
            return RequestError(f"{what} more than {limits.seconds:g} s of processor time")
        if code == OUT_OF_MEMORY or code in _MEMORY_SIGNALS:
            return RequestError(f"{what} more than {limits.num_bytes} bytes of memory")
        if self._sandbox.is_closed:
            return EngineError(_UNLOADED)
        _log.error("a process of the sandbox ended with code %s", code)
        return EngineError(_HOST_ENDED)


def _encoded(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode()


def _end_host(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
