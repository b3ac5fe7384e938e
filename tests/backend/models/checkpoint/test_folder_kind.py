"""Folders without a transformer are refused with what they hold and with a remedy."""

import pytest

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import WEIGHTS, write_file
from varlen.models.checkpoint_folder import Checkpoint

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 16}
MESSAGE = 'holds an adapter of peft for the model "Qwen/Qwen3-0.6B", not the model itself; put it'


@pytest.mark.parametrize("missing", [("config.json", WEIGHTS), ("config.json",), (WEIGHTS,)])
def test_an_adapter_without_its_model_is_to_be_merged(folder, missing):
    write_file(folder, "adapter_config.json", ADAPTER)
    for name in missing:
        (folder / name).unlink()

    with refused(MESSAGE):
        Checkpoint.open(folder)


def test_an_adapter_with_pickled_weights_is_to_be_merged_too(folder):
    write_file(folder, "adapter_config.json", ADAPTER)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")

    with refused(MESSAGE):
        Checkpoint.open(folder)


def test_a_merged_model_may_keep_the_configuration_of_its_adapter(folder):
    write_file(folder, "adapter_config.json", ADAPTER)

    assert Checkpoint.open(folder).task == "embed"


@pytest.mark.parametrize("content", ["{", [], [1], {"peft_type": "LORA"}, "null"], ids=repr)
def test_other_files_of_these_names_say_nothing(tmp_path, content):
    write_file(tmp_path, "modules.json", content)
    write_file(tmp_path, "adapter_config.json", content if isinstance(content, str) else [])

    with refused("has no config.json"):
        Checkpoint.open(tmp_path)
