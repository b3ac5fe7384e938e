"""`varlen serve` on real servers: requests work as printed, and nothing is left."""

import json
import os
import pty
import shlex
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import openai
import pytest

from tests.checkpoints import save_checkpoint
from tests.processes import is_gone
from tests.tools.gguf_files import save_gguf
from varlen_client import Client
from varlen_client.gateway import GatewaySettings
from varlen_tools.local_server import find_command
from varlen_tools.model_config import Inputs
from varlen_tools.serve.examples import Addresses, curl_line, read_model
from varlen_tools.serve.server import ServerCommand, start_server

from .local_gateway import local_gateway
from .management import answered_calls, load_code
from .serve_process import serving
from .serving import TIMEOUT_SECONDS
from .task_models import TASK_MODELS, fetch_task_model, save_task_model


def send(line: str) -> bytes:
    """Send the request of a curl line, and return the body of the answer."""
    words = shlex.split(line)
    headers = dict(
        words[place + 1].split(": ", 1) for place, word in enumerate(words) if word == "-H"
    )
    body = words[words.index("-d") + 1].encode()
    request = urllib.request.Request(f"http://{words[1]}", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return bytes(answer.read())


@contextmanager
def terminal() -> Iterator[tuple[int, Callable[[], str]]]:
    """Yield a terminal, and a function that returns what was drawn on it."""
    ours, theirs = pty.openpty()
    drawn: list[bytes] = []

    def read() -> None:
        with suppress(OSError):
            while part := os.read(ours, 1 << 16):
                drawn.append(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def shown() -> str:
        os.close(theirs)
        reader.join(TIMEOUT_SECONDS)
        return b"".join(drawn).decode()

    yield theirs, shown
    os.close(ours)


def test_a_checkpoint_is_served_to_every_kind_of_client_until_a_signal(minilm, tmp_path):
    words = ("--name", "it", "--api-key", "KEY")
    with (
        terminal() as (screen, shown),
        serving(str(minilm), *words, cache=tmp_path, stderr=screen) as it,
    ):
        [line] = [each for each in it.lines if each.startswith("  curl")]
        [first, second] = json.loads(send(line))["data"]
        assert len(first["embedding"]) == len(second["embedding"]) == 384
        with Client(it.address("grpc"), model="it") as client:
            assert client.embed(["a cat"]).shape == (1, 384)
        assert answered_calls(it.server_url, it.address("grpc"), "it") == []
        assert load_code(it.server_url, tmp_path / "marker")[0] == 503
        assert not (tmp_path / "marker").exists()
        with openai.OpenAI(base_url=f"{it.address('http')}/v1", api_key="KEY") as hosted:
            answer = hosted.embeddings.create(model="it", input=["a cat"])
            assert len(answer.data[0].embedding) == 384
        server = it.server_pid

        it.process.send_signal(signal.SIGINT)

        assert it.process.wait(TIMEOUT_SECONDS) == 0
        assert is_gone(server)
        stages = shown()
    for stage in ("starting", "fetching", "loading it", "ending the server"):
        assert stage in stages
    # only the line of the fetch stays
    assert "\x1b" not in "".join(it.lines)


@pytest.mark.full
def test_a_killed_command_leaves_no_server_and_the_next_one_removes_its_folder(minilm, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary)}
    with serving(str(minilm), cache=tmp_path, environment=environment) as it:
        server = it.server_pid

        it.process.kill()

        assert is_gone(server)
    [left] = temporary.iterdir()
    with serving(str(minilm), cache=tmp_path, environment=environment):
        [folder] = temporary.iterdir()
        assert folder != left
    assert list(temporary.iterdir()) == []


@pytest.mark.full
def test_the_end_of_the_server_ends_the_command_with_its_log(minilm, tmp_path):
    with serving(str(minilm), cache=tmp_path) as it:
        words = [line.partition(" ")[0] for line in it.lines]
        assert [*dict.fromkeys(words)][:3] == ["fetching", "loading", "ready"]
        os.kill(it.server_pid, signal.SIGKILL)

        output, _ = it.process.communicate(timeout=TIMEOUT_SECONDS)
    # nothing is drawn where messages are no terminal
    assert "\x1b" not in "".join(it.lines) + output
    assert "\r" not in "".join(it.lines) + output

    assert it.process.returncode == 1
    assert "error: the server has ended\n" in output


@pytest.mark.full
def test_the_printed_request_of_every_task_is_answered(tmp_path):
    folders = [
        fetch_task_model(save_task_model(tmp_path, name), tmp_path / "repository", name, task)
        for name, task in TASK_MODELS.items()
    ]
    # a classifier of one label ranks, and one of several labels may be served for pairs
    folders += [
        fetch_task_model(tmp_path / source, tmp_path / "repository", name, task)
        for name, source, task in (
            ("ranks", "reranker", "classify"),
            ("pairs", "sentiment", "rerank"),
        )
    ]
    # others take token ids alone
    folders += [
        fetch_task_model(tmp_path / name, tmp_path / "repository", f"{name}_ids", task, Inputs.ids)
        for name, task in TASK_MODELS.items()
        if task in ("embed", "rerank", "generate")
    ]
    models = [read_model(folder) for folder in folders]

    command = ServerCommand(find_command("tritonserver"), tmp_path)
    with start_server(command, folders, ["--disable-auto-complete-config"]) as server:
        server.wait_ready(TIMEOUT_SECONDS)
        with local_gateway(GatewaySettings(url=server.grpc_url)) as gateway:
            at = Addresses(gateway, server.http_url.removeprefix("http://"))
            for model in models:
                assert model is not None
                assert model.has_whole_config
                line = curl_line(model, at)
                assert json.loads(send(line))
                assert ("/v1/rerank" in line) == (model.name in ("reranker", "ranks"))
        # rows of several lengths are sent with a mask
        rows = [[1, 2, 3], [1, 2]]
        with Client(server.grpc_url, model="embedder_ids") as client:
            assert np.allclose(client.embed(rows)[1], client.embed(rows[1:])[0], atol=1e-3)


@pytest.mark.full
def test_a_gguf_file_is_served(tmp_path):
    pytest.importorskip("gguf")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    folder = save_checkpoint(tmp_path / "original", "LlamaForCausalLM", **sizes)
    source = save_gguf(folder, tmp_path / "Tiny-Q8_0.gguf", kind="Q8_0")
    with serving(str(source), cache=tmp_path / "cache") as it:
        [line] = [each for each in it.lines if each.startswith("  curl")]
        assert json.loads(send(line))["model"] == "tiny-q8_0"
        assert any("Tiny-Q8_0.gguf: llama, " in each for each in it.lines)
    with serving(str(source), cache=tmp_path / "cache") as it:
        assert any("--force fetches it again" in each for each in it.lines)
