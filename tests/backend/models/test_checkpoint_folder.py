"""Reading a checkpoint folder, and every reason to refuse one."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import (
    WEIGHTS,
    drop_field,
    module,
    pooling_files,
    set_fields,
    write_file,
)
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_encoder

from ..refusals import refused_checkpoint as refused
from ..refusals import refused_setting

INDEX = "model.safetensors.index.json"


def load(folder, **config):
    return Runner(Checkpoint.open(folder), EngineConfig(dtype="fp32", **config))


def test_a_plain_bert_embeds_by_the_mean_without_normalising(folder):
    checkpoint = Checkpoint.open(folder)

    assert (checkpoint.task, checkpoint.pooling, checkpoint.normalize) == (
        "embed",
        ("mean",),
        False,
    )
    assert checkpoint.default_prompt == ""
    assert (checkpoint.hidden_size, checkpoint.num_labels) == (24, 0)
    assert (checkpoint.position_limit, checkpoint.max_sequence_tokens) == (64, 64)


def test_opens_a_path_given_as_a_string(folder):
    assert Checkpoint.open(str(folder)).folder == folder


def test_minilm_says_what_sentence_transformers_reads(minilm):
    checkpoint = Checkpoint.open(minilm)

    assert (checkpoint.task, checkpoint.pooling, checkpoint.normalize) == ("embed", ("mean",), True)
    assert (checkpoint.hidden_size, checkpoint.position_limit) == (384, 512)
    assert checkpoint.max_sequence_tokens == 256


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken"])
@pytest.mark.parametrize("normalize", [False, True])
def test_reads_what_today_s_sentence_transformers_saves(small_bert, tmp_path, pooling, normalize):
    PreTrainedTokenizerFast(
        tokenizer_file=str(small_bert / "tokenizer.json"), pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(tmp_path / "plain")
    for name in ("config.json", WEIGHTS):
        shutil.copy(small_bert / name, tmp_path / "plain" / name)
    transformer = modules.Transformer(str(tmp_path / "plain"))
    stack = [transformer, modules.Pooling(24, pooling_mode=pooling)]
    made = SentenceTransformer(modules=[*stack, modules.Normalize()] if normalize else stack)
    made.save_pretrained(str(tmp_path / "saved"))

    checkpoint = Checkpoint.open(tmp_path / "saved")

    assert checkpoint.pooling == (pooling.removesuffix("token"),)
    assert checkpoint.normalize is normalize


@pytest.mark.parametrize(
    "kind, labels, task, expected",
    [
        ("BertForSequenceClassification", 1, "classify", 1),
        ("BertForSequenceClassification", 2, "classify", 2),
        ("BertForSequenceClassification", 5, "classify", 5),
        ("BertForTokenClassification", 9, "token_classify", 9),
        ("BertForMaskedLM", 3, "embed", 0),
    ],
)
def test_the_architecture_decides_the_task_and_labels(
    make_checkpoint, kind, labels, task, expected
):
    checkpoint = Checkpoint.open(make_checkpoint(kind, num_labels=labels))

    assert (checkpoint.task, checkpoint.num_labels) == (task, expected)


def test_the_trained_limit_never_passes_the_position_table(folder):
    write_file(folder, "sentence_bert_config.json", {"max_seq_length": 4096})

    assert Checkpoint.open(folder).max_sequence_tokens == 64


@pytest.mark.parametrize("content", [{"max_seq_length": None}, {}], ids=["null", "absent"])
def test_a_trained_limit_may_be_left_out(folder, content):
    write_file(folder, "sentence_bert_config.json", content)

    assert Checkpoint.open(folder).max_sequence_tokens == 64


@pytest.mark.parametrize("limit", [0, -1, "many", 2.5, True])
def test_refuses_a_trained_limit_that_is_no_positive_whole_number(folder, limit):
    write_file(folder, "sentence_bert_config.json", {"max_seq_length": limit})

    message = f"sentence_bert_config.json has max_seq_length {limit!r}; allowed: whole numbers"
    with refused(message):
        Checkpoint.open(folder)


def test_refuses_a_path_that_is_not_a_folder(tmp_path):
    with refused("is not a folder; give a Hugging Face checkpoint folder"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name, message",
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json; save the checkpoint with its fast tokenizer"),
    ],
)
def test_refuses_a_folder_without_a_file_that_it_needs(folder, name, message):
    (folder / name).unlink()

    with refused(message):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["config.json", "modules.json", "sentence_bert_config.json"])
def test_refuses_a_file_that_is_not_json(folder, name):
    write_file(folder, name, "{not json")

    with refused(f"{name} is not JSON: "):
        Checkpoint.open(folder)


def test_refuses_a_folder_in_place_of_a_file(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()

    with refused("config.json is a folder; allowed: a regular file"):
        Checkpoint.open(folder)


def test_refuses_json_that_is_nested_too_deeply(folder):
    write_file(folder, "config.json", "[" * 100_000)

    with refused("config.json is not JSON: "):
        Checkpoint.open(folder)


def test_refuses_more_layers_than_any_model_has(folder):
    set_fields(folder, "config.json", num_hidden_layers=2**31)

    with refused("num_hidden_layers 2147483648; allowed: whole numbers from 0 to 10000"):
        Checkpoint.open(folder)


def test_refuses_a_file_that_is_not_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")

    with refused("config.json is not JSON: "):
        Checkpoint.open(folder)


def test_refuses_a_configuration_that_is_no_object(folder):
    write_file(folder, "config.json", [1, 2])

    with refused("config.json holds a list, not an object"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("family", ["squeezebert", "None"])
def test_refuses_another_family(folder, family):
    set_fields(folder, "config.json", model_type=family)

    with refused(f'config.json has model_type "{family}"; this version serves: bert, roberta,'):
        Checkpoint.open(folder)


@pytest.mark.parametrize("value", [0, -1, "24", 2.5, None])
@pytest.mark.parametrize("key", ["hidden_size", "max_position_embeddings"])
def test_refuses_sizes_that_are_not_positive_whole_numbers(folder, key, value):
    set_fields(folder, "config.json", **{key: value})

    with refused(f"config.json has {key} {value!r}; allowed: whole numbers from 1"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "key",
    """
    model_type hidden_size max_position_embeddings intermediate_size vocab_size num_hidden_layers
    num_attention_heads
    """.split(),
)
def test_refuses_a_configuration_that_leaves_a_field_out(folder, key):
    drop_field(folder, "config.json", key)

    with refused(key):
        load(folder)


def test_refuses_zero_heads(folder):
    set_fields(folder, "config.json", num_attention_heads=0)

    with refused("num_attention_heads 0"):
        load(folder)


@pytest.mark.parametrize("content", [{"a": 1}, ["Transformer"], 3], ids=str)
def test_refuses_modules_that_are_no_list_of_objects(folder, content):
    write_file(folder, "modules.json", content)

    with refused("modules.json"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_mean_tokens": False},
        {"pooling_mode_mean_tokens": True, "pooling_mode_median_tokens": True},
        {"pooling_mode_median_tokens": True},
        {"pooling_mode": "median"},
        {"pooling_mode": ["cls", "median"]},
        {"pooling_mode": []},
    ],
    ids=["none", "concatenated", "unknown", "unknown-name", "concatenated-names", "no-names"],
)
def test_refuses_a_pooling_that_is_not_of_those_we_know(folder, pooling):
    for name, content in pooling_files(**pooling).items():
        write_file(folder, name, content)

    with refused("allowed: one or more of ["):
        Checkpoint.open(folder)


def test_refuses_a_pooling_without_its_configuration(folder):
    write_file(folder, "modules.json", [module("Transformer"), module("Pooling", "1_Pooling")])

    with refused("has no 1_Pooling/config.json"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("path", ["../outside", "/etc", "1_Pooling/../../outside"])
def test_refuses_a_module_outside_the_folder(folder, path):
    write_file(folder.parent, "outside/config.json", {"pooling_mode": "cls"})
    write_file(folder, "modules.json", [module("Transformer"), module("Pooling", path)])

    with refused("is outside the checkpoint folder"):
        Checkpoint.open(folder)


def test_reads_a_snapshot_whose_files_are_links(folder, tmp_path):
    # as in the cache of huggingface_hub
    snapshot, blobs = tmp_path / "hub/snapshots/5ead", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")

    assert load(snapshot).info.vocab_size > 0


@pytest.mark.parametrize(
    "task, needed",
    [
        ("classify", "BertForSequenceClassification"),
        ("rerank", "BertForSequenceClassification"),
        ("token_classify", "BertForTokenClassification"),
    ],
)
def test_refuses_a_task_whose_head_is_missing(folder, task, needed):
    with refused(f'task "{task}" needs a {needed} checkpoint; this one is a BertModel'):
        load(folder, task=task)


def test_refuses_to_classify_tokens_with_a_sequence_classifier(make_checkpoint):
    folder = make_checkpoint("BertForSequenceClassification")

    with refused("needs a BertForTokenClassification checkpoint; this one is a BertForSequence"):
        load(folder, task="token_classify")


def test_refuses_a_folder_with_pickled_weights_only(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()

    with refused(
        "has pickled weights (pytorch_model.bin), which are not read: a pickle may run code"
    ):
        load(folder)


def test_refuses_weights_that_are_damaged(folder):
    (folder / WEIGHTS).write_bytes(b"not safetensors at all")

    with refused(f"{WEIGHTS} cannot be read: "):
        load(folder)


def test_refuses_weights_that_are_cut_short(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])

    with refused(f"{WEIGHTS} has {len(content) // 2} bytes and needs {len(content)}: it was not"):
        load(folder)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_refuses_an_index_that_names_a_file_outside(folder, name):
    (folder / WEIGHTS).unlink()
    write_file(folder, INDEX, {"weight_map": {"a": name}})

    with refused(f"{INDEX} names a file outside the checkpoint folder"):
        load(folder)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'],
    ids=["not-json", "list", "empty", "map-is-a-list", "name-is-a-number"],
)
def test_refuses_an_index_that_is_damaged(folder, content):
    (folder / WEIGHTS).unlink()
    write_file(folder, INDEX, content)

    with refused(f"{INDEX} is {'not JSON' if content == '{' else 'damaged'}"):
        load(folder)


def test_refuses_a_shard_that_is_missing(make_checkpoint):
    folder = make_checkpoint(save={"max_shard_size": "12KB"})
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()

    with refused(f"{folder} has no {shard.name}"):
        load(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_says_that_weights_may_not_be_read(folder):
    (folder / WEIGHTS).chmod(0)

    with refused(f"{WEIGHTS} cannot be read: Permission denied"):
        load(folder)


def test_linear_weights_are_laid_out_input_by_output(folder):
    weights = load_encoder(Checkpoint.open(folder), torch.float32, torch.device("cpu"))
    stored = load_file(folder / WEIGHTS)

    layer = weights.layers[1]
    parts = [
        stored[f"encoder.layer.1.attention.self.{p}.weight"] for p in ("query", "key", "value")
    ]
    assert torch.equal(layer.qkv.weight, torch.cat(parts).t())
    assert torch.equal(layer.mlp.up.weight, stored["encoder.layer.1.intermediate.dense.weight"].t())
    assert layer.qkv.weight.is_contiguous()
    assert layer.mlp.up.weight.is_contiguous()


def test_refuses_a_sequence_limit_past_the_position_table(folder):
    with refused_setting(
        "max_sequence_tokens is 65; this checkpoint has position embeddings for 64"
    ):
        load(folder, max_sequence_tokens=65)
    assert load(folder, max_sequence_tokens=64).info.max_sequence_tokens == 64


def test_refuses_a_queue_that_cannot_hold_the_longest_sequence(folder):
    with refused_setting("max_queued_tokens is 63; it must hold the longest sequence, 64 tokens"):
        load(folder, max_sequence_tokens=64, max_queued_tokens=63)
    assert load(folder, max_queued_tokens=64).info.max_sequence_tokens == 64


def test_without_a_setting_the_longest_sequence_is_what_the_queue_holds(folder):
    assert load(folder, max_queued_tokens=63).info.max_sequence_tokens == 63


def test_a_small_batch_does_not_shorten_the_longest_sequence(folder):
    info = load(folder, max_batch_tokens=10).info

    assert (info.max_sequence_tokens, info.max_batch_tokens, info.max_arena_tokens) == (64, 10, 64)


def test_refuses_an_arena_without_room_for_one_token(folder):
    with refused_setting("arena_bytes allows 100 bytes for each of 1 workers; this model needs "):
        load(folder, arena_bytes=100)
    assert load(folder, arena_bytes=1_000_000).info.max_sequence_tokens > 0


def test_a_loaded_model_keeps_nothing_of_its_file_mapped(folder):
    runner = Runner(Checkpoint.open(folder), EngineConfig(device="cpu"))

    assert runner.info.weight_bytes
    assert str(folder) not in Path("/proc/self/maps").read_text()
