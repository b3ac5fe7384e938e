"""How `varlen adopt` reads models that exist, and what it refuses."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tokenizers import Tokenizer
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from tests.checkpoints import WORDS, save_checkpoint
from varlen.config import EngineConfig
from varlen.execution import device
from varlen.models.checkpoint_folder import Checkpoint
from varlen_client.cli.main import app
from varlen_tools.adopt import adoption, session
from varlen_tools.adopt.adoption import find_checkpoint
from varlen_tools.adopt.session import (
    Existing,
    Measured,
    ModelSide,
    Tensor,
    existing_side,
    our_side,
    read_existing,
    read_tokenizer,
    weights_dtype,
)
from varlen_tools.adopt.wish import AdoptError


def metadata(inputs: str, outputs: str) -> dict[str, list[dict[str, object]]]:
    """Return metadata of tensors that are written as NAME:DATATYPE:RANK."""

    def tensors(text: str) -> list[dict[str, object]]:
        parts = [each.split(":") for each in text.split()]
        return [{"name": n, "datatype": d, "shape": ["-1"] * int(rank)} for n, d, rank in parts]

    return {"inputs": tensors(inputs), "outputs": tensors(outputs)}


@pytest.mark.parametrize(
    "inputs, text, tokens",
    [
        ("TEXT:BYTES:2", "TEXT", {}),
        ("input_ids:INT64:2", None, {"ids": "input_ids"}),
        (
            "input_ids:INT32:2 input_mask:INT32:2 segment_ids:INT32:2",
            None,
            {"ids": "input_ids", "attention_mask": "input_mask", "type_ids": "segment_ids"},
        ),
        ("prompt:BYTES:1 TEXT:BYTES:2", "TEXT", {}),
    ],
    ids=["text", "ids", "BERT's first names", "one text is optional"],
)
def test_inputs_are_known_by_their_types_and_names(inputs, text, tokens):
    found = read_existing("it", metadata(inputs, "out:FP32:2"), ["prompt"], None)

    assert (found.text and found.text.name) == text
    assert {role: each.name for role, each in found.token_tensors.items()} == tokens


@pytest.mark.parametrize(
    "inputs",
    ["pixels:FP32:4", "a:BYTES:2 b:BYTES:2", "input_ids:INT64:2 x:FP32:1", "mask:INT64:2"],
    ids=["image", "pair", "ids and more", "a mask alone"],
)
def test_other_inputs_are_refused_by_name(inputs):
    with pytest.raises(AdoptError, match=f"it takes {inputs.split(':')[0]} .*adopt knows models"):
        read_existing("it", metadata(inputs, "out:FP32:2"), [], None)


@pytest.mark.parametrize(
    "outputs, named, expected",
    [
        ("last_hidden_state:FP32:3 sentence_embedding:FP32:2", None, "sentence_embedding"),
        ("a:INT64:1 b:FP16:2", None, "b"),
        ("a:FP32:2 b:FP32:2", "b", "b"),
    ],
    ids=["by name", "the only one with numbers", "asked for"],
)
def test_the_answer_is_the_output_that_is_meant(outputs, named, expected):
    assert read_existing("it", metadata("t:BYTES:2", outputs), [], named).output == expected


def test_an_answer_that_is_not_clear_has_to_be_named():
    for named in (None, "c"):
        with pytest.raises(AdoptError, match="it has the outputs a, b; name the answer with --out"):
            read_existing("it", metadata("t:BYTES:2", "a:FP32:2 b:FP32:2"), [], named)


def test_a_request_has_one_row_in_the_shapes_of_the_model(tmp_path):
    saved = save_checkpoint(tmp_path / "saved", words=WORDS, hidden_size=32, num_attention_heads=4)
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    ids = {"ids": Tensor("input_ids", "INT32", 2), "attention_mask": Tensor("mask", "INT64", 1)}

    ours = Existing("it", None, ids, "out").request(" ".join(WORDS), tokenizer, 4)
    text = Existing("it", Tensor("TEXT", "BYTES", 2), {}, "out").request("a é", tokenizer, 4)

    assert [(each.name(), each.shape(), each.datatype()) for each in ours.inputs] == [
        ("input_ids", [1, 4], "INT32"),
        ("mask", [4], "INT64"),
    ]
    assert text.inputs[0].shape() == [1, 1]


def test_the_checkpoint_of_the_model_is_preferred(tmp_path):
    saved = save_checkpoint(tmp_path / "saved", words=WORDS, hidden_size=32, num_attention_heads=4)
    repository = tmp_path / "repository"
    (repository / "a/1").mkdir(parents=True)
    (repository / "b").mkdir()
    with pytest.raises(AdoptError, match="has no checkpoint .*--checkpoint"):
        find_checkpoint(repository, "a")

    (repository / "b/1").symlink_to(saved)
    assert find_checkpoint(repository, "b") == repository / "b/1"
    (repository / "b/1").unlink()
    (repository / "b/1").symlink_to(repository / "a/1")
    saved.rename(repository / "a/1/weights")
    # a module of the checkpoint
    (repository / "a/1/weights/1_Dense").mkdir()
    for name in ("config.json", "model.safetensors"):
        (repository / "a/1/weights/1_Dense" / name).touch()
    assert find_checkpoint(repository, "a") == repository / "a/1/weights"
    assert find_checkpoint(repository, "other") == repository / "a/1/weights"

    # what an earlier call has written does not count
    for model, config in (("a_varlen", 'backend: "varlen"'), ("c", "")):
        (repository / model).mkdir()
        (repository / model / "config.pbtxt").write_text(config)
        for name in ("config.json", "model.safetensors"):
            (repository / model / name).touch()
    with pytest.raises(AdoptError, match=r"several checkpoints: a/1/weights, c; choose"):
        find_checkpoint(repository, "other")


ONNX = """
platform: "onnxruntime_onnx"
max_batch_size: 8
default_model_filename: "bert.onnx"
parameters { key: "intra_op_thread_count" value: { string_value: "2" } }
parameters { key: "execution_mode" value: { string_value: "1" } }
dynamic_batching { }
"""


def test_onnx_models_run_in_python_where_the_server_cannot(tmp_path, monkeypatch):
    repository, shown = tmp_path / "repository", tmp_path / "view"
    (repository / "bert/1").mkdir(parents=True)
    (repository / "bert/config.pbtxt").write_text(ONNX)
    (repository / "bert/1/bert.onnx").touch()
    (repository / "bare/1").mkdir(parents=True)
    (repository / "bare/1/model.onnx").touch()
    (repository / "other").mkdir()
    (repository / "other/config.pbtxt").write_text('backend: "python"\n')
    monkeypatch.setattr(session, "find_spec", lambda name: name)
    shown.mkdir()

    assert session.write_view(repository, shown, tmp_path / "backends") == ["bare", "bert"]

    config = text_format.Parse(
        (shown / "bert/config.pbtxt").read_text(), model_config_pb2.ModelConfig()
    )
    assert (config.backend, config.platform, config.max_batch_size) == ("python", "", 8)
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "file": "bert.onnx",
        "intra_op_thread_count": "2",
    }
    assert config.HasField("dynamic_batching")
    assert (shown / "bert/1/bert.onnx").resolve() == repository / "bert/1/bert.onnx"
    assert "onnxruntime" in (shown / "bert/1/model.py").read_text()
    assert (shown / "other").is_symlink()

    (tmp_path / "backends/onnxruntime").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    assert session.write_view(repository, tmp_path / "links", tmp_path / "backends") == []

    monkeypatch.setattr(session, "find_spec", lambda name: None)
    (tmp_path / "refused").mkdir()
    with pytest.raises(AdoptError, match="bare is an ONNX model, and this server has no ONNX back"):
        session.write_view(repository, tmp_path / "refused", tmp_path)


def write_configs(folder: Path, **configs: str) -> None:
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(config)


def test_the_only_ensemble_is_what_clients_ask(tmp_path):
    write_configs(tmp_path, ours='backend: "varlen"')
    with pytest.raises(AdoptError, match="no config.pbtxt of a model of another backend"):
        adoption._entry(tmp_path)

    write_configs(tmp_path, tokens='backend: "python"')
    assert adoption._entry(tmp_path) == "tokens"

    write_configs(tmp_path, bert='platform: "onnxruntime_onnx"')
    with pytest.raises(AdoptError, match=r"2 models may be meant \(bert, tokens\); choose one"):
        adoption._entry(tmp_path)

    write_configs(tmp_path, all="ensemble_scheduling { step [ ] }")
    assert adoption._entry(tmp_path) == "all"


def test_a_server_gets_the_parts_of_an_ensemble_too(tmp_path):
    steps = 'ensemble_scheduling {{ step [ {{ model_name: "{}" }}, {{ model_name: "bert" }} ] }}'
    write_configs(tmp_path, all=steps.format("inner"), inner=steps.format("tokens"))
    write_configs(tmp_path, tokens='backend: "python"', other='backend: "python"')
    # completed by the server
    (tmp_path / "bert").mkdir()

    assert session.with_parts(tmp_path, ["all"]) == ["all", "inner", "bert", "tokens"]
    assert session.with_parts(tmp_path, ["tokens", "other"]) == ["tokens", "other"]

    write_configs(tmp_path, ring=steps.format("ring"))
    assert session.with_parts(tmp_path, ["ring"]) == ["ring", "bert"]


@pytest.mark.parametrize(
    "kind, shape, settings, expected",
    [
        ("BertModel", (32,), {}, "embed"),
        ("BertModel", (7, 32), {}, "hidden"),
        ("BertForSequenceClassification", (3,), {}, "classify"),
        ("BertForSequenceClassification", (32,), {}, "embed"),
        ("BertForTokenClassification", (7, 3), {}, "token_classify"),
        ("BertForSequenceClassification", (3,), {"task": "rerank"}, "rerank"),
    ],
)
def test_the_task_is_the_one_whose_answers_have_the_shape(
    kind, shape, settings, expected, tmp_path
):
    labels = {} if kind == "BertModel" else {"num_labels": 3}
    saved = save_checkpoint(
        tmp_path / "saved", kind, words=WORDS, hidden_size=32, num_attention_heads=4, **labels
    )
    checkpoint = Checkpoint.open(saved)

    assert adoption._task(np.zeros(shape, np.float32), checkpoint, settings) == expected
    with pytest.raises(AdoptError, match=r"the shape \(5,\) for one text"):
        adoption._task(np.zeros(5, np.float32), checkpoint, {})


def test_the_new_model_is_asked_for_vectors_of_the_same_length():
    old = Existing("a", Tensor("TEXT", "BYTES", 2), {}, "out")
    ones, twos = [np.array([0.6, 0.8], np.float32)], [np.array([1.2, 1.6], np.float32)]

    assert adoption._new(old, "b", "embed", ones).parameters == {
        "truncate": True,
        "normalize": True,
    }
    assert adoption._new(old, "b", "embed", twos).parameters["normalize"] is False
    assert json.loads(json.dumps(dict(adoption._new(old, "b", "hidden", ones).parameters))) == {
        "truncate": True
    }


def test_rates_and_latencies_are_of_all_rounds():
    measured = Measured([10.0, 30.0, 20.0], [0.001 * number for number in range(1, 101)])

    assert measured.rate == 20
    assert measured.percentile(0.5) == pytest.approx(50.5)
    assert measured.percentile(0.99) == pytest.approx(99.01)


def weight(data_type: int, *dims: int) -> bytes:
    """Return an initializer of an ONNX file, as a field of its graph."""
    tensor = b"".join(bytes([0x08, dim]) for dim in dims) + bytes([0x10, data_type])
    return bytes([0x2A, len(tensor)]) + tensor


def onnx_file(*weights: bytes) -> bytes:
    graph = b"".join(weights)
    # with the version of the format, which is not read
    return bytes([0x08, 0x0A, 0x3A, len(graph)]) + graph


@pytest.mark.parametrize(
    "weights, expected",
    [
        ([weight(1, 4, 4), weight(7, 100)], "fp32"),
        ([weight(10, 4, 4), weight(1, 8)], "fp16"),
        ([weight(3, 4, 4), weight(1, 4), weight(1, 4)], "int8"),
        ([weight(7, 100)], None),
    ],
    ids=["with shapes", "scales in fp32", "quantized", "no weights"],
)
def test_the_dtype_of_an_onnx_file_is_that_of_most_weights(weights, expected):
    assert weights_dtype(onnx_file(*weights)) == expected


def test_a_side_tells_what_the_server_and_the_files_know(tmp_path):
    write_configs(tmp_path, code='backend: "python"', bert=ONNX)
    (tmp_path / "bert/1").mkdir()
    (tmp_path / "bert/1/model.onnx").write_bytes(onnx_file(weight(1, 4)))
    groups = {"instance_group": [{"count": 2}, {"count": 1}]}
    threads = {"parameters": {"INTRA_OP_THREAD_COUNT": {"string_value": "3"}}}

    code = existing_side(tmp_path / "code", {"backend": "python", **groups}, [5])
    bert = existing_side(tmp_path / "bert", {"backend": "python", **threads, **groups}, [])
    idle = existing_side(tmp_path / "bert", {"backend": "python"}, [])
    ours = our_side("ours", EngineConfig.from_parameters({"dtype": "int8", "threads": "1"}), [5])

    assert code == ModelSide("code", "python", None, None, 3, [5])
    assert bert == ModelSide("bert", "onnxruntime", "fp32", 3, 3, [])
    assert idle.threads == len(os.sched_getaffinity(0))
    assert ours == ModelSide("ours", "varlen", "int8", 1, 1, [5])


def test_our_side_has_the_threads_of_the_engine(tmp_path, monkeypatch):
    # one core, and a half of another one
    (tmp_path / "cpu.max").write_text("150000 100000")
    monkeypatch.setattr(device, "_CGROUP_CORES", tmp_path / "cpu.max")
    monkeypatch.setattr(device.torch, "get_num_threads", lambda: 8)

    assert our_side("ours", EngineConfig(), []).threads == 2


def test_the_same_model_in_another_dtype_leaves_models_of_the_repository(tmp_path):
    write_configs(tmp_path, ours='backend: "varlen"', ours_fp32='backend: "none"')

    made = adoption._in_dtype(tmp_path / "ours", "fp32")

    assert made == tmp_path / "ours_fp32_"
    assert (tmp_path / "ours_fp32/config.pbtxt").read_text() == 'backend: "none"'


@pytest.mark.parametrize(
    "old, settings, expected",
    [
        ("fp32", {"dtype": "bf16"}, "fp32"),
        ("fp32", {"dtype": "fp32"}, None),
        ("int8", {"dtype": "bf16"}, "int8"),
        # computed in fp32 on a CPU
        ("fp16", {"dtype": "bf16"}, "fp32"),
        # not served for vectors
        ("int4", {"dtype": "bf16"}, None),
        ("int8", {"device": "cuda", "dtype": "bf16"}, "int8"),
        ("fp16", {"device": "cuda", "dtype": "bf16"}, "fp16"),
        ("int4", {"device": "cuda", "dtype": "bf16"}, None),
    ],
)
def test_like_is_compared_with_like(old, settings, expected, monkeypatch):
    config = EngineConfig.from_parameters({"device": "cpu", **settings})
    # there may be no GPU
    monkeypatch.setattr(adoption, "choose_device", torch.device)

    assert adoption._equal_dtype(old, config) == expected


def test_a_step_that_makes_token_ids_of_a_text_is_a_tokenizer():
    ids = "input_ids:INT64:2 attention_mask:INT64:2"

    found = read_tokenizer("it", metadata("TEXT:BYTES:2", ids))

    assert found == Existing("it", Tensor("TEXT", "BYTES", 2), {}, "input_ids")
    assert read_tokenizer("it", metadata("TEXT:BYTES:2", "out:FP32:2")) is None
    assert read_tokenizer("it", metadata(ids, ids)) is None


def adopt(repository: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, *words: str):
    """Run the command with `FakeSession` in place of a server."""
    monkeypatch.setattr("varlen_tools.serve.server.set_up", lambda: True)
    monkeypatch.setattr(adoption, "open_session", FakeSession)
    settings = ["--set", "dtype=bf16", "--set", "device=cpu", "--set", "threads=1"]
    command = ["adopt", str(repository), "--texts", str(texts), *settings, *words]
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, command)


class FakeSession:
    """A server whose models answer with ones, and have 4 tokens in each text.

    The old model answers the first text otherwise, and its tokenizer makes `old_tokens` of each text.
    """

    old_tokens = 2

    def __init__(self, command, view, models):
        self.models = models

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, model, output):
        return Existing(model, Tensor("TEXT", "BYTES", 2), {}, "out")

    def find_tokenizer(self, models):
        return Existing(models[0], Tensor("TEXT", "BYTES", 2), {}, "ids")

    def config(self, model):
        return {"backend": "python", "instance_group": [{"count": 2}]}

    def measure(self, models, concurrency, seconds):
        return [Measured([rate], [1 / rate]) for rate in (10.0, 20.0, 40.0)[: len(models)]]

    def ask(self, requests):
        if requests[0].output == "ids":
            return [np.ones(self.old_tokens, np.float32) for _ in requests]
        if requests[0].output == "num_tokens":
            return [np.full(1, 4, np.float32) for _ in requests]
        answers = [np.ones(32, np.float32) for _ in requests]
        if len(self.models) == 1:
            answers[0][0] = -2
        return answers


def test_answers_that_differ_and_a_name_that_is_taken_end_it(tmp_path, monkeypatch):
    repository, texts = tmp_path / "repository", tmp_path / "texts.txt"
    texts.write_text("\n".join(f"word{number}" for number in range(10)))
    write_configs(tmp_path, repository='backend: "none"')
    write_configs(repository, old='backend: "python"')
    save_checkpoint(repository / "old/1", words=WORDS, hidden_size=32, num_attention_heads=4)

    result = adopt(repository, texts, monkeypatch)

    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert "  tokens of a text  2 in old; 4 in old_varlen" in lines
    assert (
        "  texts with another number of tokens: 10, first text 0: 2, here 4;"
        " --set max_sequence_tokens=2 cuts texts as old does"
    ) in lines
    for dtype in ("fp32", "bf16"):
        assert f"answers in {dtype} to 10 texts DIFFER, least cosine 0.8" in result.stdout
    assert result.stdout.count("(input 0 differs most)") == 2
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert ["old", "python", "-", "-", "2"] in cells
    assert ["old_varlen", "varlen", "bf16", "1", "1"] in cells
    assert ["old", "fp32 (assumed)", "10.0", "100", "100", "1.00"] in cells
    assert ["old_varlen_fp32", "fp32", "20.0", "50", "50", "2.00"] in cells
    assert ["old_varlen", "bf16", "40.0", "25", "25", "4.00"] in cells
    assert not (repository / "old_varlen_fp32").exists()

    again = adopt(repository, texts, monkeypatch, "--seconds", "0")
    assert again.exit_code == 2
    assert f"{repository}/old_varlen exists; --force replaces it" in again.stderr
    like = adopt(repository, texts, monkeypatch, "--force", "--dtype", "bf16", "--seconds", "0")
    assert like.exit_code == 1
    assert "old_varlen_" not in like.stdout
    assert "texts/s" not in like.stdout
    monkeypatch.setattr(FakeSession, "old_tokens", 6)
    padded = adopt(repository, texts, monkeypatch, "--force", "--seconds", "0")
    assert "10, first text 0: 6, here 4; old pads every text\n" in padded.stdout
    monkeypatch.setattr(FakeSession, "old_tokens", 4)
    same = adopt(repository, texts, monkeypatch, "--force", "--seconds", "0")
    assert "another number of tokens" not in same.stdout
    own = adopt(repository, texts, monkeypatch, "--force", "--name", "old")
    assert "old is a model of another backend; choose another name: --name" in own.stderr
    assert (repository / "old/config.pbtxt").read_text() == 'backend: "python"'


def test_a_model_that_cannot_be_adopted_leaves_nothing_behind(tmp_path, monkeypatch):
    repository, texts = tmp_path / "repository", tmp_path / "texts.txt"
    texts.write_text("\n".join(f"word{number}" for number in range(10)))
    write_configs(tmp_path, repository='backend: "none"')
    write_configs(repository, old='backend: "python"')
    save_checkpoint(repository / "old/1", words=WORDS, hidden_size=64, num_attention_heads=4)

    result = adopt(repository, texts, monkeypatch)

    assert result.exit_code == 2
    assert "which no task of the checkpoint has" in result.stderr
    assert not (repository / "old_varlen").exists()


def test_a_path_is_no_name_and_starts_no_server(tmp_path, monkeypatch):
    repository, texts = tmp_path / "repository", tmp_path / "texts.txt"
    texts.write_text("a\n" * 8)
    write_configs(tmp_path, repository='backend: "none"')
    write_configs(repository, old='backend: "python"')
    save_checkpoint(repository / "old/1", words=WORDS, hidden_size=32, num_attention_heads=4)

    result = adopt(repository, texts, monkeypatch, "--name", "../new")

    assert result.exit_code == 2
    assert "the name '../new' cannot be a model's" in result.stderr
    assert "starting a server" not in result.stderr
