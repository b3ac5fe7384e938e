"""Adapters with several outputs, samples, beams, other dtypes, ranks and stages."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.adapters import save_adapter
from tests.backend.models.divided import BART, CONFIG, KEY_HEADS
from tests.backend.models.test_ranks import on_ranks
from tests.backend.models.test_stages import on_stages, staged
from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, assert_rows_close, encoder_roundings
from tests.quantized import save_quantized, widen
from varlen import Encoder
from varlen.errors import AdapterFaultError, ConfigError, RequestError
from varlen.execution import programs
from varlen.execution.packing import ADAPTERS, part_of_step, source_arrays, step_arrays
from varlen.execution.rank_link import NO_OTHERS
from varlen.execution.runner import Runner
from varlen.execution.token_state import NoChooser
from varlen.execution.warm_up import _choosing, _chunk
from varlen.in_process.generator import Generator
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Prompt, RequestOptions

from .test_adapters import _MORE_ROUNDINGS, _SHORT, mixed, rows_of, save_all

TASKS = ("embed", "sparse_embed", "hidden")


@torch.inference_mode()
def log_probabilities(model, row, tokens):
    """Return the log probability of each token behind a row, in transformers' model."""
    if getattr(model.config, "is_encoder_decoder", False):
        start = [model.config.decoder_start_token_id]
        given = {"decoder_input_ids": torch.tensor([start + tokens[:-1]])}
        logits = model(input_ids=torch.tensor([row]), **given).logits[0]
    else:
        logits = model(input_ids=torch.tensor([row + tokens[:-1]])).logits[0, len(row) - 1 :]
    return logits.log_softmax(1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


def test_several_outputs_of_one_pass_have_the_adapter_of_their_row(tmp_path):
    kind = "BertForMaskedLM"
    folder = save_checkpoint(tmp_path, kind)
    models = save_all(folder, kind, {"a": {"r": 4, "lora_alpha": 8}, "b": {"r": 2}})
    rows, names = rows_of(12), [*models] * 4
    settings = {"task": "embed", "dtype": "fp32"}
    with Encoder.from_pretrained(folder, outputs="sparse_embed,hidden", **settings) as encoder:
        found = mixed(
            lambda name, row: encoder.with_adapter(name).outputs([row], TASKS)[0], names, rows
        )
    with Encoder.from_pretrained(folder, **settings) as encoder:
        vectors = mixed(
            lambda name, row: encoder.with_adapter(name).embed([row], normalize=False)[0],
            names,
            rows,
        )
    roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
    with torch.inference_mode():
        outputs = [
            models[name](input_ids=torch.tensor([row]), output_hidden_states=True)
            for name, row in zip(names, rows, strict=True)
        ]
    for each, output, vector in zip(found, outputs, vectors, strict=True):
        assert_close(each["hidden"], output.hidden_states[-1][0], roundings=roundings)
        assert_close(
            each["embed"] / np.linalg.norm(each["embed"]),
            vector / np.linalg.norm(vector),
            roundings=roundings,
        )
        terms = each["sparse_embed"]
        weights = torch.log1p(output.logits[0].relu()).amax(0)
        assert_close(terms[:, 1], weights[terms[:, 0].astype(int)], roundings=roundings)
        assert len(terms) == (weights > 0).sum()


def test_each_sample_of_a_request_has_its_adapter(tmp_path):
    kind = "Qwen2ForCausalLM"
    folder = save_checkpoint(tmp_path, kind)
    models = save_all(folder, kind, {"a": {"r": 4, "lora_alpha": 8}, "b": {"r": 2}})
    rows, names = rows_of(6, vocabulary=90), [*models] * 2
    options = {"n": 3, "seed": 1, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    with Generator.from_pretrained(folder, **_SHORT) as generator:
        found = mixed(
            lambda name, row: generator.with_adapter(name).generate([row], **options), names, rows
        )
    for name, row, samples in zip(names, rows, found, strict=True):
        assert len({each.token_ids for each in samples}) > 1
        for each in samples:
            expected = log_probabilities(models[name], row, list(each.token_ids))
            chosen = [entry.logprob for entry in each.logprobs]
            np.testing.assert_allclose(chosen, expected, rtol=1e-4, atol=1e-3)


def test_beams_of_a_search_have_the_adapter_of_their_text(tmp_path):
    kind = "MarianMTModel"
    folder = save_checkpoint(tmp_path, kind)
    models = save_all(folder, kind, {"a": {"r": 4, "lora_alpha": 8}, "b": {"r": 2}})
    rows, names = rows_of(6, longest=20, vocabulary=90), [*models] * 2
    options = {"num_beams": 4, "n": 2, "max_tokens": 6, "length_penalty": 0.0}
    with Generator.from_pretrained(folder, **_SHORT) as generator:
        found = mixed(
            lambda name, row: generator.with_adapter(name).generate([row], **options), names, rows
        )
    for name, row, answers in zip(names, rows, found, strict=True):
        for each in answers:
            # the last token is forced to end the text, and counts nothing
            expected = log_probabilities(models[name], row, list(each.token_ids)[:5]).sum()
            last = log_probabilities(models[name], row, list(each.token_ids))[5:].sum()
            assert min(abs(each.score - expected), abs(each.score - expected - last)) < 1e-3


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_generator_with_weights_of_few_bits_has_adapters(tmp_path, dtype):
    """Its answers are about as far from peft as without an adapter."""
    kind = "Qwen2ForCausalLM"
    folder = save_checkpoint(tmp_path, kind, hidden_size=64, intermediate_size=128)
    models = save_all(folder, kind, {"a": {"r": 4, "lora_alpha": 8}})
    row = rows_of(1, longest=30, vocabulary=90)[0]
    errors = {}
    with Generator.from_pretrained(folder, **{**_SHORT, "dtype": dtype}) as generator:
        for name, model in models.items():
            [answer] = generator.with_adapter(name).generate(
                [row], max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True
            )
            found = [entry.logprob for entry in answer.logprobs]
            errors[name] = np.abs(found - log_probabilities(model, row, list(answer.token_ids)))
            other = log_probabilities(
                models["a" if name == "" else ""], row, list(answer.token_ids)
            )
            assert errors[name].mean() < np.abs(found - other).mean() / 4
    assert errors["a"].mean() < 3 * errors[""].mean() + 0.05


def test_layers_that_keep_codes_have_factors_and_are_replaced_by_none(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "choose_dtype", lambda *_: torch.float32)
    kind, folder, floats = "LlamaForCausalLM", tmp_path / "codes", tmp_path / "floats"
    expected = save_quantized(folder, "gptq-asymmetric")
    shutil.copytree(folder, floats)
    widen(floats, expected)
    models = save_all(floats, kind, {"a": {"r": 4, "lora_alpha": 8}})
    save_adapter(floats, kind, "whole", target_modules=["q_proj"], modules_to_save=["down_proj"])
    shutil.copytree(floats / "adapters", folder / "adapters")
    (row,) = rows_of(1, vocabulary=90)

    with Generator.from_pretrained(folder, **{**_SHORT, "dtype": "auto"}) as generator:
        (program,) = generator._service.model.runner.programs
        found = [
            generator.with_adapter(name).generate([row], max_tokens=6, logprobs=0, ignore_eos=True)
            for name in models
        ]
        with pytest.raises(RequestError, match="down_proj.* whole, .* stays in 4 or 8 bits"):
            generator.with_adapter("whole").generate([row])

    assert {op.kernel for op in program.ops} >= {"linear_blocks", "add_adapters"}
    for model, (answer,) in zip(models.values(), found, strict=True):
        chosen = [entry.logprob for entry in answer.logprobs]
        tokens = log_probabilities(model, row, list(answer.token_ids))
        np.testing.assert_allclose(chosen, tokens, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "kind, config, targets",
    [
        (
            "BertModel",
            {"num_hidden_layers": 3, "num_attention_heads": 4},
            r".*\.0\..*(query|dense)",
        ),
        pytest.param(
            "Qwen3Model", KEY_HEADS, r"layers\.0\..*(q_proj|down_proj)", marks=pytest.mark.full
        ),
        pytest.param(
            "GPT2Model", {"n_head": 4}, r"h\.0\..*(c_attn|c_proj)", marks=pytest.mark.full
        ),
    ],
)
def test_ranks_and_stages_of_an_encoder_have_its_adapters(tmp_path, rng, kind, config, targets):
    folder = save_checkpoint(tmp_path, kind, **config)
    fields = {"fan_in_fan_out": True} if kind == "GPT2Model" else {}
    configs = {
        "a": {"r": 4, "lora_alpha": 8},
        "b": {"r": 2, "target_modules": targets},
    }
    models = save_all(folder, kind, {name: {**each, **fields} for name, each in configs.items()})
    checkpoint = Checkpoint.open(folder)
    prompts = [Prompt(rng.integers(5, 40, n, dtype=np.int32)) for n in (9, 1, 30, 7)]
    names = ["a", "", "b", "a"]
    options = [RequestOptions(adapter=name) for name in names]

    def run(link):
        settings = {"tensor_parallel": link.rank.size, "pipeline_parallel": link.stage.count}
        runner = Runner(checkpoint, replace(CONFIG, task="hidden", **settings), link=link)
        return [runner.run(prompts, options) for _ in range(2)], runner.state.adapters.states

    with torch.inference_mode():
        expected = [
            models[name](input_ids=torch.tensor([prompt.token_ids.tolist()])).last_hidden_state[0]
            for name, prompt in zip(names, prompts, strict=True)
        ]
    whole = Runner(checkpoint, replace(CONFIG, task="hidden"))
    of_whole = sum(each.nbytes for each in whole.state.adapters.states.values())
    for on, leader in ((on_stages, -1), (on_ranks, 0)):
        found = on(2, run)
        for answers in found[leader][0]:
            roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
            assert_rows_close(answers, expected, roundings=roundings)
        # each holds some of the tables, or a part of each; parts are padded to whole steps
        sizes = [sum(each.nbytes for each in states.values()) for _, states in found]
        assert max(sizes) < of_whole
        assert on is on_ranks or sum(sizes) == of_whole


@pytest.mark.parametrize(
    "kind, config",
    [
        ("Qwen2ForCausalLM", KEY_HEADS),
        pytest.param("MarianMTModel", BART, marks=pytest.mark.full),
        pytest.param("T5ForConditionalGeneration", {"num_heads": 4}, marks=pytest.mark.full),
    ],
)
def test_ranks_and_stages_of_a_generator_have_its_adapters(tmp_path, kind, config):
    folder = save_checkpoint(tmp_path, kind, **config)
    save_all(folder, kind, {"a": {"r": 4, "lora_alpha": 8}, "b": {"r": 2}})
    checkpoint = Checkpoint.open(folder)

    def logits_of(runner, number):
        chunk = _choosing(_chunk(runner, 5, 7))._replace(token_ids=(2, 9, 4, 7, 5))
        chunk = chunk._replace(samples=(chunk.sequence,))
        if runner.info.has_sources:
            chunk = chunk._replace(encodes=(9, 8, 30, 12, 11, 40, 2))
        size, numbers = runner.info.block_size, {ADAPTERS: np.array([number], np.int32)}
        inputs, sources = step_arrays([chunk], size), source_arrays([chunk], size)
        sources = {**sources, **numbers} if sources else sources
        return runner.run_part(part_of_step({**inputs, **numbers}, sources=sources)).clone()

    def run(link):
        settings = {"tensor_parallel": link.rank.size, "pipeline_parallel": link.stage.count}
        runner = Runner(checkpoint, replace(CONFIG, **settings), NoChooser(), link=link)
        # as many steps as two stages may have in flight
        return [logits_of(runner, number) for number in (1, -1)]

    expected = run(NO_OTHERS)
    for on, leader in ((on_stages, -1), (on_ranks, 0)):
        for mine, one in zip(on(2, run)[leader], expected, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-4, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 0.01


def test_an_adapter_that_one_rank_cannot_read_fails_on_all_and_changes_no_other(tmp_path, rng):
    folder = save_checkpoint(tmp_path, "BertModel", num_attention_heads=4)
    save_all(folder, "BertModel", {"a": {"r": 4}, "b": {"r": 2}})
    checkpoint = Checkpoint.open(folder)
    prompts = [Prompt(rng.integers(5, 40, n, dtype=np.int32)) for n in (9, 1, 30, 7)]

    def answers(runner, *names):
        return runner.run(prompts, [RequestOptions(adapter=name) for name in names])

    def run(link):
        config = replace(CONFIG, task="hidden", tensor_parallel=link.rank.size)
        runner = Runner(checkpoint, config, link=link)
        adapters = runner.state.adapters
        read = adapters._fault_of_read
        if link.rank.number == 1:
            adapters._fault_of_read = lambda number, slot: (
                "it is lost" if number else read(number, slot)
            )
        with pytest.raises(AdapterFaultError, match='"b": it is lost'):
            answers(runner, "a", "", "b", "a")
        adapters._fault_of_read = read
        # what a rank has read of it is read again, and "a" is not
        others = answers(runner, "a", "", "", "a")
        return others, answers(runner, "a", "", "b", "a"), list(adapters._slots)

    whole = Runner(checkpoint, replace(CONFIG, task="hidden"))
    roundings = _MORE_ROUNDINGS * encoder_roundings(folder)
    for number, (others, all_, slots) in enumerate(on_ranks(2, run)):
        assert slots == [0, 1]
        if number == 0:
            assert_rows_close(others, answers(whole, "a", "", "", "a"), roundings=roundings)
            assert_rows_close(all_, answers(whole, "a", "", "b", "a"), roundings=roundings)


def test_stages_hold_all_adapters_or_the_model_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel")
    for name in "abc":
        save_adapter(folder, "BertModel", name, r=2)
    checkpoint = Checkpoint.open(folder)
    needed = Runner(checkpoint, replace(CONFIG, task="hidden")).info.adapter_bytes

    def run(link):
        settings = {"task": "hidden", "adapter_bytes": 2 * needed}
        with pytest.raises(
            ConfigError, match="holds 2 of 3 adapters; ranks and stages hold all of them"
        ):
            Runner(checkpoint, staged(2, **settings), link=link)
        return True

    assert on_stages(2, run) == [True, True]


def test_a_layer_that_an_adapter_brings_whole_and_ranks_divide_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, "BertModel", num_attention_heads=4)
    whole = {"target_modules": ["query"], "modules_to_save": ["attention.output.dense"]}
    save_adapter(folder, "BertModel", "a", r=2, **whole)
    checkpoint = Checkpoint.open(folder)

    def reason(link):
        config = replace(CONFIG, task="hidden", tensor_parallel=link.rank.size)
        return dict(Runner(checkpoint, config, link=link).info.adapters)["a"]

    assert reason(NO_OTHERS) == ""
    for each in on_ranks(2, reason):
        assert "whole, which ranks divide" in each
