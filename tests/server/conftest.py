"""Fixtures: one server with several models, clients of both protocols, and oracles in process."""

import os
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from tests.checkpoints import WORDS, save_checkpoint
from tests.closeness import encoder_roundings
from varlen import Encoder
from varlen_tools import local_server
from varlen_tools.local_server import LocalServer

from .clients import Client, GrpcClient, HttpClient
from .serving import TIMEOUT_SECONDS, add_model, load_all
from .task_models import TASK_MODELS, fetch_task_model, save_task_model

# Loaded at start; the others wait for a test to load them.
LOADED = ("minilm", "classifier", "tagger", "encoder", "slow", "capped")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests in this folder, with a longer timeout for the server's start."""
    item.add_marker(pytest.mark.server)
    item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report the log of a server that has ended, with the test that failed."""
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(server, LocalServer) and not server.is_running:
        report.sections.append((f"the server ended with code {server.stop()}", server.log_tail()))
    return report


@pytest.fixture(scope="session", autouse=True)
def _server_command() -> Iterator[None]:
    """Run the tritonserver that the variable VARLEN_TEST_SERVER names, if it is set."""
    find_command = local_server.find_command
    chosen = os.environ.get("VARLEN_TEST_SERVER")

    def find(name: str) -> str:
        return chosen if chosen and name == "tritonserver" else find_command(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_server, "find_command", find)
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints by model name."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def save(name: str, kind: str = "BertModel", *, hidden_size: int = 32, **config: int) -> Path:
        return save_checkpoint(
            folder / name,
            kind,
            words=WORDS,
            hidden_size=hidden_size,
            num_attention_heads=4,
            intermediate_size=4 * hidden_size,
            max_position_embeddings=512,
            **config,
        )

    return {
        "classifier": save("classifier", "BertForSequenceClassification", num_labels=3),
        "tagger": save("tagger", "BertForTokenClassification", num_labels=5),
        "encoder": save("encoder"),
        # A request of many long rows keeps it busy during a test.
        "slow": save("slow", hidden_size=128),
    }


@pytest.fixture(scope="session")
def roundings(minilm: Path, checkpoints: dict[str, Path]) -> dict[str, int]:
    """Roundings in a forward pass by model name, as `assert_close` needs them."""
    folders = {"minilm": minilm, **checkpoints}
    return {name: encoder_roundings(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def repository(
    tmp_path_factory: pytest.TempPathFactory, minilm: Path, checkpoints: dict[str, Path]
) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    add_model(folder, "minilm", minilm, threads="0")
    add_model(folder, "classifier", checkpoints["classifier"])
    add_model(folder, "tagger", checkpoints["tagger"])
    add_model(folder, "encoder", checkpoints["encoder"], task="hidden")
    add_model(folder, "slow", checkpoints["slow"])
    add_model(
        folder,
        "capped",
        checkpoints["slow"],
        max_queued_requests="2",
        max_queued_tokens="40000",
        max_text_bytes="4096",
        max_sequence_tokens="500",
    )
    add_model(folder, "spare", checkpoints["encoder"])
    return folder


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[LocalServer]:
    loads = [f"--load-model={name}" for name in LOADED]
    with LocalServer(repository, arguments=loads, is_managed=True) as running:
        running.wait_ready(TIMEOUT_SECONDS)
        yield running


@pytest.fixture(scope="session")
def task_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints of `TASK_MODELS`."""
    folder = tmp_path_factory.mktemp("tasks")
    return {name: save_task_model(folder, name) for name in TASK_MODELS}


@pytest.fixture(scope="session")
def load_task_models(
    server: LocalServer, repository: Path, task_checkpoints: dict[str, Path]
) -> Callable[[Collection[str]], None]:
    """Return a function that loads some of `TASK_MODELS`, which stay loaded."""
    loaded = set()

    def load(names: Collection[str]) -> None:
        missing = [name for name in names if name not in loaded]
        for name in missing:
            fetch_task_model(task_checkpoints[name], repository, name, TASK_MODELS[name])
        load_all(server, missing)
        loaded.update(missing)

    return load


@pytest.fixture(scope="session")
def task_server(
    server: LocalServer, load_task_models: Callable[[Collection[str]], None]
) -> LocalServer:
    """The server with all of `TASK_MODELS`: twelve, so only tests in `make test-all` use it."""
    load_task_models(TASK_MODELS)
    return server


@pytest.fixture(scope="session")
def grpc_client(server: LocalServer) -> Iterator[GrpcClient]:
    with GrpcClient(server) as client:
        yield client


@pytest.fixture(scope="session")
def http_client(server: LocalServer) -> Iterator[HttpClient]:
    with HttpClient(server) as client:
        yield client


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: LocalServer) -> str:
    """The address of the server; each test that uses it runs once per protocol."""
    return server.grpc_url if request.param == "grpc" else server.http_url


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest) -> Client:
    """A client; each test that uses it runs once per protocol."""
    found: Client = request.getfixturevalue(f"{request.param}_client")
    return found


@pytest.fixture(scope="session")
def in_process(minilm: Path) -> Iterator[Encoder]:
    """MiniLM on our engine in this process."""
    with Encoder.from_pretrained(minilm, device="cpu", dtype="fp32") as encoder:
        yield encoder


@pytest.fixture(scope="session")
def sentence_transformer(minilm: Path) -> SentenceTransformer:
    """MiniLM in sentence-transformers."""
    return SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
