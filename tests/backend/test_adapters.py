"""Adapters of requests: equal to peft, alone and mixed in one batch, in bounded memory."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.adapters import WEIGHTS, overwrite, save_adapter, save_scaled_adapters
from tests.backend.models.oracle import assert_greedy, load_oracle
from tests.checkpoints import save_checkpoint, set_fields
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.errors import CheckpointError, ConfigError, EngineError, RequestError
from varlen.execution.adapters import Adapters, ResidentAdapters
from varlen.in_process.generator import Generator
from varlen.models.checkpoint.lora_folder import read_lora_folder
from varlen.program.adapters import AdapterTables
from varlen.request.request import RequestOptions

_SHORT = {"device": "cpu", "dtype": "fp32", "max_running_sequences": 16, "kv_block_tokens": 4}
# The factors of an adapter are two more products for each one, and as large as the weights.
_MORE_ROUNDINGS = 4


def rows_of(count, *, longest=40, first=5, vocabulary=60, seed=0):
    """Return rows of token ids of mixed lengths."""
    numbers = np.random.default_rng(seed)
    return [
        numbers.integers(first, vocabulary, length).tolist()
        for length in numbers.integers(1, longest, count)
    ]


def mixed(run, names, rows, callers=16):
    """Return the answers of requests that run at the same time, each with its adapter."""
    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(run, names, rows))


@torch.inference_mode()
def hidden_of(model, row):
    return model(input_ids=torch.tensor([row])).last_hidden_state[0]


# rank, alpha, and what else differs
CONFIGS = {
    "rank1": {"r": 1, "lora_alpha": 3},
    "stabilized": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "of_two": {"r": 4, "target_modules": ["query", "value"], "lora_alpha": 8},
    "by_pattern": {
        "r": 4,
        "target_modules": r".*\.(query|dense)",
        "rank_pattern": {"query": 7, "layer.1.output.dense": 2},
        "alpha_pattern": {"query": 30},
    },
    "one_layer": {"r": 3, "target_modules": ["key", "dense"], "layers_to_transform": [1]},
}


def save_all(folder, kind, configs):
    """Return the models of a checkpoint without an adapter and with each, by name."""
    models = {"": load_oracle(folder, kind)}
    for seed, (name, config) in enumerate(configs.items()):
        models[name] = save_adapter(folder, kind, name, seed=seed, **config)
    return models


def assert_mixed_equal(folder, models, rows):
    """Compare hidden states, alone and mixed, with peft's models and with merged ones."""
    names = [random.Random(place).choice([*models]) for place in range(len(rows))]
    expected = [hidden_of(models[name], row) for name, row in zip(names, rows, strict=True)]
    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
        found = mixed(lambda name, row: encoder.with_adapter(name).hidden([row])[0], names, rows)
        alone = [
            encoder.with_adapter(name).hidden([row])[0]
            for name, row in zip(names[:6], rows[:6], strict=True)
        ]
    roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
    assert_rows_close(found, expected, roundings=roundings)
    assert_rows_close(alone, expected[:6], roundings=roundings)
    merged = {name: each.merge_and_unload() for name, each in models.items() if name}
    at = next(place for place, name in enumerate(names) if name)
    of_merged = hidden_of(merged[names[at]], rows[at])
    assert_rows_close([found[at]], [of_merged], roundings=roundings)
    plain = hidden_of(models[""], rows[at])
    assert (of_merged - plain).abs().max() > 0.01


def test_requests_of_all_adapters_and_of_none_share_batches(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    assert_mixed_equal(folder, save_all(folder, "BertModel", CONFIGS), rows_of(48))


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    ["XLMRobertaModel", "AlbertModel", "DistilBertModel", "MPNetModel", "ModernBertModel"],
)
def test_every_family_of_encoders_has_adapters(tmp_path, kind):
    folder = save_checkpoint(tmp_path, kind)
    configs = {"small": {"r": 2, "lora_alpha": 4}, "large": {"r": 16, "lora_alpha": 8}}
    assert_mixed_equal(folder, save_all(folder, kind, configs), rows_of(16))


@pytest.mark.full
def test_a_decoder_that_embeds_has_adapters(tmp_path):
    folder = save_checkpoint(tmp_path, "Qwen3Model")
    configs = {"small": {"r": 2, "lora_alpha": 4}, "large": {"r": 16, "lora_alpha": 8}}
    assert_mixed_equal(folder, save_all(folder, "Qwen3Model", configs), rows_of(16))


def test_a_classifier_without_the_bias_of_the_model_is_refused(tmp_path):
    kind = "BertForSequenceClassification"
    folder = save_checkpoint(tmp_path, kind, num_labels=3)
    save_all(folder, kind, {"whole": {"task_type": "SEQ_CLS", "target_modules": ["query"], "r": 4}})
    file = folder / "adapters/whole" / WEIGHTS
    tensors = load_file(file)
    save_file({name: each for name, each in tensors.items() if "classifier.bias" not in name}, file)
    assert load_file(file).keys() < tensors.keys()

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        with pytest.raises(RequestError, match='"classifier" has a bias'):
            encoder.with_adapter("whole").classify([rows_of(1)[0]])
        encoder.classify([rows_of(1)[0]])


def test_a_closed_model_has_no_file_of_an_adapter_open(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    save_all(folder, "BertModel", {"one": {"target_modules": ["query"], "r": 2}})
    before = len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(3):
        with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
            encoder.with_adapter("one").hidden([rows_of(1)[0]])

    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_an_adapter_brings_a_classifier_of_its_own(tmp_path):
    kind = "BertForSequenceClassification"
    folder = save_checkpoint(tmp_path, kind, num_labels=3)
    configs = {
        "whole": {"task_type": "SEQ_CLS", "target_modules": ["query", "value"], "r": 4},
        "factors": {"target_modules": ["query", "classifier"], "r": 2},
    }
    models = save_all(folder, kind, configs)
    rows = rows_of(24)
    names = [[*models][place % 3] for place in range(len(rows))]
    with torch.inference_mode():
        expected = [
            models[name](input_ids=torch.tensor([row])).logits[0]
            for name, row in zip(names, rows, strict=True)
        ]
    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        found = mixed(lambda name, row: encoder.with_adapter(name).classify([row])[0], names, rows)
    assert_rows_close(found, expected, roundings=_MORE_ROUNDINGS * encoder_roundings(folder))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_adapters_stand_on_weights_of_other_dtypes(tmp_path, dtype):
    folder = save_checkpoint(tmp_path, "BertModel")
    models = save_all(folder, "BertModel", {"a": {"r": 4, "lora_alpha": 8}})
    rows = rows_of(12)
    with Encoder.from_pretrained(folder, task="hidden", dtype=dtype) as encoder:
        found = mixed(
            lambda name, row: encoder.with_adapter(name).hidden([row])[0], ["a", ""] * 6, rows
        )
    for name, row, answer in zip(["a", ""] * 6, rows, found, strict=True):
        expected = hidden_of(models[name], row).flatten()
        similarity = torch.cosine_similarity(torch.from_numpy(answer).flatten(), expected, 0)
        assert similarity > (0.999 if dtype == "bf16" else 0.99)


def test_adapters_take_turns_in_bounded_memory(tmp_path):
    """A batch with more adapters than a worker holds runs in parts."""
    folder = save_checkpoint(tmp_path, "BertModel")
    fields = {"r": 2, "lora_alpha": 8, "target_modules": ["query", "dense"]}
    every = [f"a{number:03}" for number in range(200)]
    model_of = save_scaled_adapters(folder, "BertModel", every, **fields)
    rows = rows_of(300)
    names = [random.Random(place).choice(every) for place in range(len(rows))]
    expected = [hidden_of(model_of(name), row) for name, row in zip(names, rows, strict=True)]
    settings = {"task": "hidden", "dtype": "fp32", "adapter_bytes": 1_000_000, "threads": 2}
    with Encoder.from_pretrained(folder, **settings) as encoder:
        found = mixed(lambda name, row: encoder.with_adapter(name).hidden([row])[0], names, rows)
        swaps = [each.new_swaps() for each in encoder._service.model.workers.runners]
        slots = {each.state.adapters.slots for each in encoder._service.model.workers.runners}
    assert slots < {*range(1, 100)}
    assert sum(map(len, swaps)) > 200
    assert_rows_close(found, expected, roundings=_MORE_ROUNDINGS * encoder_roundings(folder))


def test_sequences_without_an_adapter_run_beside_the_first_ones_with_one():
    adapters = Adapters(("a", "b", "c"), ("", "", ""), slots=2)
    resident = ResidentAdapters(adapters, AdapterTables(2, {}), [])

    found = resident.parts([RequestOptions(adapter=name) for name in ["", "c", "a", "", "b", "c"]])

    assert found == [[0, 3, 2, 4], [1, 5]]


def test_a_damaged_adapter_is_refused_by_name_and_harms_no_other(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    model = save_adapter(folder, "BertModel", "whole", r=2)
    save_adapter(folder, "BertModel", "cut", r=2)
    save_adapter(folder, "BertModel", "dora", r=2, use_dora=True)
    weights = folder / "adapters/cut" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    row = rows_of(1)[0]
    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
        for name, reason in (
            ("cut", "not downloaded whole"),
            ("dora", "use_dora"),
            ("none_such", "allowed: whole"),
        ):
            with pytest.raises(RequestError, match=f"(?s){name}.*{reason}") as error:
                encoder.with_adapter(name).hidden([row])
            assert str(tmp_path) not in str(error.value)
        found = encoder.with_adapter("whole").hidden([row])
    assert_rows_close(found, [hidden_of(model, row)], roundings=4 * encoder_roundings(folder))


def test_a_folder_that_is_removed_after_the_load_changes_no_answer(tmp_path):
    """The file stays open, so a folder that is replaced changes no answer."""
    folder = save_checkpoint(tmp_path, "BertModel")
    model = save_adapter(folder, "BertModel", "a", r=2)
    row = rows_of(1)[0]
    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32") as encoder:
        (folder / "adapters/a" / WEIGHTS).unlink()
        found = encoder.with_adapter("a").hidden([row])
    assert_rows_close(found, [hidden_of(model, row)], roundings=4 * encoder_roundings(folder))


def outcomes(run, names, rows):
    """Return the answer or the error of each request; they run at the same time."""

    def outcome(name, row):
        try:
            return run(name, row)
        except EngineError as error:
            return error

    return mixed(outcome, names, rows)


def test_a_file_that_is_overwritten_fails_the_requests_that_name_it_and_no_other(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    models = save_all(folder, "BertModel", {name: {"r": 2} for name in ("a", "b", "c")})
    rows, names = rows_of(24), [*models] * 6
    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32", threads=1) as encoder:
        for name in ("b", "c"):
            overwrite(folder / "adapters" / name)
        found = outcomes(lambda name, row: encoder.with_adapter(name).hidden([row])[0], names, rows)
    for name, row, each in zip(names, rows, found, strict=True):
        if name in ("b", "c"):
            assert f'"{name}": {WEIGHTS} was changed after it was loaded' in str(each)
        else:
            roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
            assert_rows_close([each], [hidden_of(models[name], row)], roundings=roundings)


def test_memory_that_runs_out_as_an_adapter_is_read_gives_no_other_one_its_weights(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    models = save_all(folder, "BertModel", {name: {"r": 2} for name in ("a", "b", "c")})
    row, settings = rows_of(1)[0], {"task": "hidden", "dtype": "fp32", "threads": 1}
    with Encoder.from_pretrained(folder, **settings) as encoder:
        needed = encoder._service.model.info.adapter_bytes
    with Encoder.from_pretrained(folder, adapter_bytes=2 * needed, **settings) as encoder:
        (runner,) = encoder._service.model.workers.runners
        adapters = runner.state.adapters
        read = adapters._fault_of_read

        def fail(number, slot):
            adapters._fault_of_read = read
            raise MemoryError

        def hidden(name):
            return encoder.with_adapter(name).hidden([row])[0]

        assert adapters.slots == 2
        for name in ("a", "b"):
            hidden(name)
        adapters._fault_of_read = fail
        with pytest.raises(EngineError, match="too little memory"):
            hidden("c")
        found = [hidden(name) for name in ("c", "b", "a")]
    expected = [hidden_of(models[name], row) for name in ("c", "b", "a")]
    assert_rows_close(found, expected, roundings=_MORE_ROUNDINGS * encoder_roundings(folder))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"peft_type": "IA3"}, 'peft_type "IA3"'),
        ({"bias": "all"}, 'bias "all"'),
        ({"use_dora": True}, "use_dora true"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights "pissa"'),
        ({"r": 5}, "implies rank 5"),
        ({"r": 0}, "allowed: whole numbers from 1"),
        ({"lora_alpha": "many"}, 'lora_alpha "many"'),
        ({"rank_pattern": {"(a+)+b": 3}}, "rank_pattern"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"something_new": 3}, "something_new 3"),
    ],
)
def test_what_changes_answers_and_is_not_served_is_refused(tmp_path, fields, message):
    folder = save_checkpoint(tmp_path, "BertModel")
    save_adapter(folder, "BertModel", "a", r=2)
    adapter = folder / "adapters/a"
    set_fields(adapter, "adapter_config.json", **fields)
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(")):
        read_lora_folder(adapter)


def refused_reason(folder, task, name):
    """Return why a model refuses an adapter when it is loaded."""
    with Encoder.from_pretrained(folder, task=task, dtype="fp32", threads=1) as encoder:
        return dict(encoder._service.model.info.adapters)[name]


def test_an_adapter_of_a_changed_layer_is_refused(tmp_path):
    """Granite's factors are multiplied into weights, to which an adapter would be added."""
    folder = save_checkpoint(tmp_path, "GraniteModel", residual_multiplier=0.5)
    save_adapter(folder, "GraniteModel", "a", r=2, target_modules=["o_proj"])
    assert "changes when it is loaded" in refused_reason(folder, "hidden", "a")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path / "model", "BertModel")
    other = save_checkpoint(tmp_path / "other", "BertModel", hidden_size=36)
    save_adapter(other, "BertModel", "a", r=2, target_modules=["query"])
    (other / "adapters").rename(folder / "adapters")
    assert "belongs to another model" in refused_reason(folder, "hidden", "a")


def test_an_adapter_of_embeddings_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    targets = ["query", "word_embeddings"]
    save_adapter(folder, "BertModel", "a", r=2, target_modules=targets)
    assert "an adapter of embeddings" in refused_reason(folder, "hidden", "a")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_adapter_of_the_output_layer_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, "Qwen2ForCausalLM", tie_word_embeddings=False)
    targets = ["q_proj", "lm_head"]
    save_adapter(folder, "Qwen2ForCausalLM", "a", r=2, target_modules=targets)
    with Generator.from_pretrained(folder, **_SHORT) as generator:
        reason = dict(generator._service.model.runner.info.adapters)["a"]
    assert '"lm_head"' in reason


def test_a_pickle_is_not_read(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    save_adapter(folder, "BertModel", "a", r=2)
    adapter = folder / "adapters/a"
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which may run code"):
        read_lora_folder(adapter)


def test_a_setting_names_adapters_elsewhere(tmp_path):
    folder = save_checkpoint(tmp_path / "model", "BertModel")
    model = save_adapter(folder, "BertModel", "a", r=2)
    (folder / "adapters").rename(tmp_path / "elsewhere")
    row = rows_of(1)[0]
    adapters = f"one={tmp_path}/elsewhere/a, two=../elsewhere/a"
    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32", adapters=adapters) as encoder:
        found = [encoder.with_adapter(name).hidden([row])[0] for name in ("one", "two")]
    expected = [hidden_of(model, row)] * 2
    assert_rows_close(found, expected, roundings=4 * encoder_roundings(folder))


def test_a_model_whose_adapters_do_not_fit_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    save_adapter(folder, "BertModel", "a", r=2)
    with pytest.raises(ConfigError, match="adapter_bytes allows 5 bytes"):
        Encoder.from_pretrained(folder, task="hidden", adapter_bytes=10, threads=2)


def test_a_family_without_adapters_says_so(tmp_path):
    folder = save_checkpoint(tmp_path, "DebertaV2Model")
    save_adapter(folder, "DebertaV2Model", "a", r=2)
    with pytest.raises(ConfigError, match="DebertaV2Model.*adapters: none"):
        Encoder.from_pretrained(folder, task="hidden")
    Encoder.from_pretrained(folder, task="hidden", adapters="none").close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model"), "BertModel")


@given(
    rank=st.integers(1, 256),
    alpha=st.integers(1, 64),
    targets=st.sets(st.sampled_from(["query", "key", "value", "dense"]), min_size=1),
    stabilized=st.booleans(),
)
@example(rank=1, alpha=64, targets={"dense", "key", "query", "value"}, stabilized=False)
@example(rank=254, alpha=56, targets={"dense", "key", "query", "value"}, stabilized=True)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_rank_and_any_targets(small, rank, alpha, targets, stabilized):
    model = save_adapter(
        small,
        "BertModel",
        "a",
        r=rank,
        # Products of random A and B grow with the root of the rank, and the factor divides by it if it is stabilized,
        # else by the rank. So they stay as large as with rank 1: scores grow with their square, and the weights of
        # attention have the absolute error of scores.
        lora_alpha=min(alpha / 4, 2 if stabilized else 2 * math.sqrt(rank)),
        target_modules=sorted(targets),
        use_rslora=stabilized,
    )
    row = rows_of(1, seed=rank)[0]
    with Encoder.from_pretrained(small, task="hidden", dtype="fp32", threads=1) as encoder:
        found = encoder.with_adapter("a").hidden([row])
    roundings = _MORE_ROUNDINGS * encoder_roundings(small)
    assert_rows_close(found, [hidden_of(model, row)], roundings=roundings)


def test_the_cache_keeps_answers_of_adapters_apart(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    save_adapter(folder, "BertModel", "a", r=2)
    row = rows_of(1)[0]
    with Encoder.from_pretrained(
        folder, task="embed", dtype="fp32", response_cache_bytes=1_000_000
    ) as encoder:
        of_adapter = encoder.with_adapter("a")
        first, second = encoder.embed([row]), of_adapter.embed([row])
        np.testing.assert_array_equal(encoder.embed([row]), first)
        np.testing.assert_array_equal(of_adapter.embed([row]), second)
        assert np.abs(first - second).max() > 0.01
        assert encoder._service.model.cache.use().hits == 2


def test_names_are_bounded(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    save_adapter(folder, "BertModel", "a", r=2)
    (folder / "adapters/a").rename(folder / "adapters/a b")
    assert json.loads((folder / "adapters/a b/adapter_config.json").read_text())
    with pytest.raises(CheckpointError, match='an adapter has the name "a b"'):
        Encoder.from_pretrained(folder, task="hidden")


# Decoders and encoder-decoders.


def many_adapters(seed, *, few):
    """Return the fields of 32 adapters of random ranks; some change only the layers `few`."""
    numbers = random.Random(seed)
    return {
        f"a{number:02}": {
            "r": numbers.choice([1, 2, 4, 8, 16, 24]),
            "lora_alpha": numbers.choice([4, 8]),
            "use_rslora": numbers.random() < 0.3,
            "target_modules": numbers.choice(["all-linear", few]),
        }
        for number in range(32)
    }


def test_a_batch_of_32_adapters_at_random(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    configs = many_adapters(0, few=["query", "value"])
    assert_mixed_equal(folder, save_all(folder, "BertModel", configs), rows_of(64))


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param("Qwen2ForCausalLM", {"temperature": 0.0}, id="decoder"),
        pytest.param(
            "MarianMTModel", {"beam_width": 1}, id="encoder-decoder", marks=pytest.mark.full
        ),
    ],
)
def test_steps_of_32_adapters_at_random(tmp_path, kind, options):
    folder = save_checkpoint(tmp_path, kind)
    models = save_all(folder, kind, many_adapters(1, few=["q_proj", "v_proj"]))
    rows = rows_of(40, longest=20, vocabulary=90)
    names = [random.Random(place).choice([*models]) for place in range(len(rows))]
    options = {**options, "ignore_eos": True}
    with Generator.from_pretrained(folder, **{**_SHORT, "max_running_sequences": 40}) as generator:
        found = mixed(lambda name, row: generated(generator, name, row, **options), names, rows, 40)
    roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
    for name, row, tokens in zip(names, rows, found, strict=True):
        # the last one of a translation is forced to end the answer
        kept = tokens[:-1] if kind == "MarianMTModel" else tokens
        assert_greedy(models[name], row, kept, roundings=roundings)


@pytest.mark.parametrize("kind", ["Qwen2ForCausalLM", "MarianMTModel"])
def test_a_step_goes_on_without_an_adapter_that_is_overwritten(tmp_path, kind):
    folder = save_checkpoint(tmp_path, kind)
    models = save_all(folder, kind, {"a": {"r": 2}, "b": {"r": 4}})
    rows, names = rows_of(12, longest=20, vocabulary=90), [*models] * 4
    options = {"beam_width": 1} if kind == "MarianMTModel" else {"temperature": 0.0}
    with Generator.from_pretrained(folder, **_SHORT) as generator:
        overwrite(folder / "adapters/b")
        found = outcomes(
            lambda name, row: generated(generator, name, row, ignore_eos=True, **options),
            names,
            rows,
        )
    roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
    for name, row, each in zip(names, rows, found, strict=True):
        if name == "b":
            assert "was changed after it was loaded" in str(each)
        else:
            kept = each[:-1] if kind == "MarianMTModel" else each
            assert_greedy(models[name], row, kept, roundings=roundings)


def generated(generator, name, row, **options):
    (answer,) = generator.with_adapter(name).generate([row], max_tokens=8, **options)
    return list(answer.token_ids)


@pytest.mark.parametrize(
    "kind, configs",
    [
        (
            "Qwen2ForCausalLM",
            {
                "all": {"r": 4, "lora_alpha": 8},
                "few": {"r": 9, "target_modules": ["q_proj", "v_proj"]},
            },
        ),
        pytest.param(
            "GPT2LMHeadModel",
            {
                "all": {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True},
                "few": {"r": 9, "target_modules": ["c_attn"], "fan_in_fan_out": True},
            },
            marks=pytest.mark.full,
        ),
        pytest.param(
            "LlamaForCausalLM",
            {"all": {"r": 4, "lora_alpha": 8}, "few": {"r": 9, "target_modules": ["down_proj"]}},
            marks=pytest.mark.full,
        ),
    ],
)
def test_sequences_that_generate_with_adapters_share_steps(tmp_path, kind, configs):
    folder = save_checkpoint(tmp_path, kind)
    models = save_all(folder, kind, configs)
    rows = rows_of(18, longest=30, vocabulary=90)
    # the same prompts with each adapter: their keys and values must not be shared
    rows[1::3], rows[2::3] = rows[::3], rows[::3]
    names = [*models] * 6
    greedy = {"temperature": 0.0, "ignore_eos": True}
    with Generator.from_pretrained(folder, prefix_cache=True, **_SHORT) as generator:
        found = mixed(lambda name, row: generated(generator, name, row, **greedy), names, rows)
        again = [generated(generator, names[at], rows[at], **greedy) for at in range(3)]
    roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
    for name, row, tokens in zip(names, rows, found, strict=True):
        assert_greedy(models[name], row, tokens, roundings=roundings)
    for at, tokens in enumerate(again):
        assert_greedy(models[names[at]], rows[at], tokens, roundings=roundings)
    assert len({tuple(tokens) for tokens in found[:3]}) > 1


@pytest.mark.parametrize(
    "kind",
    [
        "MarianMTModel",
        pytest.param("T5ForConditionalGeneration", marks=pytest.mark.full),
        pytest.param("BartForConditionalGeneration", marks=pytest.mark.full),
    ],
)
def test_translations_with_adapters_share_steps(tmp_path, kind):
    folder = save_checkpoint(tmp_path, kind)
    models = save_all(folder, kind, {"a": {"r": 4, "lora_alpha": 8}, "b": {"r": 2}})
    rows = rows_of(9, longest=20, vocabulary=90)
    names = [*models] * 3
    with Generator.from_pretrained(folder, **_SHORT) as generator:
        greedy = {"beam_width": 1, "ignore_eos": True}
        found = mixed(lambda name, row: generated(generator, name, row, **greedy), names, rows)
        wide = generated(generator, "a", rows[1], beam_width=3, ignore_eos=True)
    roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
    for name, row, tokens in zip(names, rows, found, strict=True):
        # the last one is forced to end the answer
        assert_greedy(models[name], row, tokens[:-1], roundings=roundings)
    assert len(wide) == 8


def test_a_model_that_generates_holds_the_adapters_of_all_running_sequences(tmp_path):
    folder = save_checkpoint(tmp_path, "Qwen2ForCausalLM")
    for name in ("a", "b", "c"):
        save_adapter(folder, "Qwen2ForCausalLM", name, r=2)
    with pytest.raises(ConfigError, match="holds . of 3 adapters.*max_running_sequences"):
        Generator.from_pretrained(folder, **_SHORT, adapter_bytes=250_000)
