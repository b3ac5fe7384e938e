"""Two replicas on loopback behind a proxy of deploy/, and how their processes are killed.

A supervisor restarts a server that has ended, and one whose probes fail. A worker process is replaced by its model.
"""

import contextlib
import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from varlen_bench.harness.resident import children_of, hosts_of, model_process
from varlen_tools.local_server import LOOPBACK, LocalServer, ServerError, free_port

CONFIGURATIONS = Path(__file__).resolve().parents[3] / "deploy"

# Longer than anything takes on a busy machine. Only a failure waits this long.
TIMEOUT_SECONDS = 120.0


@dataclass(slots=True)
class Replica:
    """A server on fixed ports, which can be started again."""

    repository: Path
    first_port: int
    server: LocalServer | None = None

    def start(self) -> None:
        """Start the server, and wait until it is ready."""
        self.server = LocalServer(self.repository, first_port=self.first_port)
        self.server.__enter__()
        self.server.wait_ready()

    @property
    def running(self) -> LocalServer:
        """The server, which was started."""
        assert self.server is not None
        return self.server

    def kill(self) -> None:
        """End the server with SIGKILL."""
        os.kill(self.running.pid, signal.SIGKILL)

    def drain(self) -> None:
        """Take the server out of service, as before its end."""
        command = [sys.executable, "-m", "varlen_tools.drain"]
        command += [f"--server-pid={self.running.pid}", f"--metrics-url={self.running.metrics_url}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        """End the server with SIGTERM, if it runs."""
        if self.server is not None:
            self.server.__exit__()
            self.server = None


def find_proxy(name: str) -> str | None:
    """Return the path of a proxy's program, or None if it is not installed."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def replicas(repository: Path) -> Iterator[list[Replica]]:
    """Run two replicas of a model repository."""
    with ExitStack() as stack:
        found = [Replica(repository, _first_of_three_ports()) for _ in range(2)]
        for replica in found:
            stack.callback(replica.stop)
            replica.start()
        yield found


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of process that is killed."""

    # kills the process of a model, by its name
    strike: Callable[[Replica, str], None]
    # seconds until the server is replaced; None if the replica recovers by itself
    repair_after: float | None = None


def _kill_server(replica: Replica, model: str) -> None:
    del model
    replica.kill()


def _kill_stub(replica: Replica, model: str) -> None:
    os.kill(model_process(replica.running.pid, model), signal.SIGKILL)


def _kill_workers(replica: Replica, model: str) -> None:
    for worker in worker_processes(model_process(replica.running.pid, model)):
        os.kill(worker, signal.SIGKILL)


# By the name of the event in rows.
FAULTS: dict[str, Fault] = {
    "server": Fault(_kill_server, repair_after=2.0),
    "worker": Fault(_kill_workers),
    # two probes, as deploy/ has them, and a few seconds more, in which calls in flight have to fail
    "stub": Fault(_kill_stub, repair_after=8.0),
}


def worker_processes(stub: int) -> list[int]:
    """Return the ids of the worker processes of a model's stub."""
    return [worker for host in hosts_of(stub) for worker in children_of(host)]


class Proxy(ABC):
    """A proxy with its configuration of deploy/, in front of two replicas.

    Args:
        behind: replicas in the order of the configuration.
    """

    def __init__(self, command: str, folder: Path, behind: list[Replica]) -> None:
        self._command = command
        self._folder = folder
        self._behind = behind
        self.http_url = self.grpc_url = ""

    @abstractmethod
    def _arguments(self) -> list[str]:
        """Write the files, set the addresses, and return the arguments of the program."""

    @abstractmethod
    def _states(self) -> dict[int, set[bool]]:
        """Return which states its parts see of each replica: True is up."""

    def __enter__(self) -> "Proxy":
        self._process = subprocess.Popen([self._command, *self._arguments()])
        try:
            self.wait_for(True, *range(len(self._behind)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait_for(self, is_up: bool, *numbers: int) -> None:
        """Wait until all parts of the proxy see replicas as up, or as down."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(self._states().get(number) != {is_up} for number in numbers):
            if self._process.poll() is not None:
                raise ServerError(f"{self._command} has ended")
            if time.monotonic() > deadline:
                raise ServerError(f"{numbers}: {is_up} expected in {self._states()}")
            time.sleep(0.1)


class Haproxy(Proxy):
    """haproxy with deploy/haproxy.cfg."""

    def _arguments(self) -> list[str]:
        http_port, grpc_port = free_port(), free_port()
        self.http_url, self.grpc_url = (
            f"http://{LOOPBACK}:{http_port}",
            f"grpc://{LOOPBACK}:{grpc_port}",
        )
        self._socket = self._folder / "haproxy.sock"
        config = (CONFIGURATIONS / "haproxy.cfg").read_text()
        for number, replica in enumerate(self._behind, 1):
            http, grpc = replica.first_port, replica.first_port + 1
            config = config.replace(
                f"replica-{number}:8001 proto h2 check port 8000",
                f"{LOOPBACK}:{grpc} proto h2 check port {http}",
            )
            config = config.replace(f"replica-{number}:8000", f"{LOOPBACK}:{http}")
        config = config.replace('127.0.0.1}:8000"', f'127.0.0.1}}:{http_port}"')
        config = config.replace('127.0.0.1}:8001"', f'127.0.0.1}}:{grpc_port}"')
        # a second file adds to the global part of the first one
        files = {
            "haproxy.cfg": config,
            "statistics.cfg": f"global\n    stats socket {self._socket}\n",
        }
        for name, text in files.items():
            (self._folder / name).write_text(text)
        return ["-db", *(word for name in files for word in ("-f", str(self._folder / name)))]

    def _states(self) -> dict[int, set[bool]]:
        found: dict[int, set[bool]] = {}
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(b"show stat\n")
            with connection.makefile() as answer:
                rows = list(csv.DictReader(answer.read().removeprefix("# ").splitlines()))
            for row in rows:
                if row["svname"].startswith("replica_"):
                    number = int(row["svname"].removeprefix("replica_")) - 1
                    # "DOWN 1/2" is on its way up
                    found.setdefault(number, set()).add(row["status"].startswith("UP"))
        return found


class Envoy(Proxy):
    """Envoy with deploy/envoy.yaml."""

    def _arguments(self) -> list[str]:
        port, self._admin_port = free_port(), free_port()
        self.http_url, self.grpc_url = f"http://{LOOPBACK}:{port}", f"grpc://{LOOPBACK}:{port}"
        config = (CONFIGURATIONS / "envoy.yaml").read_text()
        config = config.replace("127.0.0.1, port_value: 8000", f"127.0.0.1, port_value: {port}")
        for number, replica in enumerate(self._behind, 1):
            http, grpc = replica.first_port, replica.first_port + 1
            address = f"replica-{number}, port_value: "
            before, probed, rest = config.partition(f"{address}8001}}}}")
            rest = rest.replace("{port_value: 8000}", f"{{port_value: {http}}}", 1)
            config = before + probed + rest
            config = config.replace(f"{address}8001", f"{LOOPBACK}, port_value: {grpc}")
            config = config.replace(f"{address}8000", f"{LOOPBACK}, port_value: {http}")
        file = self._folder / "envoy.yaml"
        file.write_text(config)
        socket_address = f"{{address: {LOOPBACK}, port_value: {self._admin_port}}}"
        admin = f"admin: {{address: {{socket_address: {socket_address}}}}}"
        return [
            "-c",
            str(file),
            "--config-yaml",
            admin,
            "--log-level",
            "error",
            "--disable-hot-restart",
        ]

    def _states(self) -> dict[int, set[bool]]:
        url = f"http://{LOOPBACK}:{self._admin_port}/clusters?format=json"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as page:
                clusters = json.load(page).get("cluster_statuses", [])
        except OSError:
            return {}
        found: dict[int, set[bool]] = {}
        for host in (host for cluster in clusters for host in cluster.get("host_statuses", [])):
            port = host["address"]["socket_address"]["port_value"]
            number = next(
                i for i, each in enumerate(self._behind) if 0 <= port - each.first_port < 2
            )
            health = host["health_status"]
            failed = health.get("failed_active_health_check", False)
            pending = health.get("pending_active_hc", False)
            found.setdefault(number, set()).add(not failed and not pending)
        return found


PROXIES: dict[str, type[Proxy]] = {"haproxy": Haproxy, "envoy": Envoy}


def _first_of_three_ports() -> int:
    """Return a free port whose two next ones are free too."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError, OverflowError), ExitStack() as stack:
            for port in range(first, first + 3):
                stack.enter_context(socket.socket()).bind((LOOPBACK, port))
            return first
