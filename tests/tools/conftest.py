"""The kit of `make setup`, a small backend for it, small checkpoints, and CSV files."""

import csv
import json
from pathlib import Path

import pytest

from varlen_tools.setup_server import SERVER_FOLDER

BENCHMARKS = Path(__file__).parents[2] / "docs/benchmarks"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "##s", "."]

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
backend: "{backend}"
max_batch_size: 8
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
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
    return repository_of(tmp_path, backend="identity")


def repository_of(folder: Path, backend: str) -> Path:
    """Make a model repository in `folder` whose only model, `echo`, is of that backend."""
    repository = folder / "repository"
    (repository / "echo/1").mkdir(parents=True)
    (repository / "echo/config.pbtxt").write_text(IDENTITY_CONFIG.format(backend=backend))
    return repository


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """The folder of a BertModel with random weights, and sentence-transformers' modules."""
    return save_encoder(tmp_path / "Tiny-Encoder")


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """The folder of a BertForSequenceClassification with three labels and random weights."""
    return save_classifier(tmp_path / "classifier", labels=3)


def read_csv(path: Path | str) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def committed_columns(benchmark: str) -> list[str]:
    """Return the columns of a benchmark's CSV in docs/benchmarks."""
    with (BENCHMARKS / f"{benchmark}.csv").open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def save_encoder(folder: Path, pooling: str = "cls_token") -> Path:
    """Save a BertModel with sentence-transformers' modules beside it."""
    from transformers import BertModel

    BertModel(_config()).save_pretrained(folder)
    _save_tokenizer(folder)
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 16, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(config))
    return folder


def save_classifier(folder: Path, labels: int) -> Path:
    """Save a BertForSequenceClassification with that many labels."""
    from transformers import BertForSequenceClassification

    BertForSequenceClassification(_config(num_labels=labels)).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _config(**changes: int) -> object:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        **changes,
    )


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(
        models.WordPiece({word: at for at, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
