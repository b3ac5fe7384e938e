"""Families whose layers several stages hold: the stages give what one process gives."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Barrier

import numpy as np
import pytest
import torch

from tests.closeness import assert_close, encoder_roundings
from tests.quantized import save_quantized
from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution import programs
from varlen.execution.cpu import stage_cut
from varlen.execution.rank_link import NO_OTHERS, Handoffs
from varlen.execution.runner import Runner
from varlen.execution.token_state import NoChooser
from varlen.memory.planner import new_shared
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import NO_STATES
from varlen.program.rank import ALONE
from varlen.program.stages import Stage
from varlen.request.request import (
    DEFAULT_OPTIONS,
    Masks,
    Payload,
    Prompt,
    Spans,
    Unpooled,
)
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops

from .divided import CONFIG, DECODERS, ENCODERS, HEADS, TRANSLATORS, logits_of

# The small encoders have two layers, decoders three. ALBERT has one that it repeats.
DEEP = {"BertModel": {"num_hidden_layers": 5}, "T5EncoderModel": {"num_layers": 4}}


class ThreadLink:
    """The link of a stage that is a thread: a `RankLink`.

    Attributes:
        arrived: messages of the stage before it.
    """

    rank, states = ALONE, NO_STATES

    def __init__(self, stage, files, decided, barrier):
        self.stage = stage
        self.handoffs = Handoffs(*map(_another, files), slots=stage.count)
        self.arrived, self.after = SimpleQueue(), None
        self._decided, self._barrier = decided, barrier

    def agree(self, decide, meanwhile=None):
        del meanwhile
        if self.stage.is_last:
            self._decided.append(decide())
        self._barrier.wait(60)
        value = self._decided[-1]
        self._barrier.wait(60)
        return value

    def fault_of_ranks(self, fault):
        return fault

    @contextmanager
    def running(self, work):
        del work
        if self.stage.number:
            self.arrived.get(timeout=60)
        self.handoffs.next()
        yield
        if self.after is not None:
            self.after.arrived.put(None)


def _another(file):
    """Return another descriptor of a file, which its stage closes."""
    return None if file is None else os.dup(file)


def on_stages(count, run):
    """Return what `run` returns for the link of each stage, all at the same time."""
    files, decided, barrier = [new_shared(0) for _ in range(count - 1)], [], Barrier(count)
    links = [
        ThreadLink(Stage(number, count), between, decided, barrier)
        for number, between in enumerate(pairwise([None, *files, None]))
    ]
    for link, after in pairwise(links):
        link.after = after
    with ThreadPoolExecutor(count) as pool:
        found = [job.result() for job in [pool.submit(run, link) for link in links]]
    for file in files:
        os.close(file)
    return found


def staged(count, **settings):
    return replace(CONFIG, pipeline_parallel=count, **settings)


@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind != "AlbertModel"])
def test_stages_of_an_encoder_give_what_one_process_gives(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind, **{**ENCODERS[kind], **DEEP.get(kind, {})})
    checkpoint = Checkpoint.open(folder)
    # as many as two stages have in flight
    lengths = (9, 1, 30), (7, 7)
    batches = [[Prompt(rng.integers(5, 40, n, dtype=np.int32)) for n in each] for each in lengths]
    alone = Runner(checkpoint, CONFIG)
    expected = [alone.run(prompts, [DEFAULT_OPTIONS] * len(prompts)) for prompts in batches]

    def run(link):
        runner = Runner(checkpoint, staged(link.stage.count), link=link)
        return [runner.run(prompts, [DEFAULT_OPTIONS] * len(prompts)) for prompts in batches]

    for count in (2, 4) if kind in DEEP else (2,):
        *others, last = on_stages(count, run)
        assert others == [[[]] * len(batches)] * (count - 1)
        for answers, of_batch in zip(last, expected, strict=True):
            for found, one in zip(answers, of_batch, strict=True):
                assert_close(found, one, roundings=encoder_roundings(folder))


@pytest.mark.parametrize(
    "kind, task, payload",
    [
        ("BertForMaskedLM", "fill_mask", Masks(np.array([0, 2], np.int32))),
        ("BertForMaskedLM", "sparse_embed", Payload()),
        ("BertForTokenClassification", "token_classify", Payload()),
        ("BertForSequenceClassification", "classify", Payload()),
        ("BertModel", "hidden", Payload()),
        ("BertModel", "embed", Unpooled(count=1)),
        ("BertModel", "embed", Spans(np.array([0, 2, 1, 4], np.int32))),
    ],
)
def test_stages_serve_every_task_of_an_encoder(make_checkpoint, rng, kind, task, payload):
    folder = make_checkpoint(kind)
    checkpoint, settings = Checkpoint.open(folder), {"task": task}
    prompts = [Prompt(rng.integers(5, 40, n, dtype=np.int32), None, payload) for n in (9, 4)]
    options = [DEFAULT_OPTIONS] * len(prompts)
    expected = Runner(checkpoint, replace(CONFIG, **settings)).run(prompts, options)

    *_, found = on_stages(
        2, lambda link: Runner(checkpoint, staged(2, **settings), link=link).run(prompts, options)
    )

    for mine, one in zip(found, expected, strict=True):
        assert_close(mine, one, roundings=encoder_roundings(folder))


def test_stages_in_bf16_hand_over_what_one_process_computes(make_checkpoint, rng):
    folder = make_checkpoint("BertModel", **HEADS, **DEEP["BertModel"])
    checkpoint, config = Checkpoint.open(folder), replace(CONFIG, dtype="bf16")
    prompts = [Prompt(rng.integers(5, 40, n, dtype=np.int32)) for n in (9, 30)]
    options = [DEFAULT_OPTIONS] * len(prompts)
    expected = Runner(checkpoint, config).run(prompts, options)

    *_, found = on_stages(
        3, lambda link: Runner(checkpoint, staged(3, dtype="bf16"), link=link).run(prompts, options)
    )

    # nothing is rounded that is not rounded in one process
    for mine, one in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, one)


@pytest.mark.parametrize(
    "kind, count",
    [
        *((kind, 2) for kind in (*DECODERS, *TRANSLATORS)),
        *(
            (kind, 3)
            for kind in ("GPT2LMHeadModel", "Qwen3ForCausalLM", "T5ForConditionalGeneration")
        ),
    ],
)
def test_stages_of_a_generator_give_the_logits_of_one_process(make_checkpoint, kind, count):
    checkpoint = Checkpoint.open(make_checkpoint(kind, **{**DECODERS, **TRANSLATORS}[kind]))
    expected = logits_of(Runner(checkpoint, CONFIG, NoChooser()))

    def logits(link):
        return logits_of(Runner(checkpoint, staged(count), NoChooser(), link=link))

    *_, found = on_stages(count, logits)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the products")
@pytest.mark.parametrize("form", ["packed-4-asymmetric", "gptq-asymmetric", "nf4", "int8"])
def test_stages_keep_codes(tmp_path, monkeypatch, form):
    save_quantized(tmp_path, form)
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(programs, "choose_dtype", lambda *_: torch.float32)

    def run(link=NO_OTHERS):
        runner = Runner(checkpoint, staged(link.stage.count, dtype="auto"), NoChooser(), link=link)
        kept = [op.kernel for op in runner.programs[0].ops].count("linear_blocks")
        return kept, logits_of(runner)

    (kept, expected), stages = run(), on_stages(2, run)

    assert kept > 0
    assert [part for part, _ in stages] == [kept // 2] * 2
    torch.testing.assert_close(stages[-1][1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the products")
def test_stages_of_an_encoder_keep_codes(tmp_path, monkeypatch, rng):
    save_quantized(tmp_path, "awq", "BertModel", **HEADS, hidden_size=32, intermediate_size=64)
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(programs, "choose_dtype", lambda *_: torch.float32)
    prompts = [Prompt(rng.integers(5, 40, n, dtype=np.int32)) for n in (9, 30)]

    def run(link=NO_OTHERS):
        runner = Runner(checkpoint, staged(link.stage.count, dtype="auto"), link=link)
        assert "linear_blocks" in {op.kernel for op in runner.programs[0].ops}
        return runner.run(prompts, [DEFAULT_OPTIONS] * len(prompts))

    expected, (*_, found) = run(), on_stages(2, run)

    for mine, one in zip(found, expected, strict=True):
        assert_close(mine, one, roundings=encoder_roundings(tmp_path))


def test_a_stage_holds_the_weights_of_its_own_layers(make_checkpoint):
    sizes = {"n_embd": 64, "n_inner": 256, "n_layer": 6, "n_head": 4, "n_positions": 64}
    checkpoint = Checkpoint.open(make_checkpoint("GPT2LMHeadModel", **sizes))

    def held(link):
        runner = Runner(checkpoint, staged(3), NoChooser(), link=link)
        assert not any(weight.is_meta for weight in runner.programs[0].weights)
        return runner.info.weight_bytes, runner.info.num_blocks, len(runner.programs[0].states)

    whole = Runner(checkpoint, CONFIG, NoChooser())
    stages = on_stages(3, held)

    sizes = [size for size, *_ in stages]
    # the first and the last one have the table of tokens
    table = whole.info.vocab_size * 64 * 4
    assert sum(sizes) == whole.info.weight_bytes + table
    assert max(sizes) <= (whole.info.weight_bytes + 2 * table) / 3 * 1.1
    assert len({blocks for _, blocks, _ in stages}) == 1
    assert sum(states for *_, states in stages) == 2 * 6


def test_a_cut_is_measured_for_each_dtype_and_task_and_then_stored(
    make_checkpoint, tmp_path, monkeypatch
):
    checkpoint, measured = Checkpoint.open(make_checkpoint("BertModel")), []

    def measure(program, **_):
        measured.append({weight.dtype for weight in program.weights} & {torch.bfloat16})
        return [float(op.kernel == "linear") for op in program.ops]

    monkeypatch.setattr(stage_cut, "_measure", measure)

    def load(link, **settings):
        config = staged(2, warmup_seconds=1, cache_folder=str(tmp_path), **settings)
        Runner(checkpoint, config, measures=True, link=link)

    for settings in ({}, {"dtype": "bf16"}, {"task": "hidden"}, {}, {"dtype": "bf16"}):
        on_stages(2, partial(load, **settings))

    assert measured == [set(), {torch.bfloat16}, set()]


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("BertModel", {"num_hidden_layers": 2}, "has 2 layers with .* allowed are 1 to 2"),
        ("AlbertModel", {"num_hidden_layers": 6}, "has 1 layers with weights of their own"),
        (
            "ModernBertModel",
            {},
            "a ModernBertModel runs in one process; allowed are most classes of ",
        ),
    ],
)
def test_a_model_that_stages_cannot_divide_is_refused(make_checkpoint, kind, fields, message):
    checkpoint = Checkpoint.open(make_checkpoint(kind, **fields))

    def run(link):
        with pytest.raises(ConfigError, match=message):
            Runner(checkpoint, staged(3), link=link)
        return True

    # the last stage decides
    link = ThreadLink(Stage(2, 3), (None, None), [], Barrier(1))
    assert run(link)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"dtype": "int8"}, "allowed with stages: auto, fp32, bf16"),
        ({"tensor_parallel": 2}, "pipeline_parallel is 2 and tensor_parallel is 2"),
    ],
)
def test_settings_that_no_stage_has_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(pipeline_parallel=2, **settings)
