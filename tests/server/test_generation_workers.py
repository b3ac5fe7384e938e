"""Worker processes of generation in the real server: their end costs no token."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import save_checkpoint
from varlen_client import Client, ServerError
from varlen_tools.local_server import LocalServer

from .serving import (
    add_model,
    is_running,
    metrics,
    remove_shared_memory,
    shared_memory,
    step_worker,
    stub_of,
    unload,
    wait_until,
    wait_until_free,
)

pytestmark = pytest.mark.full

# Options of each stream; the random model may end an answer at once.
STREAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"seed": 1, "ignore_eos": True},
    {"seed": 2, "top_p": 0.8, "ignore_eos": True},
    {"seed": 3, "structured_outputs": {"regex": "[a-e]{90}"}},
    {"temperature": 0, "repetition_penalty": 1.2, "ignore_eos": True},
)
SEARCH: dict[str, Any] = {"num_beams": 4, "max_tokens": 40}
WRITER = "writer"
# Tokens of an answer that does not end before its worker is killed, however late its reader is.
LONGEST = 30_000


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A GPT-2 whose steps take a part of a millisecond, for answers that take seconds."""
    folder = tmp_path_factory.mktemp("decoder") / "gpt2"
    sizes = {"n_embd": 96, "n_inner": 384, "n_layer": 2, "n_positions": 32_768}
    save_checkpoint(folder, "GPT2LMHeadModel", **sizes)
    return folder


@pytest.fixture
def server(decoder, tmp_path):
    """A server with a model that generates."""
    add_model(tmp_path, WRITER, decoder, task="generate")
    with LocalServer(tmp_path, arguments=[f"--load-model={WRITER}"], is_managed=True) as running:
        running.wait_ready()
        yield running


def test_streams_go_on_when_their_worker_is_killed_and_fail_when_two_are(server):
    stub = stub_of(server, WRITER)
    prompt = list(range(1, 30))
    with Client(server.grpc_url, WRITER) as client, ThreadPoolExecutor(8) as pool:

        def stream(options: dict[str, Any], kills: int = 0, max_tokens: int = 80) -> list[int]:
            """Return the tokens of a stream, and kill that many workers that have run it."""
            tokens: list[int] = []
            killed: list[int] = []
            for part in client.stream(prompt, max_tokens=max_tokens, **options):
                tokens += part.token_ids
                worker = _loaded_worker(stub) if len(killed) < kills and len(tokens) > 9 else None
                if worker is not None and worker not in killed:
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
            return tokens

        def search() -> list[int]:
            return list(client.generate(prompt, **SEARCH).token_ids)

        expected, found = [stream(options) for options in STREAMS], search()
        # so long that it does not end before its reader gets to the kill
        whole = stream(STREAMS[0], max_tokens=1000)
        killed = step_worker(stub)

        losing = pool.submit(stream, STREAMS[0], kills=1, max_tokens=1000)
        running = [pool.submit(stream, options) for options in STREAMS]
        searching = pool.submit(search)

        assert losing.result() == whole
        assert [each.result() for each in running] == expected
        assert searching.result() == found
        assert stub_of(server, WRITER) == stub
        worker = step_worker(stub)
        assert worker != killed
        # torch has the weights there
        assert "libtorch" in Path(f"/proc/{worker}/maps").read_text()
        wait_until(
            lambda: metrics(server, WRITER)["varlen_worker_restarts_total"] == 1, "it is counted"
        )

        with pytest.raises(ServerError, match="worker processes ended while they ran this"):
            stream(STREAMS[0], kills=2, max_tokens=LONGEST)
        assert stream(STREAMS[0]) == expected[0]
        wait_until_free(server, WRITER)

        # the fourth within ten minutes
        with pytest.raises(ServerError, match="stopped after a fault"):
            stream(STREAMS[0], kills=1, max_tokens=LONGEST)
    assert not is_running(worker)


def _loaded_worker(stub: int) -> int | None:
    """Return the process id of the worker, if it has loaded the model."""
    with suppress(ValueError, FileNotFoundError, ProcessLookupError):
        worker = step_worker(stub)
        if "memfd:" in Path(f"/proc/{worker}/maps").read_text():
            return worker
    return None


def test_unloading_ends_the_worker_of_a_model_that_generates(server):
    worker = step_worker(stub_of(server, WRITER))

    unload(server, WRITER)

    wait_until(lambda: not is_running(worker), "the worker has ended")


def test_the_worker_ends_when_the_stub_is_killed(server):
    stub = stub_of(server, WRITER)
    worker = step_worker(stub)
    regions = shared_memory(server.pid)

    os.kill(stub, signal.SIGKILL)

    wait_until(lambda: not is_running(worker), "the worker has ended")
    server.stop(timeout=5)
    remove_shared_memory(regions)
