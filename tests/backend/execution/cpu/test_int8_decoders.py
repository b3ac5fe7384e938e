"""Models that generate in int8: logits close to fp32, in any batch and process."""

import logging
import shutil

import numpy as np
import pytest
import torch

from tests.closeness import encoder_roundings, relative_error
from varlen import Encoder, Generator
from varlen.config import EngineConfig
from varlen.execution.device import choose_dtype
from varlen.execution.int8 import calibration as quality
from varlen.execution.int8 import int8_model
from varlen.execution.int8.calibration import BITS, Calibration, LogitQuality, compare_logits
from varlen.execution.int8.calibration_texts import TEXTS
from varlen.execution.int8.layer_inputs import CalibratedDecoder, calibration_kv
from varlen.execution.programs import record_steps
from varlen.execution.runner import Runner
from varlen.execution.token_state import NoChooser
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder
from varlen.service.generation import GeneratorParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats
from varlen_kernels.op_table import OPS

CPU = torch.device("cpu")
DECODERS = ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
TRANSLATORS = ["MarianMTModel", "BartForConditionalGeneration", "T5ForConditionalGeneration"]
_QUICK = ("GPT2LMHeadModel", "LlamaForCausalLM", "MarianMTModel", "T5ForConditionalGeneration")
# Several steps for a prompt, most of them without logits.
SETTINGS = {"device": "cpu", "threads": 1, "kv_bytes": 4_000_000}
STEPS = {"max_running_sequences": 6, "max_step_tokens": 40, "kv_block_tokens": 16}
PROMPTS = [[5, 9, 200], [7], list(range(1, 90)), [31, 30, 29, 28], list(range(100, 117))]


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    monkeypatch.setattr(int8_model, "TEXTS", TEXTS[:16])


# in `make test` one of each form of layers: fused or apart, with and without a bias, with and without an encoder
_FAMILIES = [
    pytest.param(family, marks=() if family in _QUICK else pytest.mark.full)
    for family in (*DECODERS, *TRANSLATORS)
]


@pytest.fixture(scope="module", params=_FAMILIES)
def folder(request, make_checkpoint):
    return make_checkpoint(request.param)


@pytest.fixture(scope="module")
def gpt2(make_checkpoint):
    return make_checkpoint("GPT2LMHeadModel")


def calibrated(folder):
    checkpoint = Checkpoint.open(folder)

    def record(dtype):
        return record_steps(load_decoder(checkpoint, dtype, CPU), calibration_kv(dtype))

    return CalibratedDecoder(record, checkpoint)


def runner_of(folder, dtype="int8"):
    config = EngineConfig(dtype=dtype, **SETTINGS, **STEPS)
    return Runner(Checkpoint.open(folder), config, NoChooser())


def answers_of(generator, prompts):
    """Return tokens and scores of answers that do not depend on chance."""
    is_search = generator._service.checkpoint.translate is not None
    options = {"num_beams": 3} if is_search else {"temperature": 0.0, "logprobs": 0}
    answers = generator.generate(prompts, max_tokens=12, **options)
    scores = [
        [answer.score] if is_search else [each.logprob for each in answer.logprobs]
        for answer in answers
    ]
    return [answer.token_ids for answer in answers], scores


@pytest.mark.parametrize("bits, largest", [(8, 0.1), (4, 0.5)])
def test_logits_are_close_to_fp32(folder, bits, largest):
    model = calibrated(folder)
    prompts = model.prompts([np.array(prompt[:60], np.int32) for prompt in PROMPTS])

    int8 = int8_model.to_int8(model, model.served, bits=bits)

    kernels = int8_model.cpu
    for actual, expected in zip(
        model.run(int8, kernels, prompts), model.run(model.programs, kernels, prompts), strict=True
    ):
        centered = expected - expected.mean(1, keepdim=True)
        error = (actual - expected).square().mean().sqrt() / centered.square().mean().sqrt()
        assert error < largest


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_all_layers_run_in_it_and_tables_do_not(folder, dtype):
    runner = runner_of(folder, dtype)

    ops = [op for program in runner.programs for op in program.ops]
    assert {op.kernel for op in ops if op.kernel.startswith("linear")} <= {
        name for name in OPS if name.startswith(f"linear_{dtype}")
    }
    tables = [op.operands[1] for op in ops if op.kernel == "embed"]
    assert {table.dtype for table in tables} == {choose_dtype(dtype, CPU)}
    assert runner.info.dtype == dtype
    assert runner.info.weight_bytes < runner_of(folder, "fp32").info.weight_bytes
    runner.close()


def test_an_answer_does_not_depend_on_other_sequences(folder):
    prompts = [prompt[:30] for prompt in PROMPTS]
    with Generator.from_pretrained(folder, dtype="int8", **SETTINGS, **STEPS) as generator:
        together, scores = answers_of(generator, prompts)
        alone = [answers_of(generator, [each]) for each in prompts]

    # attention may round in another order, which may change a code
    same = [tokens == expected for tokens, ([expected], _) in zip(together, alone, strict=True)]
    assert sum(same) >= len(same) - 1
    dtype = choose_dtype("int8", CPU)
    of_bf16 = relative_error(encoder_roundings(folder, dtype), dtype)
    for is_same, actual, (_, [expected]) in zip(same, scores, alone, strict=True):
        if is_same:
            largest = 0.02 if dtype == torch.float32 else of_bf16 * np.abs(expected).max()
            assert actual == pytest.approx(expected, abs=largest)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_process_gives_the_answers_of_this_one(folder, tmp_path, dtype):
    prompts = [prompt[:30] for prompt in PROMPTS]
    stored = shutil.copytree(folder, tmp_path / "stored")
    # the process does not have the texts of this test
    int8_model.calibrate(calibrated(stored), TEXTS[:12], BITS[dtype]).save(stored)
    config = EngineConfig(dtype=dtype, **SETTINGS, **STEPS)
    answers = []
    for isolated in (False, True):
        service = Service.load(GeneratorParts, stored, config, Stats(), isolated=isolated)
        with Generator(service) as generator:
            answers.append(answers_of(generator, prompts))

    assert answers[0][0] == answers[1][0]


def test_a_prompt_in_several_steps_is_close_to_fp32(gpt2):
    scores = []
    for dtype in ("fp32", "int8"):
        with Generator.from_pretrained(gpt2, dtype=dtype, **SETTINGS, **STEPS) as generator:
            [answer] = generator.generate(
                [list(range(1, 200))], max_tokens=1, temperature=0.0, logprobs=4
            )
            scores.append(answer.logprobs[0].logprob)

    assert scores[0] == pytest.approx(scores[1], abs=0.2)


def test_a_load_measures_the_quality_on_fewer_tokens_and_chooses_equal_codes(gpt2):
    model = calibrated(gpt2)
    model.enough_tokens = 100

    whole = int8_model.calibrate(model, TEXTS[:24])
    of_load = int8_model.calibrate(model, TEXTS[:24], is_load=True)

    assert whole.quality.tokens > 100 >= of_load.quality.tokens > 0
    assert of_load.quality.texts < whole.quality.texts == 12
    for layer, expected in zip(of_load.layers, whole.layers, strict=True):
        assert torch.equal(layer.codes, expected.codes)


def test_a_stored_calibration_is_read_and_one_of_another_task_is_not(
    make_checkpoint, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    folder = make_checkpoint("LlamaForCausalLM")
    calibration = int8_model.calibrate(calibrated(folder), TEXTS[:12])
    calibration.save(folder)

    assert Calibration.load(folder) == calibration
    runner_of(folder).close()
    assert "(6 texts), stored with the checkpoint" in caplog.text

    with Encoder.from_pretrained(folder, task="embed", dtype="int8", device="cpu"):
        pass
    assert "the stored calibration is of another checkpoint, task or CPU" in caplog.text


def test_layers_with_large_errors_are_not_in_int8(gpt2, monkeypatch):
    monkeypatch.setattr(int8_model, "MAX_LAYER_ERROR", {8: 0.0})

    runner = runner_of(gpt2)

    kernels = {op.kernel for op in runner.programs[0].ops if op.kernel.startswith("linear")}
    assert not any(kernel.startswith("linear_int8") for kernel in kernels)
    runner.close()


def test_a_low_quality_is_a_warning(gpt2, monkeypatch, caplog):
    monkeypatch.setattr(quality, "LARGEST_KL", -1.0)

    runner_of(gpt2).close()

    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "int8 changes the answers of this checkpoint: KL divergence" in warning.getMessage()


def test_targets_of_calibration_are_the_greedy_answers_of_fp32(make_checkpoint):
    folder = make_checkpoint("MarianMTModel")
    model = calibrated(folder)
    sources = [np.array(prompt[:40], np.int32) for prompt in PROMPTS]

    prompts = model.prompts(sources)

    settings = {**SETTINGS, "dtype": "fp32"}
    with Generator.from_pretrained(folder, **settings) as generator:
        answers = generator.generate([each.tolist() for each in sources], max_tokens=31)
    assert {prompt.token_ids[0] for prompt in prompts} == {model.checkpoint.translate.tokens.start}
    for prompt, answer in zip(prompts, answers, strict=True):
        # the last token of the longest answers is forced
        assert prompt.token_ids[1:30].tolist() == list(answer.token_ids[:29])


def test_tokens_that_are_never_chosen_do_not_keep_the_output_layer_in_fp32(make_checkpoint):
    fields = {"renormalize_logits": True, "bad_words_ids": [[1], [8]]}
    folder = make_checkpoint("MarianMTModel", files={"generation_config.json": fields})
    model = calibrated(folder)

    calibration = int8_model.calibrate(model, TEXTS[:12])

    assert max(layer.error for layer in calibration.layers) < int8_model.MAX_LAYER_ERROR[8]
    assert np.isfinite(calibration.quality.kl_mean)


def test_equal_logits_have_the_best_quality_and_noise_lowers_it():
    numbers = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 50, generator=numbers)
    logits[:, 7] = -torch.inf
    noisy = logits + torch.randn(9, 50, generator=numbers)
    token_ids = logits.argmax(1).int()

    best = compare_logits([(logits, logits, token_ids)] * 2)
    worse = compare_logits([(noisy, logits, token_ids)])

    assert (best.texts, best.tokens, best.kl_mean, best.same_best) == (2, 18, 0, 1)
    assert best.perplexity == best.fp32_perplexity
    assert worse.kl_mean > 0.1
    assert worse.same_best < 1
    assert isinstance(best, LogitQuality)
