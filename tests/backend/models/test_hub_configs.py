"""Checkpoints in the form of the hub: each equals transformers, or is refused by name."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers

from tests.checkpoints import write_file
from tests.closeness import assert_rows_close, encoder_roundings
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint.config_fields import check_known, unread_fields, without
from varlen.models.checkpoint.first_releases import to_native
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.registry import family_of
from varlen.request.request import RequestOptions
from varlen_bench.fidelity.hub import (
    VOCABULARY,
    architecture_of,
    read_hub_configs,
    save_hub_checkpoint,
    shrunk,
)

from ..refusals import refused_checkpoint as refused
from ..requests import prompt_of
from . import paged, paged_pairs
from .oracle import class_of, decoded, load_oracle, translated

MODELS_PAGE = Path(__file__).parents[3] / "docs/start/models.md"
CONFIGS = read_hub_configs()
SERVED = [name for name, entry in CONFIGS.items() if "refused" not in entry]
# Fields that hub files have, and that are known to stop no load.
MEANINGLESS = (
    "tie_weights_ _num_labels is_llama_config transformers.js_config activation matryoshka_dimensions unsloth_fixed"
    " unsloth_version _attn_implementation_autoset _flash_attn_2_enabled neftune_noise_alpha adapters"
    " max_sequence_length vocab_size_or_config_json_file eos_token_ids model_max_length custom_pipelines mask_token_id"
    " num_beams top_k max_length"
).split()


# Fields that are no field of most models, with values that change no model.
WITHOUT_EFFECT = {
    "attention_dropout": 0.0,
    "base_model": "someone/a-model",
    "cross_attention_hidden_size": 0,
    "hidden_dropout": 0.0,
    "initializer_factor": 1.0,
    "logits_to_keep": 0,
    "num_experts": 0,
    "num_kv_shared_layers": 0,
    "use_flash_attention_2": True,
}


def with_fields_without_effect(config):
    """Return a small config.json with more fields, which change no model."""
    names = ("hidden_size", "d_model", "n_embd", "dim")
    # none where an encoder and a decoder have sizes of their own
    size = next((config[name] for name in names if config.get(name)), None)
    own = {} if size is None else {"embedding_size": size}
    return {**own, **WITHOUT_EFFECT, **config}


def first_of_each_model_type():
    """Return the name of one served checkpoint for each model_type."""
    names = {CONFIGS[name]["config"]["model_type"]: name for name in reversed(SERVED)}
    return sorted(names.values())


def first_of_each_kind():
    """Return the name of one served checkpoint for each model_type and list of architectures."""
    configs = {name: CONFIGS[name]["config"] for name in reversed(SERVED)}
    return {
        (each["model_type"], *(each.get("architectures") or ())): name
        for name, each in configs.items()
    }.values()


@pytest.fixture(autouse=True)
def _one_thread():
    """Let torch use one thread: for such small products, several wait for each other."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


def rows_of(rng, config, lengths=(7, 30)):
    """Return rows without the padding token, which transformers gives other positions."""
    ids = [each for each in range(5, VOCABULARY) if each != config.get("pad_token_id")]
    return [rng.choice(ids, length).tolist() for length in lengths]


@torch.inference_mode()
def encoded(model, rows, task):
    """Return logits of transformers, or its last hidden states."""
    inputs = [torch.tensor([row]) for row in rows]
    if task == "classify" and getattr(model.config, "sequence_pooling", None) == "avg":
        # Llama Bidirectional, whose classifier reads the mean; transformers knows the last token only
        means = [model.model(row).last_hidden_state[0].mean(dim=0) for row in inputs]
        return [model.score(mean) / model.config.score_temperature for mean in means]
    if task in ("classify", "token_classify"):
        return [model(row).logits[0] for row in inputs]
    return [model.base_model(row).last_hidden_state[0] for row in inputs]


# `make test` runs one checkpoint of each model_type, and all of their tasks
@pytest.mark.parametrize(
    "name",
    [
        name if name in first_of_each_kind() else pytest.param(name, marks=pytest.mark.full)
        for name in SERVED
    ],
)
def test_a_checkpoint_of_the_hub_equals_transformers(tmp_path, small_bert, rng, name):
    check_equals_transformers(tmp_path, small_bert, rng, shrunk(CONFIGS[name]["config"]))


@pytest.mark.parametrize("name", first_of_each_model_type())
def test_fields_without_effect_change_nothing_here_and_in_transformers(
    tmp_path, small_bert, rng, name
):
    config = with_fields_without_effect(shrunk(CONFIGS[name]["config"]))

    check_equals_transformers(tmp_path, small_bert, rng, config)


def check_equals_transformers(tmp_path, small_bert, rng, config):
    """Raise AssertionError unless a checkpoint with this config.json is served as transformers runs it."""
    written = save_hub_checkpoint(tmp_path, config, small_bert / "tokenizer.json", class_of)
    # transformers reads the hub's own file, but where only a checkpoint's code could
    read = tmp_path if to_native(config) is config else written
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check_task(checkpoint.task)
    model = load_oracle(
        read, architecture_of(checkpoint.config, transformers.AutoConfig.from_pretrained(read))
    )
    rows = rows_of(rng, config)

    if checkpoint.task == "translate":
        pairs = [(rows[1], rows[0]), (rows[0], rows[1])]
        actual = paged_pairs.run_in_chunks(tmp_path, pairs, [3, 30])
        expected = translated(model, pairs)
    elif checkpoint.task == "generate":
        _, actual = paged.run_in_chunks(tmp_path, rows, [3, 30])
        _, expected = decoded(model, rows)
    else:
        task = "hidden" if checkpoint.task == "embed" else checkpoint.task
        with closing(Runner(checkpoint, EngineConfig(dtype="fp32", task=task))) as runner:
            actual = runner.run(list(map(prompt_of, rows)), [RequestOptions()] * len(rows))
        expected = encoded(model, rows, task)
    assert_rows_close(actual, expected, roundings=encoder_roundings(written))


@pytest.mark.parametrize("name", SERVED)
def test_every_served_file_may_have_fields_without_effect(name):
    native = to_native(with_fields_without_effect(CONFIGS[name]["config"]))
    rules = family_of(native).fields

    check_known(without(native, unread_fields(native, rules)), rules)


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {*SERVED}))
def test_a_checkpoint_of_the_hub_is_refused_as_the_docs_say(tmp_path, name):
    message = CONFIGS[name]["refused"]
    write_file(tmp_path, "config.json", CONFIGS[name]["config"])

    with refused(message):
        Checkpoint.open(tmp_path)

    assert f"`{message}" in MODELS_PAGE.read_text()


def test_the_corpus_holds_at_least_80_configurations_and_every_meaningless_field():
    fields = {field for name in SERVED for field in CONFIGS[name]["config"]}

    assert len(CONFIGS) >= 80
    assert {*MEANINGLESS} <= fields
