"""`varlen drain`: a server is ended, and no request that it took is lost."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from varlen.server.draining import marker_of, write_state
from varlen_tools.local_server import LocalServer

from .serving import add_model, http_call, metrics, start_drain, wait_until

ROW = {"name": "input_ids", "datatype": "INT64", "shape": [1, 4], "data": [2, 3, 4, 5]}
SENDERS = 4


@pytest.fixture
def server(tmp_path, checkpoints):
    """A server with one encoder."""
    add_model(tmp_path, "slow", checkpoints["slow"])
    with LocalServer(tmp_path) as server:
        server.wait_ready()
        yield server


def infer(server: LocalServer, **parameters: Any) -> tuple[int, str]:
    """Return the status and the error of a small request."""
    body = {"inputs": [ROW], "parameters": parameters}
    status, answer = http_call(server, "POST", "/v2/models/slow/infer", body)
    return status, answer.get("error", "")


def test_a_drained_server_ends_without_losing_a_request(server):
    outcomes: Counter[tuple[int, str]] = Counter()
    probes: list[tuple[int, str]] = []
    ends = Event()

    def send() -> None:
        # a pause, since other tests need the cores meanwhile
        while not ends.wait(0.02):
            outcomes[infer(server)] += 1

    with ThreadPoolExecutor() as pool:
        try:
            senders = [pool.submit(send) for _ in range(SENDERS)]
            wait_until(lambda: sum(outcomes.values()) > SENDERS, "requests are answered")
            assert infer(server, probe=True)[0] == 200

            drain = start_drain(server, "--seen-seconds=1")

            def is_probe_refused() -> bool:
                probes.append(infer(server, probe=True))
                return probes[-1][0] == 503

            wait_until(is_probe_refused, "the probe is refused")
            output, error = drain.communicate()
        finally:
            ends.set()
        for sender in senders:
            sender.result()

    assert (drain.returncode, error) == (0, "")
    assert "drained in" in output
    shutting_down = (503, "this replica is shutting down; send the request to another one")
    assert set(outcomes) == {(200, ""), shutting_down}
    assert {status for status, _ in probes} <= {200, 503}
    page = metrics(server, "slow")
    assert page["varlen_open_requests"] == 0
    assert page["varlen_draining"] == 2
    marker = marker_of(server.pid)
    assert marker is not None
    write_state(marker, "serving")
    assert server.stop() == 0


@pytest.mark.full
def test_a_drain_can_be_undone(server):
    drain = start_drain(server, "--seen-seconds=0")
    assert drain.communicate()[1] == ""
    assert infer(server)[0] == 503

    undo = start_drain(server, "--undo")

    assert undo.communicate() == ("", "")
    wait_until(lambda: infer(server)[0] == 200, "requests are answered again")


@pytest.mark.full
def test_a_server_that_is_not_there_is_named(server):
    drain = start_drain(server, "--metrics-url=http://127.0.0.1:9/metrics")

    _, error = drain.communicate()

    assert drain.returncode == 1
    assert "there are no metrics at http://127.0.0.1:9/metrics" in error
    assert infer(server, probe=True)[0] == 200
