"""Worker processes of the real server: what dies there costs no request."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.closeness import assert_close

from .clients import integers
from .serving import (
    add_model,
    is_running,
    load,
    metrics,
    stub_of,
    unload,
    wait_until,
    worker_processes,
)

# some tenths of a second of work, in batches of different lengths
LENGTHS = (500, 40, 333, 7) * 8


@pytest.fixture
def model(server, repository, checkpoints, request):
    """A model with two workers."""
    # a name of its own for each test: an unload ends later than it returns, and the server may go on counting
    name = re.sub(r"\W", "_", request.node.name)
    add_model(repository, name, checkpoints["slow"], threads="2")
    assert load(server, name) is None
    yield name
    unload(server, name)


@pytest.mark.parametrize(
    "kills_host",
    [
        pytest.param(False, id="workers"),
        pytest.param(True, id="host_and_workers", marks=pytest.mark.full),
    ],
)
def test_requests_of_killed_workers_are_answered_by_others(
    model, server, grpc_client, roundings, *, kills_host
):
    requests = {n: {"input_ids": integers(np.full((1, n), 7))} for n in LENGTHS}
    expected = {n: grpc_client.infer(model, request) for n, request in requests.items()}
    stub = stub_of(server, model)
    host, workers = worker_processes(stub)
    assert len(workers) == 2
    # torch costs a load a second, and memory
    for pid in (stub, host, *workers):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()

    held = [grpc_client.start(model, requests[n]) for n in LENGTHS]
    for pid in [host, *workers] if kills_host else workers:
        os.kill(pid, signal.SIGKILL)

    for length, answer in zip(LENGTHS, held, strict=True):
        assert_close(answer.result(), expected[length], roundings=roundings["slow"])
    assert stub_of(server, model) == stub

    def both_are_counted() -> bool:
        # a worker is found to have ended when it gets its next batch
        for answer in [grpc_client.start(model, requests[500]) for _ in range(4)]:
            answer.result()
        return metrics(server, model)["varlen_worker_restarts_total"] == 2

    wait_until(both_are_counted, "both are counted")
    now_host, now_workers = worker_processes(stub)
    assert (now_host == host) != kills_host
    assert not set(workers) & set(now_workers)


@pytest.mark.full
def test_unloading_ends_host_and_workers(model, server):
    host, workers = worker_processes(stub_of(server, model))

    unload(server, model)

    wait_until(lambda: not any(map(is_running, [host, *workers])), "all processes have ended")
