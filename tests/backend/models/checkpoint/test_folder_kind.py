"""Folders without a transformer are refused with what they hold and with a remedy."""

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import WEIGHTS, set_fields, write_file
from varlen.models.checkpoint_folder import Checkpoint

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 16}
MESSAGE = (
    'holds an adapter of peft for the model "Qwen/Qwen3-0.6B", not the model itself; load both'
)


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


def test_static_embeddings_of_sentence_transformers_are_named(folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)])
    static.save_pretrained(str(tmp_path / "static"))

    with refused("holds static embeddings (StaticEmbedding or model2vec)"):
        Checkpoint.open(tmp_path / "static")


def test_static_embeddings_in_a_folder_of_their_own_are_named(tmp_path):
    kind = "sentence_transformers.models.StaticEmbedding"
    write_file(tmp_path, "modules.json", [{"path": "0_StaticEmbedding", "type": kind}])

    with refused("no transformer, which is not served; sentence-transformers needs no server"):
        Checkpoint.open(tmp_path)


def test_static_embeddings_of_model2vec_are_named(folder):
    set_fields(folder, "config.json", model_type="model2vec", architectures=["StaticModel"])

    with refused("holds static embeddings (StaticEmbedding or model2vec)"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("content", ["{", [], [1], {"peft_type": "LORA"}, "null"], ids=repr)
def test_other_files_of_these_names_say_nothing(tmp_path, content):
    write_file(tmp_path, "modules.json", content)
    write_file(tmp_path, "adapter_config.json", content if isinstance(content, str) else [])

    with refused("has no config.json"):
        Checkpoint.open(tmp_path)
