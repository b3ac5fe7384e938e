"""`varlen adopt` writes the varlen model of models as people have them, and compares both."""

import re
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoints import WORDS, save_checkpoint
from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.adopt.stock_ensemble import write_stock_ensemble
from varlen_bench.peers.exports import export_onnx
from varlen_client.cli.main import app

pytestmark = pytest.mark.full

TEXT_MODEL = """
import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from pathlib import Path
from transformers import AutoModel, AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(pb_utils.get_model_dir(), "weights")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    def execute(self, requests):
        texts = [
            text.decode()
            for request in requests
            for text in pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[:, 0]
        ]
        inputs = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            states = self.model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][:, :, None]
        vectors = (states * mask).sum(1) / mask.sum(1)
        vectors = torch.nn.functional.normalize(vectors).numpy()
        parts = np.split(vectors, np.cumsum([len(r.inputs()[0].as_numpy()) for r in requests])[:-1])
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", part)]) for part in parts
        ]
"""
TEXT_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ -1 ] } ]
dynamic_batching { max_queue_delay_microseconds: 1000 }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


@pytest.fixture
def checkpoint(tmp_path):
    return save_checkpoint(tmp_path / "saved", words=WORDS, hidden_size=32, num_attention_heads=4)


@pytest.fixture
def texts(tmp_path):
    """Texts of other lengths, of words that the tokenizer knows."""
    lines = [" ".join(WORDS[: 1 + length % len(WORDS)]) for length in range(12)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    return tmp_path / "texts.txt"


def write_model(repository: Path, name: str, config: str, files: dict[str, str]) -> Path:
    """Write a model, and return the folder of its version."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(textwrap.dedent(config))
    for file, content in files.items():
        (version / file).write_text(content)
    return version


def adopt(repository: Path, texts: Path, *words: str):
    options = ["--texts", str(texts), "--seconds", "1", "--concurrency", "4", *words]
    settings = ["--set", "dtype=fp32", "--set", "warmup_seconds=0", "--set", "threads=1"]
    command = ["adopt", str(repository), *options, *settings]
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, command)


def test_a_python_model_with_texts_becomes_an_embedding_model(checkpoint, texts, tmp_path):
    repository = tmp_path / "repository"
    files = {"model.py": TEXT_MODEL}
    version = write_model(repository, "vectors", TEXT_CONFIG, files)
    checkpoint.rename(version / "weights")

    result = adopt(repository, texts, "--dtype", "bf16")

    assert result.exit_code == 0, result.output
    assert f"{repository}/vectors_varlen: task embed\n" in result.stdout
    assert "inputs    TEXT -> text\n" in result.stdout
    assert "output    EMBEDDING -> sentence_embedding\n" in result.stdout
    assert "parameters of requests  truncate: true, normalize: true\n" in result.stdout
    assert "answers in fp32 to 12 texts agree, least cosine " in result.stdout
    assert re.search(r"vectors +│ +bf16 │.* 1\.00 │", result.stdout)
    # like for like, and as it is published
    assert re.search(r"vectors_varlen_bf16 │ +bf16 │", result.stdout)
    assert re.search(r"vectors_varlen +│ +fp32 │", result.stdout)
    assert sorted(each.name for each in repository.iterdir()) == ["vectors", "vectors_varlen"]
    assert (repository / "vectors_varlen/1/model.safetensors").is_file()


# the exporter warns about its own code
@pytest.mark.filterwarnings("ignore")
def test_a_stock_ensemble_of_a_tokenizer_and_an_onnx_file_becomes_one_model(
    checkpoint, texts, tmp_path
):
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="the extra `bench` is not installed")
    export_onnx(checkpoint, tmp_path / "export", "fp32", "mean")
    repository = tmp_path / "repository"
    write_stock_ensemble(repository, Checkpoint.open(checkpoint), tmp_path / "export/model.onnx")

    result = adopt(repository, texts, "--checkpoint", str(checkpoint))

    assert result.exit_code == 0, result.output
    assert f"{repository}/stock_varlen: task embed\n" in result.stdout
    assert "output    sentence_embedding -> sentence_embedding\n" in result.stdout
    assert re.search(r"tokens of a text  (.*) in tokenizer; \1 in stock_varlen\n", result.stdout)
    assert "answers in fp32 to 12 texts agree" in result.stdout
    assert "since this server has no ONNX backend: encoder\n" in result.stdout
    assert re.search(r"encoder +│ onnxruntime │ fp32  │", result.stdout)
