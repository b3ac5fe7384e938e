"""deploy/haproxy.cfg with the real proxy: restarts and a kill of a replica lose no request.

Skipped where there is no haproxy; Debian has it in the package of this name.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.server.serving import add_model
from varlen_client import Client
from varlen_client.transport.retry import RetryPolicy

from .proxies import NAMES, Haproxy, Replica, replicas

HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")

TEXTS = ["a short text", "a text that is quite a bit longer than the short one " * 8]
SENDERS = 4


@pytest.fixture
def behind(tmp_path: Path, minilm: Path) -> Iterator[list[Replica]]:
    """Two replicas of the model that the configuration names."""
    add_model(tmp_path / "models", "minilm", minilm)
    with replicas(tmp_path / "models") as found:
        yield found


@pytest.fixture
def proxy(tmp_path: Path, behind: list[Replica]) -> Iterator[Haproxy]:
    """The proxy in front of them, which sees both."""
    assert HAPROXY is not None
    with Haproxy(HAPROXY, tmp_path, behind) as found:
        yield found


class Load:
    """Threads that send requests through the proxy until the context ends, without retries of the client.

    Attributes:
        answered: number of requests that were answered.
        failures: errors of the others.
    """

    def __init__(self, proxy: Haproxy) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._ends = threading.Event()
        urls = (f"grpc://127.0.0.1:{proxy.grpc_port}", f"http://127.0.0.1:{proxy.http_port}")
        self._threads = [
            threading.Thread(target=self._send, args=(url,)) for url in urls for _ in range(SENDERS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self, number: int) -> None:
        """Wait until this number of further requests was answered."""
        least = self.answered + number
        while self.answered < least and not self.failures:
            self._ends.wait(0.05)

    def _send(self, url: str) -> None:
        with Client(url, "minilm", retry=RetryPolicy(max_retries=0)) as client:
            while not self._ends.is_set():
                try:
                    vectors = client.embed(TEXTS)
                except Exception as error:
                    with self._lock:
                        self.failures.append(f"{url}: {error!r}")
                else:
                    assert np.isfinite(vectors).all()
                    with self._lock:
                        self.answered += 1


def drain(replica: Replica) -> None:
    """Run `varlen drain` for a replica, with the seconds that the configuration names."""
    assert replica.server is not None
    command = [
        *(sys.executable, "-m", "varlen_tools.drain", f"--server-pid={replica.server.pid}"),
        *(f"--metrics-url={replica.server.metrics_url}", "--timeout=100"),
    ]
    subprocess.run(command, check=True)


def test_a_rolling_restart_loses_nothing(behind: list[Replica], proxy: Haproxy) -> None:
    with Load(proxy) as load:
        for replica, name in zip(behind, NAMES, strict=True):
            load.wait_for_more(50)
            drain(replica)
            proxy.wait_for("DOWN", name)
            replica.stop()
            replica.start()
            proxy.wait_for("UP", name)
        load.wait_for_more(50)

    assert load.failures == []


def test_a_killed_server_loses_nothing(behind: list[Replica], proxy: Haproxy) -> None:
    with Load(proxy) as load:
        load.wait_for_more(50)
        killed = behind[0].server
        assert killed is not None
        os.kill(killed.pid, signal.SIGKILL)
        proxy.wait_for("DOWN", NAMES[0])
        load.wait_for_more(50)

    assert load.failures == []
