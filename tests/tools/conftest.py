"""The server, a small backend, small checkpoints, CSV files, and workers in process."""

import csv
import importlib
import json
from pathlib import Path

import pytest

from tests.checkpoints import pooling_files, save_checkpoint
from varlen_bench.harness.worker import WorkerProcess
from varlen_tools.setup_server import SERVER_FOLDER

BENCHMARKS = Path(__file__).parents[2] / "docs/benchmarks"
TINY = {
    "words": ("a", "text", "##s", "."),
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}

IDENTITY_MODEL = """
import sys

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        print("identity:", sys.prefix, flush=True)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.input(request))])
            for request in requests
        ]

    def input(self, request):
        return pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
"""

IDENTITY_CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


@pytest.fixture(scope="session")
def kit() -> Path:
    assert (SERVER_FOLDER / "stamp.json").is_file(), "no server here; run `make setup`"
    return SERVER_FOLDER


@pytest.fixture
def backends(kit: Path, tmp_path: Path) -> Path:
    """A backends folder with the kit's python backend and one that answers what it gets."""
    folder = tmp_path / "backends"
    (folder / "identity").mkdir(parents=True)
    (folder / "identity/model.py").write_text(IDENTITY_MODEL)
    (folder / "python").symlink_to(kit / "backends/python")
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model repository whose only model, `echo`, is of the backend `identity`."""
    repository = tmp_path / "repository"
    (repository / "echo/1").mkdir(parents=True)
    (repository / "echo/config.pbtxt").write_text(IDENTITY_CONFIG)
    return repository


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return save_encoder(tmp_path / "Tiny-Encoder")


def save_encoder(folder: Path, pooling: str = "cls_token") -> Path:
    """Save a BertModel of 40 positions with sentence-transformers' modules beside it."""
    files = pooling_files(word_embedding_dimension=16, **{f"pooling_mode_{pooling}": True})
    return save_checkpoint(folder, files=files, **TINY)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """The folder of a BertForSequenceClassification with three labels."""
    kind = "BertForSequenceClassification"
    return save_checkpoint(tmp_path / "classifier", kind, num_labels=3, **TINY)


def read_csv(path: Path | str) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def committed_columns(benchmark: str) -> list[str]:
    """Return the columns of a benchmark's CSV in docs/benchmarks."""
    with (BENCHMARKS / f"{benchmark}.csv").open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


class InProcess:
    """A worker in this process, where transformers need not be imported once more."""

    def __init__(self, module, argument, log, *, threads):
        self.handle = importlib.import_module(module).start(json.loads(json.dumps(argument)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, **order):
        return json.loads(json.dumps(self.handle(json.loads(json.dumps(order)))))


def worker_of(module, argument, log, *, threads, python):
    assert python is None
    is_ours = argument["system"]["engine"] == "varlen"
    return (WorkerProcess if is_ours else InProcess)(module, argument, log, threads=threads)


@pytest.fixture
def peers_in_process(monkeypatch):
    """Run the workers of peers in this process, which keeps its number of threads."""
    monkeypatch.setattr("varlen_bench.compare.turns.WorkerProcess", worker_of)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
