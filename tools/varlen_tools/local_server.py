"""A tritonserver process on free loopback ports, with a log and a reliable end.

The log says what models do while they load, and why one did not load.
"""

import contextlib
import http.client
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from varlen_tools.run_server import MANAGEMENT, restrictions
from varlen_tools.scratch import ScratchFolder, scratch_folder

# Time, process, file and line come before each message. Newer servers quote it.
_MESSAGE = re.compile(r'^[IWE]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] "?(.*?)"?$')
_LOADING = re.compile(r"loading: (?P<model>.+):\d+")
# A line of varlen, in which each model names itself.
_VARLEN = re.compile(r"varlen: (?P<model>\S+) v\d+: (?P<text>.+)")
# A line of a process that a model has forked.
_WORKER = re.compile(r"varlen: worker \d+: (?P<text>.+)")
_LOADED = re.compile(r"successfully loaded '(?P<model>.+)'")
_FAILED = re.compile(r"failed to load '(?P<model>.+)' version \d+: (?P<reason>.+)")
_NOT_READ = re.compile(r"Poll failed for model directory '(?P<model>.+)': (?P<reason>.+)")
# What comes before the message of a Python model's error: its code and its class.
_KIND = re.compile(
    r"^(Internal|Invalid argument|Unavailable|Unsupported): (TritonModelException: )?"
)
# Details of a line, which a stage leaves out.
_DETAILS = re.compile(r"(: |; | \().*")
# What the server adds to an error of a Python model: where it was raised.
_TRACE = "\n\nAt:"


def loading_stage(log: str) -> str | None:
    """Return the latest stage of a load; None if no model has begun."""
    for line in reversed(log.splitlines()):
        if found := _WORKER.fullmatch(line):
            return _DETAILS.sub("", found["text"])
        message = _message(line)
        if message is None:
            continue
        if found := _LOADING.fullmatch(message):
            return f"loading {found['model']}"
        if found := _LOADED.fullmatch(message):
            return f"{found['model']} is loaded"
        if found := _VARLEN.fullmatch(message):
            return f"loading {found['model']}: {_DETAILS.sub('', found['text'])}"
    return None


def load_failures(log: str) -> list[str]:
    """Return why each model was not loaded, with its name first."""
    found: dict[str, str] = {}
    for message in filter(None, map(_message, log.splitlines())):
        failed = _FAILED.fullmatch(message) or _NOT_READ.fullmatch(message)
        if failed:
            found.setdefault(failed["model"], _reason(failed["reason"]))
    return [f"{model} cannot be loaded: {reason}" for model, reason in found.items()]


def _message(line: str) -> str | None:
    found = _MESSAGE.match(line)
    return found[1] if found else None


def _reason(text: str) -> str:
    r"""Return a reason as it was raised; the log has `\n` and `\"` in it."""
    text = re.sub(r"\\(.)", lambda each: {"n": "\n"}.get(each[1], each[1]), text)
    return _KIND.sub("", text).partition(_TRACE)[0].strip()


LOOPBACK = "127.0.0.1"
# The metrics port cannot be reserved: another process may take it before the server does.
START_ATTEMPTS = 3
# What the log of server 2.51 ends with if the process of a model has died inside the server's own code, with a lock in
# its hands: about one load in thousands (server#8882).
_LOST_LOCK = "boost::interprocess::lock_exception"
# What the watchdog of a model's process says once that has ended: the server waits for the end of its load for ever.
_LOST_PROCESS = "has ended: the server never answers the requests that it held"
# Below it are the ports of well-known services.
_LOWEST_PORT = 10_000
# Runs a command that gets SIGTERM once the thread that started it ends; 1 is PR_SET_PDEATHSIG. Its arguments are the id
# of that process, and the command.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def end_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that a server inside `with` ends too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class ServerError(Exception):
    """The server cannot be used; the message says why, or ends with its log."""


def is_healthy(port: int, path: str) -> bool:
    """Return whether a server on loopback answers a GET of a path with status 200."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class LocalServer:
    """One tritonserver process on free loopback ports.

    Other users of the machine, and web pages in their browsers, reach these ports too. So no client can load a model,
    which is code, or register shared memory.

    Args:
        models: a model repository, or the folders of single models, with their names.
        arguments: arguments of tritonserver, such as `["--log-verbose=1"]`.
        environment: variables added to this process's own.
        command: the tritonserver to run; by default the one of this Python's environment.
        first_port: port of HTTP; gRPC and metrics have the next two. By default all three are free ones.
        ends_with_thread: whether Linux ends the server with the thread that starts it, also if that is killed.
        is_managed: whether clients load and unload models, and register shared memory. For tests. It starts without
            models, unless `arguments` name some.

    Raises:
        ServerError: there is no tritonserver command.

    Example:
        with LocalServer("model_repository") as server:
            server.wait_ready(timeout=60)
            use(server.grpc_url)
    """

    def __init__(
        self,
        models: str | Path | Sequence[Path],
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        command: str | Path | None = None,
        first_port: int | None = None,
        ends_with_thread: bool = False,
        is_managed: bool = False,
    ) -> None:
        self._models = models
        groups = [name for name in MANAGEMENT if not (is_managed and name == "shared-memory")]
        management = {"model-control-mode": "explicit" if is_managed else "none"}
        management |= restrictions(groups)
        self._arguments = (*(f"--{name}={value}" for name, value in management.items()), *arguments)
        self._environment = dict(environment or {})
        self._command = str(command or find_command("tritonserver"))
        self._first_port = first_port
        self._ends_with_thread = ends_with_thread
        self._process: subprocess.Popen[bytes] | None = None
        # Also the server's working folder: the python backend imports from there first.
        self._folder: ScratchFolder | None = None
        self._opened, self._reserved = contextlib.ExitStack(), contextlib.ExitStack()
        self.http_port, self.grpc_port, self.metrics_port = 0, 0, 0

    @property
    def model_repository(self) -> Path:
        """The folder that it serves."""
        if isinstance(self._models, str | Path):
            return Path(self._models).resolve()
        return self._scratch.path / "models"

    @property
    def log_file(self) -> Path:
        """The file with everything that it prints."""
        return self._scratch.path / "server.log"

    @property
    def http_url(self) -> str:
        """Address of the HTTP endpoint, with its scheme."""
        return f"http://{LOOPBACK}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Address of the gRPC endpoint, with its scheme."""
        return f"grpc://{LOOPBACK}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Address of the metrics page."""
        return f"http://{LOOPBACK}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return self._started().pid

    @property
    def is_running(self) -> bool:
        """Whether the process is running, ready or not."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> "LocalServer":
        """Start the process; it loads models after this returns.

        Raises:
            ServerError: its ports were taken every time.
        """
        try:
            self._folder = self._opened.enter_context(scratch_folder("varlen-server-"))
            self._link_models()
            for _ in range(START_ATTEMPTS):
                process = self._start_once()
                # The command refuses a taken port within this time, before the server starts.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.3)
                if self.is_running or "is in use" not in self.log():
                    return self
            raise ServerError(f"no free ports in {START_ATTEMPTS} attempts\n{self.log_tail()}")
        except BaseException:
            # a signal, perhaps
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._reserved.close()
        self._opened.close()

    def _link_models(self) -> None:
        if isinstance(self._models, str | Path):
            return
        self.model_repository.mkdir()
        for model in self._models:
            # the link keeps its name: the server compares it with config.pbtxt
            self.model_repository.joinpath(model.name).symlink_to(model.absolute())

    def _start_once(self) -> subprocess.Popen[bytes]:
        self._reserved.close()
        sharing: tuple[str, ...] = ()
        if self._first_port is None:
            self.http_port = self._reserved.enter_context(reserved_port())
            self.grpc_port = self._reserved.enter_context(reserved_port())
            self.metrics_port = free_port()
            sharing = ("--reuse-http-port=true", "--reuse-grpc-port=true")
        else:
            self.http_port, self.grpc_port, self.metrics_port = range(
                self._first_port, self._first_port + 3
            )
        guard = [sys.executable, "-ISc", _GUARD, str(os.getpid())] if self._ends_with_thread else []
        command = [
            *guard,
            self._command,
            f"--model-repository={self.model_repository}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            *sharing,
            *self._arguments,
        ]
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._scratch.path,
                env=os.environ | self._environment,
                # the folder stays as long as the server and its stubs, also if this process is killed
                pass_fds=[self._scratch.lock],
                # A group of its own: Ctrl-C reaches only this process, and `stop` can end the stubs.
                start_new_session=True,
            )
        return self._process

    def is_ready(self) -> bool:
        """Return whether the server reports itself and all its models as ready."""
        return is_healthy(self.http_port, "/v2/health/ready")

    def wait_ready(
        self, timeout: float = 120.0, on_wait: Callable[[], object] | None = None
    ) -> None:
        """Return when the server is ready, and serves its metrics, which it starts last.

        A server that aborts because of a lock that it has lost, or that has lost the process of a model, is started
        again.

        Args:
            timeout: seconds.
            on_wait: function to call several times a second meanwhile.

        Raises:
            ServerError: it has ended, or is not ready after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        starts = 1
        while not (self.is_ready() and self._serves_metrics()):
            code = self._started().poll()
            lost = {None: _LOST_PROCESS, -signal.SIGABRT: _LOST_LOCK}.get(code)
            if lost is not None and lost in self.log():
                if starts == START_ATTEMPTS:
                    raise ServerError(f"in {starts} starts {lost}\n{self.log_tail()}")
                starts += 1
                # its models too; what has lost one does not end by itself
                self.stop(timeout=5)
                self._start_once()
            elif code is not None:
                # it ends by itself if a model cannot be loaded
                if failures := load_failures(self.log()):
                    raise ServerError("\n".join(failures))
                raise ServerError(f"the server ended with exit code {code}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"the server is not ready after {timeout:g} s\n{self.log_tail()}")
            if on_wait is not None:
                on_wait()
            time.sleep(0.1)

    def stop(self, timeout: float = 40.0) -> int | None:
        """End the server and return its exit code; None if it was never started.

        It gets SIGTERM, then SIGKILL after `timeout` seconds; it gives its models 30 by default.
        The rest of its process group, such as the stubs of a crashed server, is ended too.
        """
        process = self._process
        if process is None:
            return None
        try:
            if process.poll() is None:
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        finally:
            # also if a second signal ends the wait; the group outlives its leader as long as a stub is in it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def log(self) -> str:
        """Return everything the server has printed so far."""
        if self._folder is None or not self.log_file.exists():
            return ""
        return self.log_file.read_text(errors="replace")

    def log_tail(self) -> str:
        """Return the last 25 lines the server has printed, without its tables of options."""
        messages = [line for line in self.log().splitlines() if line and line[0] not in "+|"]
        return "\n".join(messages[-25:])

    def _serves_metrics(self) -> bool:
        if "--allow-metrics=false" in self._arguments:
            return True
        try:
            socket.create_connection((LOOPBACK, self.metrics_port), timeout=5).close()
        except OSError:
            return False
        return True

    @property
    def _scratch(self) -> ScratchFolder:
        if self._folder is None:
            raise ServerError("the server has not been started")
        return self._folder

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server has not been started")
        return self._process


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free TCP port on loopback for servers that set SO_REUSEPORT.

    A server binds its ports after it has loaded its models, seconds after they were chosen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((LOOPBACK, 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """Return a free TCP port on loopback that no outgoing connection of this machine takes."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    highest = max(_LOWEST_PORT + 1000, int(text.split()[0]))
    while True:
        port = random.randrange(_LOWEST_PORT, highest)
        with contextlib.suppress(OSError), socket.socket() as holder:
            holder.bind((LOOPBACK, port))
            return port


def find_command(name: str) -> str:
    """Return the path of a command: of this Python's environment, else on PATH.

    Raises:
        ServerError: there is none.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServerError(
            f"there is no {name} command; `make setup` installs it in a clone, `varlen serve` elsewhere"
        )
    return found
