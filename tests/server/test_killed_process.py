"""Calls of clients and the gateway fail when the process of their model is killed.

A process that is killed while it holds a lock in shared memory ends server 2.51 too: about one kill in ten of a model
that streams (decision 0048). Tests of a server that survives start another one then.
"""

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.checkpoints import save_checkpoint
from tests.processes import is_gone
from varlen_client import Client, ModelProcessEnded
from varlen_client.gateway import GatewaySettings
from varlen_tools.local_server import LocalServer
from varlen_tools.scratch import remove_unused

from .clients import AnswerError, HttpClient, integers
from .local_gateway import local_gateway
from .serving import (
    TIMEOUT_SECONDS,
    add_model,
    load,
    metrics,
    running_server,
    shared_memory,
    stub_of,
    unload,
    wait_until,
)

pytestmark = pytest.mark.full

ENCODER, DECODER = "slow", "writer"
WATCH_SECONDS = 1.0
# some seconds of work
ROWS = np.full((256, 500), 7)
PROMPT = [5, 6, 7]
LONG: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 4000}
ENDED = "the process of {}_0 has ended or does not respond: unload and load the model, or restart the server"
# what server 2.51 prints when it ends with a killed process
SERVER_ENDED = "boost::interprocess::lock_exception"
SERVERS = 6
Call = Callable[[Client], object]


@pytest.fixture(scope="module")
def repository(tmp_path_factory, checkpoints):
    """A model repository with an encoder and a model that generates."""
    folder = tmp_path_factory.mktemp("killed")
    decoder = save_checkpoint(
        folder / "gpt2", "GPT2LMHeadModel", n_embd=96, n_inner=384, n_layer=2, n_positions=4096
    )
    repository = folder / "repository"
    add_model(repository, ENCODER, checkpoints["slow"])
    add_model(repository, DECODER, decoder, task="generate")
    return repository


def run_with_a_surviving_server(repository: Path, run: Callable[[LocalServer], None]) -> None:
    """Run a test, again with another server if its server ends with a killed process."""
    for _ in range(SERVERS):
        with running_server(repository) as server:
            try:
                return run(server)
            except Exception:
                if SERVER_ENDED not in server.log():
                    raise
    pytest.fail(f"{SERVERS} servers ended")


def load_process(server: LocalServer, model: str) -> int:
    """Load a model, and return the process id of its stub."""
    assert load(server, model) is None
    return stub_of(server, model)


def _embed(client: Client) -> object:
    return client.embed(ROWS, timeout=TIMEOUT_SECONDS)


def _generate(client: Client) -> object:
    return client.generate(PROMPT, timeout=TIMEOUT_SECONDS, **LONG)


def _stream(client: Client) -> object:
    return list(client.stream(PROMPT, timeout=TIMEOUT_SECONDS, **LONG))


# Calls that run for some seconds, and their models.
CALLS: dict[Call, str] = {_embed: ENCODER, _generate: DECODER, _stream: DECODER}


def test_calls_of_killed_processes_fail_until_the_models_are_loaded_again(repository):
    run_with_a_surviving_server(repository, _calls_fail_until_the_models_are_loaded_again)


def _calls_fail_until_the_models_are_loaded_again(server: LocalServer) -> None:
    stubs = [load_process(server, model) for model in (ENCODER, DECODER)]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2 * len(CALLS)))
        clients = [
            (call, model, stack.enter_context(Client(url, model, watch_seconds=WATCH_SECONDS)))
            for url in (server.grpc_url, server.http_url)
            for call, model in CALLS.items()
        ]
        held = [pool.submit(call, client) for call, _, client in clients]
        running = sum(model == DECODER for _, model, _ in clients)
        wait_until(partial(_is_working, server, ENCODER), "an encoder's call runs")
        wait_until(partial(_is_running, server, DECODER, running), "the others run")

        for stub in stubs:
            os.kill(stub, signal.SIGKILL)

        assert all(map(is_gone, stubs))
        for (call, model, _), each in zip(clients, held, strict=True):
            error = each.exception()
            assert type(error) is ModelProcessEnded
            # of many requests, one that was sent after the kill was refused itself
            reason = "" if call is _embed else "no answer will come, since "
            assert f"{reason}{ENDED.format(model)}" in str(error)
        new = [pool.submit(client.tokenize, ["word3"]) for _, _, client in clients]
        for (_, model, client), each in zip(clients, new, strict=True):
            error = each.exception()
            assert type(error) is ModelProcessEnded
            assert ENDED.format(model) in str(error)
            assert client.ready(), "server 2.51 reports the model as ready"

        for model in (ENCODER, DECODER):
            unload(server, model)
            load_process(server, model)
        for _, _, client in clients:
            assert client.tokenize(["word3"])


def test_a_slow_call_of_a_process_that_runs_is_answered(repository):
    with running_server(repository) as server:
        _slow_calls_are_answered(server)


def _slow_calls_are_answered(server: LocalServer) -> None:
    for model in (ENCODER, DECODER):
        load_process(server, model)
    before = {model: _counted(server, model) for model in (ENCODER, DECODER)}
    for url in (server.grpc_url, server.http_url):
        with (
            Client(url, ENCODER, watch_seconds=0.01) as encoder,
            Client(url, DECODER, watch_seconds=0.01) as decoder,
        ):
            assert np.asarray(_embed(encoder)).shape[0] == len(ROWS)
            assert len(decoder.generate(PROMPT, **{**LONG, "max_tokens": 300}).token_ids) == 300
    # the client's questions count as answered requests, and as nothing else
    for model, sent in ((ENCODER, 2 * len(ROWS) // 32), (DECODER, 2)):
        after = _counted(server, model)
        assert after.pop("ok") > before[model].pop("ok") + sent
        assert after == before[model]


def test_the_gateway_fails_requests_of_a_killed_process(repository):
    run_with_a_surviving_server(repository, _the_gateway_fails_requests)


def _the_gateway_fails_requests(server: LocalServer) -> None:
    stubs = [load_process(server, model) for model in (ENCODER, DECODER)]
    settings = GatewaySettings(url=server.grpc_url, watch_seconds=WATCH_SECONDS)
    with (
        ThreadPoolExecutor(2) as pool,
        local_gateway(settings) as address,
        httpx2.Client(base_url=f"http://{address}", timeout=TIMEOUT_SECONDS) as http,
    ):
        texts = ["word3 " * 400] * 256
        vectors = pool.submit(http.post, "/v1/embeddings", json={"model": ENCODER, "input": texts})
        body = {"model": DECODER, "prompt": "abc", "stream": True, "ignore_eos": True}
        stream = pool.submit(
            http.post, "/v1/completions", json={**body, "max_tokens": LONG["max_tokens"]}
        )
        for model in (ENCODER, DECODER):
            wait_until(partial(_is_working, server, model), f"{model} runs")

        for stub in stubs:
            os.kill(stub, signal.SIGKILL)

        answer = vectors.result()
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "model_process_ended"
        assert error["message"].startswith("the model's process has ended or does not respond")
        last = stream.result().text.strip().splitlines()[-1]
        assert json.loads(last.removeprefix("data:"))["error"]["code"] == "model_process_ended"


def _counted(server: LocalServer, model: str) -> dict[str, float]:
    """Return the answered requests by outcome."""
    name = "varlen_requests_total "
    series = metrics(server, model)
    return {key.removeprefix(name): each for key, each in series.items() if key.startswith(name)}


def _is_working(server: LocalServer, model: str) -> bool:
    series = metrics(server, model)
    return any(series.get(name) for name in ("varlen_queued_tokens", "varlen_running_sequences"))


def _is_running(server: LocalServer, model: str, sequences: int) -> bool:
    return metrics(server, model).get("varlen_running_sequences") == sequences


def test_a_killed_process_ends_a_server_whose_operator_wants_it(tmp_path, checkpoints):
    add_model(tmp_path, ENCODER, checkpoints["slow"])
    environment = {"VARLEN_STOP_WITH_MODEL": "1"}
    arguments = ["--exit-timeout-secs=2"]
    with LocalServer(tmp_path, arguments=arguments, environment=environment) as server:
        server.wait_ready()
        (region,) = shared_memory(server.pid)
        with HttpClient(server) as client:
            held = client.start(ENCODER, {"input_ids": integers(ROWS[:64])})
            wait_until(partial(_is_working, server, ENCODER), "a request runs")

            os.kill(stub_of(server, ENCODER), signal.SIGKILL)

            # a raw client, which would wait until its own limit
            with pytest.raises((OSError, HTTPException, AnswerError)):
                held.result(timeout=TIMEOUT_SECONDS / 2)
        wait_until(lambda: not server.is_running, "the server has ended")
        assert f"varlen: the process of {ENCODER}_0 has ended" in server.log()
        wait_until(lambda: not region.exists(), "its shared memory is removed")


def test_shared_memory_of_a_killed_process_is_removed_after_the_end_of_its_server(
    tmp_path, checkpoints
):
    add_model(tmp_path, ENCODER, checkpoints["slow"])
    with LocalServer(tmp_path) as server:
        server.wait_ready()
        (region,) = shared_memory(server.pid)
        stub = stub_of(server, ENCODER)

        os.kill(stub, signal.SIGKILL)

        assert is_gone(stub)
        assert region not in [each.path for each in remove_unused()]
        assert region.exists(), "the server still has it mapped"
        os.kill(server.pid, signal.SIGKILL)

    # its watchdog does it
    wait_until(lambda: not region.exists(), "the region is removed")
