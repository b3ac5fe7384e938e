"""`varlen adopt` writes the varlen model of models as people have them, and compares both."""

import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModel
from typer.testing import CliRunner

from tests.checkpoints import WORDS, save_checkpoint
from varlen_client.cli.main import program

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
TOKENIZER_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils
from pathlib import Path
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer.from_file(str(Path(pb_utils.get_model_dir(), "tokenizer.json")))

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = [text.decode() for text in request.inputs()[0].as_numpy()[:, 0]]
            self.tokenizer.enable_padding()
            found = self.tokenizer.encode_batch(texts)
            ids = pb_utils.Tensor("input_ids", np.array([each.ids for each in found]))
            mask = np.array([each.attention_mask for each in found])
            responses.append(pb_utils.InferenceResponse([ids, pb_utils.Tensor("attention_mask", mask)]))
        return responses
"""
TOKENIZER_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
ONNX_CONFIG = """
platform: "onnxruntime_onnx"
max_batch_size: 8
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
ENSEMBLE_CONFIG = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "states" data_type: TYPE_FP32 dims: [ -1, 32 ] } ]
ensemble_scheduling { step [
  { model_name: "tokens" model_version: -1
    input_map { key: "TEXT" value: "TEXT" }
    output_map { key: "input_ids" value: "ids" }
    output_map { key: "attention_mask" value: "mask" } },
  { model_name: "bert" model_version: -1
    input_map { key: "input_ids" value: "ids" }
    input_map { key: "attention_mask" value: "mask" }
    output_map { key: "last_hidden_state" value: "states" } }
] }
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "saved", words=WORDS, hidden_size=32, num_attention_heads=4)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
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
    return CliRunner(env={"COLUMNS": "120"}).invoke(program(), command)


def test_a_python_model_with_texts_becomes_an_embedding_model(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    files = {"model.py": TEXT_MODEL}
    version = write_model(repository, "vectors", TEXT_CONFIG, files)
    checkpoint.rename(version / "weights")

    result = adopt(repository, texts)

    assert result.exit_code == 0, result.output
    assert f"{repository}/vectors_varlen: task embed\n" in result.stdout
    assert "inputs    TEXT -> text\n" in result.stdout
    assert "output    EMBEDDING -> sentence_embedding\n" in result.stdout
    assert "parameters of requests  truncate: true, normalize: true\n" in result.stdout
    assert "answers to 12 texts agree, least cosine 1.0000" in result.stdout
    assert "vectors_varlen │" in result.stdout
    assert (repository / "vectors_varlen/1/model.safetensors").is_file()


# the exporter warns about its own code
@pytest.mark.filterwarnings("ignore")
def test_an_ensemble_of_a_tokenizer_and_an_onnx_file_becomes_a_model_of_states(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `bench` is not installed")
    pytest.importorskip("onnxscript", reason="the extra `bench` is not installed")
    repository = tmp_path / "repository"
    tokens = write_model(repository, "tokens", TOKENIZER_CONFIG, {"model.py": TOKENIZER_MODEL})
    (tokens / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    version = write_model(repository, "bert", ONNX_CONFIG, {})
    export(checkpoint, version / "model.onnx")
    write_model(repository, "states", ENSEMBLE_CONFIG, {})

    result = adopt(repository, texts, "--checkpoint", str(checkpoint))

    assert result.exit_code == 0, result.output
    assert f"{repository}/states_varlen: task hidden\n" in result.stdout
    assert "output    states -> last_hidden_state\n" in result.stdout
    assert "answers to 12 texts agree" in result.stdout
    assert "since this server has no ONNX backend: bert\n" in result.stdout


def export(checkpoint: Path, target: Path) -> None:
    """Write a checkpoint as an ONNX file with dynamic shapes."""
    model = AutoModel.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    ids = torch.arange(10).reshape(2, 5)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    axes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    torch.onnx.export(
        model,
        (ids, mask),
        str(target),
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state", "pooled"],
        dynamic_shapes=(axes, axes),
        dynamo=True,
        opset_version=23,
        verbose=False,
    )
