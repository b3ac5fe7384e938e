"""A running `varlen serve`, in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from varlen_tools.local_server import free_port

from .serving import TIMEOUT_SECONDS


class Serving:
    """A running `varlen serve`, and what it has printed until it was ready."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, []
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("Ctrl-C"):
                return
        pytest.fail(f"it has ended: {self.lines}")

    def address(self, scheme: str) -> str:
        """Return the first address of a scheme among the printed lines."""
        return re.search(rf"{scheme}://[\d.:]+", "\n".join(self.lines))[0]  # type: ignore[index]

    @property
    def server_url(self) -> str:
        """Address of the server's HTTP endpoint."""
        return re.findall(r"grpc://\S+, (http://\S+) ", "\n".join(self.lines))[0]

    @property
    def server_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        [pid] = children.split()
        return int(pid)


@contextmanager
def serving(
    *words: str,
    cache: Path,
    environment: Mapping[str, str] | None = None,
    stderr: int = subprocess.STDOUT,
) -> Iterator[Serving]:
    """Run `varlen serve` on free ports, and end it.

    Args:
        words: its arguments.
        cache: the user's folder for caches.
        environment: further variables.
        stderr: file descriptor of its messages.
    """
    command = [sys.executable, "-m", "varlen_client.cli.main", "serve", *words]
    command += ["--port", str(free_port()), "--server-port", str(free_port())]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)} | dict(environment or {})
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    try:
        yield Serving(process)
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_SECONDS)
