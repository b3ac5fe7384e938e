"""The commands of the chart's probes and of its hook, run beside a real server."""

import contextlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import yaml

from tests.server.serving import add_model, start_drain
from tests.server.task_models import TASK_MODELS, save_task_model
from varlen_tools.local_server import LocalServer

from .chart import container, render

pytestmark = pytest.mark.full

# One model for each form of a probe.
REQUESTS = {"embedder": "rows", "reranker": "pairs", "tiny_gpt2": "generate"}

StartServer: TypeAlias = Callable[..., LocalServer]


@pytest.fixture
def rendered(tmp_path):
    """The container whose probes ask all models."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    values = tmp_path / "values.yaml"
    probed = [{"name": name, "request": request} for name, request in REQUESTS.items()]
    values.write_text(yaml.safe_dump({"models": {"probed": probed}}))
    return container(render(values))


@pytest.fixture
def start_server(rendered, tmp_path):
    """Start a server with some of the models."""
    del rendered
    with contextlib.ExitStack() as stack:

        def start(*names: str) -> LocalServer:
            for name in names:
                checkpoint = save_task_model(tmp_path / "checkpoints", name)
                add_model(tmp_path / "models", name, checkpoint, task=TASK_MODELS[name])
            server = stack.enter_context(LocalServer(tmp_path / "models"))
            server.wait_ready()
            return server

        yield start


def probe(container: dict[str, Any], server: LocalServer) -> int:
    """Return the exit status of the readiness probe."""
    command: list[str] = container["readinessProbe"]["exec"]["command"]
    words = [word.replace("http://127.0.0.1:8000", server.http_url) for word in command]
    return subprocess.run(words, check=False).returncode


def test_the_probe_asks_every_model_and_fails_after_the_hook(rendered, start_server):
    server = start_server(*REQUESTS)
    assert probe(rendered, server) == 0

    program, command, *options = rendered["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, command) == ("varlen", "drain")
    drain = start_drain(server, *options)
    _, error = drain.communicate()

    assert drain.returncode == 0, error
    assert probe(rendered, server) != 0


def test_the_probe_fails_if_the_first_of_its_models_is_missing(rendered, start_server):
    _, *others = REQUESTS
    server = start_server(*others)

    assert probe(rendered, server) != 0
