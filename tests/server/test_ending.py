"""Stopping the server with a full queue, and killed processes: no client waits forever."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close
from varlen_client import Client as VarlenClient
from varlen_tools.local_server import LocalServer

from .clients import AnswerError, Array, Client, GrpcClient, HttpClient, integers
from .serving import (
    TIMEOUT_SECONDS,
    add_model,
    http_call,
    is_running,
    load,
    metrics,
    model_state,
    remove_shared_memory,
    running_server,
    shared_memory,
    stub_of,
    stubs,
    unload,
    wait_until,
    watchdogs,
    worker_processes,
)

pytestmark = pytest.mark.full

# 32,000 tokens: about a second of work.
BULK = {"input_ids": integers(np.ones((64, 500)))}
SMALL = {"input_ids": integers([[2, 3]])}

StartServer = Callable[..., tuple[LocalServer, list[Client]]]


@pytest.fixture
def start_server(tmp_path, checkpoints):
    """Return a function that starts a server and a client of each protocol."""
    add_model(tmp_path, "slow", checkpoints["slow"])
    with ExitStack() as stack:

        def start(*arguments: str, is_managed: bool = False) -> tuple[LocalServer, list[Client]]:
            server = LocalServer(tmp_path, arguments=arguments, is_managed=is_managed)
            stack.enter_context(server)
            # runs before the stack's other exits, which may hang on a server that no longer answers
            stack.callback(server.stop, timeout=5)
            server.wait_ready()
            stack.callback(remove_shared_memory, shared_memory(server.pid))
            return server, [
                stack.enter_context(GrpcClient(server)),
                stack.enter_context(HttpClient(server)),
            ]

        yield start


def test_sigterm_with_a_full_queue_answers_all_that_it_holds(start_server, roundings):
    server, clients = start_server("--exit-timeout-secs=60")
    expected = clients[0].infer("slow", BULK)
    sent = _fill_the_queue(server, clients)

    os.kill(server.pid, signal.SIGTERM)

    wait_until(lambda: not server.is_running, "the server has ended")
    assert _answered(sent, expected, roundings["slow"]), (
        "a server with time enough answers what it holds"
    )
    wait_until(lambda: not stubs(server.pid), "no process of the server is left")
    assert server.stop() == 0


def test_sigterm_with_too_little_time_leaves_no_client_waiting_and_no_process(
    start_server, roundings
):
    server, clients = start_server("--exit-timeout-secs=2")
    expected = clients[0].infer("slow", BULK)
    sent = _fill_the_queue(server, clients)

    os.kill(server.pid, signal.SIGTERM)

    # This version exits with 1 when it gives up on its models, crashes with a corrupted heap, or
    # hangs in the handler of that crash: then its operator kills it.
    deadline = time.monotonic() + 15
    while server.is_running and time.monotonic() < deadline:
        time.sleep(0.1)
    if server.is_running:
        os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_running, "the server has ended")
    _answered(sent, expected, roundings["slow"])
    wait_until(lambda: not stubs(server.pid), "no process of the server is left")


def test_streams_that_clients_leave_at_their_last_part_keep_no_model(tmp_path):
    """Server 2.51 keeps a stream that is cancelled before its end, and its model."""
    repository = tmp_path / "repository"
    sizes = {"n_embd": 48, "n_inner": 96, "n_layer": 1}
    add_model(repository, "writer", save_checkpoint(tmp_path / "gpt2", "GPT2LMHeadModel", **sizes))
    with running_server(repository) as server:
        assert load(server, "writer") is None
        regions = shared_memory(server.pid)

        def leave(client: VarlenClient) -> None:
            for part in client.stream([5, 6, 7], max_tokens=2, temperature=0, ignore_eos=True):
                if part.finish_reason:
                    return

        with VarlenClient(server.grpc_url, "writer") as client, ThreadPoolExecutor(4) as pool:
            list(pool.map(leave, [client] * 200))

        unload(server, "writer")
        wait_until(lambda: model_state(server, "writer") == "UNAVAILABLE", "it is unloaded", 60)
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: not server.is_running, "the server has ended")
        assert server.stop() == 0
        assert not any(region.exists() for region in regions)


def test_a_killed_model_process_gives_errors_until_the_model_is_loaded_again(
    start_server, roundings
):
    server, clients = start_server("--load-model=slow", "--exit-timeout-secs=2", is_managed=True)
    expected = clients[0].infer("slow", SMALL)
    # this server never answers requests of a killed process, so only the clients' deadlines end them
    held = [client.start("slow", BULK, timeout=3) for client in clients for _ in range(2)]

    stub = stub_of(server, "slow")
    assert len(watchdogs(stub)) == 1
    os.kill(stub, signal.SIGKILL)

    for client in clients:
        with pytest.raises(AnswerError, match="Stub process 'slow_0' is not healthy"):
            client.infer("slow", SMALL)
    for answer in held:
        error = answer.exception()
        assert error is None or isinstance(error, AnswerError)
    assert http_call(server, "GET", "/v2/health/live")[0] == 200

    # do not wait in between: a model that has lost requests is never fully unloaded
    unload(server, "slow")
    assert load(server, "slow") is None
    for client in clients:
        assert_close(client.infer("slow", SMALL), expected, roundings=roundings["slow"])
    assert len(watchdogs(stub)) == 1, "it waits for the end of the server"
    assert len(watchdogs(stub_of(server, "slow"))) == 1


def test_model_processes_end_themselves_when_the_server_is_killed(start_server):
    server, clients = start_server()
    sent = [client.start("slow", BULK) for client in clients]
    (stub,) = stubs(server.pid)
    host, workers = worker_processes(stub)
    assert workers

    os.kill(server.pid, signal.SIGKILL)

    for answer in sent:
        error = answer.exception()
        assert error is None or (isinstance(error, AnswerError) and error.code == "UNAVAILABLE")
    wait_until(lambda: not stubs(server.pid), "no process of the server is left")
    wait_until(lambda: not any(map(is_running, [host, *workers])), "no worker is left")


@pytest.fixture
def loading(tmp_path, checkpoints):
    """A server whose model has just begun to load, and the process of the model."""
    add_model(tmp_path, "slow", checkpoints["slow"])
    with LocalServer(tmp_path) as server:
        found: list[int] = []

        def has_begun() -> bool:
            found[:] = [pid for pid in stubs(server.pid) if watchdogs(pid)]
            return bool(found)

        wait_until(has_begun, "the model loads")
        yield server, found[0]


def test_a_process_that_is_killed_while_its_model_loads_is_told_and_the_server_started_again(
    loading,
):
    """This server waits for the end of the load for ever."""
    server, stub = loading
    pid = server.pid

    os.kill(stub, signal.SIGKILL)

    server.wait_ready(TIMEOUT_SECONDS)
    assert server.pid != pid
    assert not is_running(pid)


def test_a_model_process_ends_itself_when_the_server_is_killed_while_it_loads(loading):
    server, stub = loading

    os.kill(server.pid, signal.SIGKILL)

    wait_until(lambda: not is_running(stub), "the process of the model has ended")
    assert server.stop() == -signal.SIGKILL


def _fill_the_queue(server: LocalServer, clients: list[Client]) -> list[Future[Array]]:
    """Send more than a batch, wait until the queue fills, and return the futures."""
    sent = [client.start("slow", BULK) for _ in range(3) for client in clients]
    wait_until(lambda: metrics(server, "slow")["varlen_queued_tokens"] > 0, "the queue fills")
    return sent


def _answered(sent: list[Future[Array]], expected: Array, roundings: int) -> int:
    """Return the number of answers, which must be right; others must be errors."""
    answered = 0
    for answer in sent:
        error = answer.exception()
        if error is None:
            assert_close(answer.result(), expected, roundings=roundings)
            answered += 1
        else:
            assert isinstance(error, AnswerError)
            assert error.code != "DEADLINE_EXCEEDED", "a client was left waiting"
    return answered
