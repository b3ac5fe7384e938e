"""Two replicas on loopback behind a proxy of deploy/, for tests."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ci.scripts import PROJECT
from varlen_tools.local_server import LOOPBACK, LocalServer, free_port

# Longer than anything takes on a busy machine. Only a failing test waits this long.
TIMEOUT_SECONDS = 120.0
NAMES = ("replica_1", "replica_2")


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

    def stop(self) -> None:
        """End the server with SIGTERM, if it runs."""
        if self.server is not None:
            self.server.__exit__()
            self.server = None


@contextmanager
def replicas(repository: Path) -> Iterator[list[Replica]]:
    """Run two replicas of a model repository."""
    with ExitStack() as stack:
        found = [Replica(repository, _first_of_three_ports()) for _ in NAMES]
        for replica in found:
            stack.callback(replica.stop)
            replica.start()
        yield found


class Haproxy:
    """haproxy with deploy/haproxy.cfg in front of two replicas.

    Args:
        command: program to run.
        folder: gets its configuration and its socket.
        behind: replicas in the order of the configuration.
    """

    def __init__(self, command: str, folder: Path, behind: list[Replica]) -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        self._socket = folder / "haproxy.sock"
        config = folder / "haproxy.cfg"
        config.write_text(self._configuration(behind))
        statistics = folder / "statistics.cfg"
        statistics.write_text(f"global\n    stats socket {self._socket}\n")
        # the second file adds to the global part of the first one
        self._command = [command, "-db", "-f", str(config), "-f", str(statistics)]

    def __enter__(self) -> "Haproxy":
        self._process = subprocess.Popen(self._command)
        try:
            self.wait_for("UP", *NAMES)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait_for(self, state: str, *names: str) -> None:
        """Wait until both backends see servers in a state, `UP` or `DOWN`."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while {self._states().get(name) for name in names} != {frozenset([state])}:
            assert self._process.poll() is None, "haproxy has ended"
            assert time.monotonic() < deadline, f"{names} are not {state}: {self._states()}"
            time.sleep(0.1)

    def _configuration(self, behind: list[Replica]) -> str:
        text = (PROJECT / "deploy/haproxy.cfg").read_text()
        for number, replica in enumerate(behind, 1):
            http, grpc = replica.first_port, replica.first_port + 1
            text = text.replace(
                f"replica-{number}:8001 proto h2 check port 8000",
                f"{LOOPBACK}:{grpc} proto h2 check port {http}",
            )
            text = text.replace(f"replica-{number}:8000", f"{LOOPBACK}:{http}")
        text = text.replace('127.0.0.1}:8000"', f'127.0.0.1}}:{self.http_port}"')
        return text.replace('127.0.0.1}:8001"', f'127.0.0.1}}:{self.grpc_port}"')

    def _states(self) -> dict[str, frozenset[str]]:
        """Return the states that the backends see of each server."""
        found: dict[str, frozenset[str]] = {}
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(b"show stat\n")
            lines = connection.makefile().read().removeprefix("# ").splitlines()
            columns = lines[0].split(",")
            for line in filter(None, lines[1:]):
                row = dict(zip(columns, line.split(","), strict=False))
                name, state = row["svname"], row["status"].split()[0]
                found[name] = found.get(name, frozenset()) | {state}
        return found


def _first_of_three_ports() -> int:
    """Return a free port whose two next ones are free too."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError, OverflowError), ExitStack() as stack:
            for port in range(first, first + 3):
                stack.enter_context(socket.socket()).bind((LOOPBACK, port))
            return first
