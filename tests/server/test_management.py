"""No client can change the servers that we start."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from varlen_client import Client
from varlen_tools.local_server import LocalServer, find_command, free_port
from varlen_tools.serve.server import ServerCommand, start_server

from .clients import texts
from .management import answered_calls, load_code
from .serving import TIMEOUT_SECONDS, add_model, model_state, shared_memory, unload, wait_until

Addresses = tuple[str, str]


@contextmanager
def local_server(repository: Path) -> Iterator[Addresses]:
    """As the demo starts it."""
    with LocalServer([repository / "it"]) as server:
        server.wait_ready(TIMEOUT_SECONDS)
        yield server.http_url, server.grpc_url


@contextmanager
def our_command(repository: Path) -> Iterator[Addresses]:
    """As `make serve` and the pages of the documentation start it."""
    http, grpc, metrics = free_port(), free_port(), free_port()
    command = [find_command("tritonserver"), "--model-repository", str(repository)]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    output = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=output, stderr=output, cwd=repository) as process:
        try:
            # HTTP starts after gRPC
            with Client(f"http://127.0.0.1:{http}", "it") as client:
                wait_until(client.ready, "the model is ready")
            yield f"http://127.0.0.1:{http}", f"grpc://127.0.0.1:{grpc}"
        finally:
            process.terminate()


@contextmanager
def another_server(repository: Path) -> Iterator[Addresses]:
    """As `varlen serve` and `varlen adopt` start one that is on PATH."""
    command = ServerCommand(find_command("tritonserver"), repository)
    with start_server(command, [repository / "it"]) as server:
        server.wait_ready(TIMEOUT_SECONDS)
        yield server.http_url, server.grpc_url


@pytest.mark.full
@pytest.mark.parametrize("launch", [local_server, our_command, another_server])
def test_a_server_that_we_start_refuses_every_call_that_changes_it(checkpoints, tmp_path, launch):
    repository = tmp_path / "models"
    add_model(repository, "it", checkpoints["encoder"])

    with launch(repository) as (http_url, grpc_url):
        assert answered_calls(http_url, grpc_url, "it") == []
        status, text = load_code(http_url, tmp_path / "marker")
        assert (status, "not allowed" in text) == (503, True)
        assert not (tmp_path / "marker").exists()

        # what changes nothing is answered
        for url in (http_url, grpc_url):
            with Client(url, "it") as client:
                assert client.embed(["word1"]).shape == (1, 32)
                assert [model.name for model in client.models()] == ["it"]


def test_a_managed_server_answers_these_calls_and_runs_the_code_of_a_page(server, tmp_path):
    found = answered_calls(server.http_url, server.grpc_url, "none")

    assert "POST /v2/repository/models/{model}/unload: 200" in found
    assert {"RepositoryModelLoad", "SystemSharedMemoryRegister"} < set(found)
    load_code(server.http_url, tmp_path / "marker")
    assert (tmp_path / "marker").exists()
    unload(server, "from_a_page")
    wait_until(lambda: model_state(server, "from_a_page") == "UNAVAILABLE", "it is unloaded")


def test_only_the_user_of_a_server_reads_texts_and_answers_in_shared_memory(server, grpc_client):
    # without one of another backend, which another test has unloaded
    regions = [region for region in shared_memory(server.pid) if "_varlen_" in region.name]

    def size() -> int:
        return sum(region.stat().st_size for region in regions)

    before = size()
    # an answer of 4 MB, for which a region grows
    grpc_client.infer("encoder", texts(*[" ".join(["word1"] * 500)] * 64))

    assert size() > before
    assert {region.stat().st_mode & 0o777 for region in regions} == {0o600}
