"""Random batches at load: they fill the largest graphs, and NaN refuses the model."""

import logging
from copy import copy
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.repeated_work import RepeatedWork
from varlen.config import EngineConfig
from varlen.errors import ConfigError, ModelFaultError
from varlen.execution import runner as runner_module
from varlen.execution import warm_up as warm_up_module
from varlen.execution.cuda.graphs import Bucket, Buckets
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.model_state import OneShot
from varlen.execution.packing import largest_dims
from varlen.execution.runner import Runner
from varlen.execution.token_state import NoChooser
from varlen.execution.warm_up import check_numbers, random_lengths, warm_up, warm_up_kernels
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import MAX_MASKS
from varlen_kernels import reference

MAX_TOKENS, MAX_SEQUENCES = 320, 16


@given(st.integers(1, 5000), st.integers(1, 70), st.integers(1, 600), st.integers(0, 9))
def test_lengths_fill_a_bucket_as_far_as_the_longest_sequence_allows(tokens, count, longest, seed):
    count = min(count, tokens)

    lengths = random_lengths(Bucket(tokens, count), longest, np.random.default_rng(seed))

    assert len(lengths) == count
    assert lengths.min() >= 1
    assert lengths.max() <= longest
    assert lengths.sum() == min(tokens, count * longest) or longest < -(-tokens // count)


def test_lengths_differ():
    lengths = random_lengths(Bucket(4096, 64), 512, np.random.default_rng(0))

    assert lengths.sum() == 4096
    assert len(set(lengths.tolist())) > 20


@pytest.fixture
def make(runner):
    """Return a function that makes the executor of a GPU with these kernels."""

    def make(kernels=reference):
        largest = largest_dims(MAX_TOKENS, MAX_SEQUENCES)
        arena = Arena(Layout(runner.program.buffers, 256), largest, torch.device("cpu"))
        made = copy(runner)
        made.state = OneShot(CudaRunner(runner.program, kernels, arena, RepeatedWork()))
        return made

    return make


def test_the_largest_graph_of_each_class_runs_a_full_batch(make, runner, monkeypatch, caplog):
    executor, ran = make(), []
    monkeypatch.setattr(
        OneShot, "run", lambda _, prompts, options: ran.append(prompts) or [np.zeros(3)]
    )

    with caplog.at_level(logging.INFO, "varlen"):
        check_numbers(executor)

    classes = Buckets(MAX_TOKENS, MAX_SEQUENCES).largest_of_each_class()
    assert len(classes) == 3
    shapes = [(sum(p.num_tokens for p in prompts), len(prompts)) for prompts in ran]
    assert shapes == [(bucket.tokens, bucket.sequences) for bucket in classes]
    assert "3 random batches have no NaN in their answers" in caplog.text
    ids = np.concatenate([prompt.token_ids for prompts in ran for prompt in prompts])
    assert 0 <= ids.min() < ids.max() < runner.info.vocab_size


def test_batches_of_a_model_that_fills_masks_have_masks(make, runner, monkeypatch):
    executor, ran = make(), []
    monkeypatch.setattr(OneShot, "run", lambda _, prompts, options: ran.extend(prompts) or [])

    executor.info = replace(runner.info, task="fill_mask")
    check_numbers(executor)

    assert all(each.num_masks == min(each.num_tokens, MAX_MASKS) for each in ran)


def test_a_model_that_computes_numbers_passes(make):
    check_numbers(make())


def test_nan_refuses_the_model(make, monkeypatch):
    executor = make()
    run = OneShot.run

    def broken(state, prompts, options):
        answers = run(state, prompts, options)
        answers[-1][-1] = np.nan
        return answers

    monkeypatch.setattr(OneShot, "run", broken)

    with pytest.raises(
        ConfigError, match="16 sequences, 320 tokens, has answers with NaN in float32"
    ):
        check_numbers(executor)


def test_a_gpu_that_never_ends_a_batch_refuses_the_model(make, runner, monkeypatch):
    executor, go_on = make(), Event()
    monkeypatch.setattr(OneShot, "run", lambda *_: go_on.wait(10.0))

    with pytest.raises(ModelFaultError, match="it hangs"):
        check_numbers(executor, timeout=0.05)

    go_on.set()


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_nan_in_logits_refuses_a_model_that_generates(make_checkpoint, monkeypatch, kind):
    config = EngineConfig(device="cpu", dtype="fp32", max_running_sequences=6, warmup_seconds=0)
    runner = Runner(Checkpoint.open(make_checkpoint(kind)), config, NoChooser())
    warm_up(runner)
    run, steps = runner.decoder.steps.run, []

    def broken(arrays, dims, slot):
        steps.append(len(arrays["context_lens"]))
        found = run(arrays, dims, slot)
        # six sequences and a short one
        if steps[-1] == 7:
            found[6, 3] = torch.nan
        return found

    monkeypatch.setattr(runner.decoder.steps, "run", broken)
    with pytest.raises(ConfigError, match="7 sequences have logits with NaN in float32"):
        warm_up(runner)
    assert steps[-1] == 7


@pytest.mark.parametrize("hangs_at", [0, -1], ids=["in its first step", "once it is compiled"])
def test_a_gpu_that_never_ends_a_step_refuses_a_model_that_generates(
    make_checkpoint, monkeypatch, hangs_at
):
    config = EngineConfig(device="cpu", dtype="fp32", max_running_sequences=2, warmup_seconds=0)
    runner = Runner(Checkpoint.open(make_checkpoint("GPT2LMHeadModel")), config, NoChooser())
    run, limits, go_on = runner.decoder.steps.run, [], Event()
    runner.device = torch.device("cuda")
    monkeypatch.setattr(runner.decoder, "_copy_blocks", lambda copies: None)
    within = warm_up_module.call_within

    def recorded(seconds, function, *, compile_seconds=0.0):
        limits.append((seconds, compile_seconds))
        return within(seconds, function, compile_seconds=compile_seconds and 0.1)

    monkeypatch.setattr(warm_up_module, "call_within", recorded)
    warm_up(runner, timeout=60)
    # the steps may compile, and the last one has nothing to compile
    steps, limits[:] = limits[:], []
    assert {each[0] for each in steps} == {60}
    assert min(each[1] for each in steps[:-1]) > 60
    assert steps[-1] == (60, 0)

    monkeypatch.setattr(
        runner.decoder.steps,
        "run",
        lambda arrays, dims, slot: (
            go_on.wait(10.0)
            if len(limits) - 1 == hangs_at % len(steps)
            else run(arrays, dims, slot)
        ),
    )
    with pytest.raises(ModelFaultError, match=r"not ended its first work in 0\.\d+ s .*: it hangs"):
        warm_up(runner, timeout=0.5)

    go_on.set()


def test_too_little_memory_for_graphs_names_the_setting_to_lower(small_bert, monkeypatch):
    def no_memory(*_, **__):
        raise torch.AcceleratorError(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"
        )

    monkeypatch.setattr(runner_module, "CpuRunner", no_memory)

    with pytest.raises(ConfigError, match="graphs of batches up to 4096 tokens: lower max_batch_t"):
        Runner(Checkpoint.open(small_bert), EngineConfig(device="cpu", dtype="fp32"))


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_a_gpu_runs_prompts_of_all_forms_before_it_serves(make_checkpoint, monkeypatch, kind):
    config = EngineConfig(
        device="cpu", dtype="fp32", max_running_sequences=6, max_step_tokens=40, warmup_seconds=0
    )
    runner = Runner(Checkpoint.open(make_checkpoint(kind)), config, NoChooser())
    run, shapes = runner.decoder.steps.run, []
    monkeypatch.setattr(
        runner.decoder.steps,
        "run",
        lambda arrays, dims, slot: (
            shapes.append(np.diff(arrays["cu_seqlens"]).tolist()) or run(arrays, dims, slot)
        ),
    )

    warm_up_kernels(runner)

    assert all(sum(lengths) <= 40 for lengths in shapes)
    # one prompt, several, and single tokens beside one
    assert [2] in shapes
    assert [16, 16] in shapes
    # six sequences and a short one
    assert [2, 1, 1, 1, 1, 1, 1] in shapes
