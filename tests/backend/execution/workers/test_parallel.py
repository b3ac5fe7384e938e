"""Models that ranks or stages hold: answers as of one process, also after faults."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.adapters import overwrite, save_adapter
from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from tests.processes import is_gone
from tests.threads import arriving_together
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.errors import ConfigError, EngineError
from varlen.in_process.generator import Generator
from varlen.service.generation import GeneratorParts
from varlen.service.one_shot import EncoderParts
from varlen.service.service import Service
from varlen.telemetry.metrics import CountedMetric, Stats

# small, so that prompts run in chunks, sequences wait for others, and some are preempted
SETTINGS = {
    "device": "cpu",
    "dtype": "fp32",
    "max_running_sequences": 4,
    "max_step_tokens": 48,
    "kv_block_tokens": 16,
    "warmup_seconds": 0,
    "threads": 2,
}
# Key heads are divided among two ranks, and held twice by four.
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 6}
DECODERS = {
    "gpt2": ("GPT2LMHeadModel", {"n_head": 4, "n_embd": 40}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 10}),
    "marian": (
        "MarianMTModel",
        {"d_model": 40, "encoder_attention_heads": 2, "decoder_attention_heads": 4},
    ),
    "t5": ("T5ForConditionalGeneration", {"num_heads": 4}),
}
OPTIONS = (
    {"temperature": 0.0, "max_tokens": 30},
    {"seed": 1, "top_p": 0.9, "max_tokens": 30},
    {"seed": 2, "n": 2, "max_tokens": 12},
    {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 20},
    {"num_beams": 3, "max_tokens": 12},
    {"num_beams": 2, "repetition_penalty": 1.3, "max_tokens": 12},
)
LENGTHS = (1, 130, 7, 64, 31, 79)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function that saves a checkpoint once."""
    made = {}

    def save(name):
        if name not in made:
            kind, fields = DECODERS[name]
            made[name] = save_checkpoint(tmp_path_factory.mktemp(name) / name, kind, **fields)
        return made[name]

    return save


@contextmanager
def generator(folder, **settings):
    config = EngineConfig(**SETTINGS, **settings)
    service = Service.load(
        GeneratorParts, folder, config, Stats(), isolated=config.num_processes > 1
    )
    with Generator(service) as found:
        yield found


def prompt_of(length):
    return np.random.default_rng(length).integers(1, 200, length).tolist()


def answers(model):
    """Return the tokens of requests that run at the same time."""
    with arriving_together(model):
        running = [
            model.submit(
                prompt_of(length),
                model._service.model.options({**options, "ignore_eos": "num_beams" not in options}),
            )
            for length in LENGTHS
            for options in OPTIONS
        ]
    return [[each.token_ids for each in one.result()] for one in running]


RANKS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}


@pytest.mark.parametrize(
    "processes, name, blocks",
    [
        (RANKS, "gpt2", 11),
        (STAGES, "gpt2", 15),
        pytest.param(RANKS, "qwen3", 11, marks=pytest.mark.full),
        pytest.param({"tensor_parallel": 4}, "llama", 22, marks=pytest.mark.full),
        # as many blocks as the largest of stages has, which has one layer of three
        pytest.param({"pipeline_parallel": 3}, "qwen3", 11, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_process(make, processes, name, blocks):
    with generator(make(name)) as alone:
        expected = answers(alone)
        info = alone._service.model.runner.info
    # so few that sequences are preempted; where two ranks hold the same key head, each has half of them
    settings = {"kv_policy": "optimistic", "kv_bytes": blocks * info.block_bytes}
    with generator(make(name), **processes, **settings) as model:
        found = answers(model)
        preemptions = model.snapshot().preemptions
        assert model._service.model.runner.info.vocab_size == info.vocab_size

    assert found == expected
    assert preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "name, processes",
    [
        ("marian", RANKS),
        ("marian", STAGES),
        ("t5", RANKS),
        ("t5", STAGES),
    ],
    ids=str,
)
def test_translations_are_those_of_one_process(make, name, processes):
    def translations(model):
        requests = [
            (prompt_of(length), {"num_beams": beams, "max_tokens": 20, **penalty})
            for length in (1, 9, 30)
            for beams in (1, 4)
            for penalty in ({}, {"repetition_penalty": 1.3})
        ]
        with ThreadPoolExecutor(len(requests)) as pool:
            running = [pool.submit(model.generate, [ids], **options) for ids, options in requests]
        return [one.result()[0].token_ids for one in running]

    with generator(make(name)) as alone:
        expected = translations(alone)
    with generator(make(name), **processes) as model:
        assert translations(model) == expected


def processes_of(model):
    """Return the process ids of the leader and of the others."""
    leader = model._service.model.runner.pid
    tasks = Path(f"/proc/{leader}/task").iterdir()
    return [leader, *sorted(int(n) for t in tasks for n in (t / "children").read_text().split())]


def tokens_although_lost(model, options, place, number):
    """Return the tokens of a stream that loses a process."""
    before, found = processes_of(model), []
    for part in model.stream(prompt_of(5), **options):
        found += part.token_ids
        if len(found) == 20:
            os.kill(before[place], number)
    # stopped ones too
    assert all(map(is_gone, before))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "processes, name", [(RANKS, "rank 1 of 2"), (STAGES, "stage 1 of 2")], ids=["ranks", "stages"]
)
def test_lost_processes_cost_no_token_until_there_are_too_many(make, caplog, processes, name):
    options = {"temperature": 0.0, "max_tokens": 250, "ignore_eos": True}
    with generator(make("gpt2"), **processes, rank_timeout_seconds=1) as model:
        expected = [
            token for part in model.stream(prompt_of(5), **options) for token in part.token_ids
        ]

        tokens = partial(tokens_although_lost, model, options)
        assert tokens(1, signal.SIGKILL) == expected
        stopped = processes_of(model)[1]
        assert tokens(1, signal.SIGSTOP) == expected
        assert f"{name} (process {stopped}) did not answer within 1 s" in caplog.text
        assert tokens(0, signal.SIGSTOP) == expected
        lost = processes_of(model)
        with pytest.raises(EngineError) as caught:
            tokens(1, signal.SIGKILL)

        reason = f"{name} (process {lost[1]}) ended with code -9, after 3 others within 600 s"
        assert reason in str(caught.value)
        assert "reload it" in str(caught.value)
    assert all(map(is_gone, lost))


@pytest.mark.full
def test_the_stage_behind_one_that_stops_names_it(make, caplog):
    options = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    with generator(make("gpt2"), pipeline_parallel=3, rank_timeout_seconds=1) as model:
        tokens_although_lost(model, options, 1, signal.SIGSTOP)

    reason = r"stage 2 of 3 \(process \d+\): stage 1 did not answer within 1 s"
    assert re.search(reason, caplog.text)


@pytest.mark.parametrize(
    "processes", [RANKS, pytest.param(STAGES, marks=pytest.mark.full)], ids=str
)
@pytest.mark.parametrize(
    "kind", ["BertModel", pytest.param("GPT2LMHeadModel", marks=pytest.mark.full)]
)
def test_an_adapter_that_is_overwritten_fails_its_requests_and_ends_no_process(
    tmp_path, kind, processes
):
    generates = kind != "BertModel"
    fields = {"fan_in_fan_out": True} if generates else {"r": 2}
    folder = save_checkpoint(
        tmp_path / "model", kind, **({"n_head": 4} if generates else {"num_attention_heads": 4})
    )
    for name in ("a", "b"):
        save_adapter(folder, kind, name, **fields)
    settings = SETTINGS if generates else {"device": "cpu", "dtype": "fp32", "warmup_seconds": 0}
    config = EngineConfig(**{**settings, "threads": 2}, **processes)
    parts, form = (GeneratorParts, Generator) if generates else (EncoderParts, Encoder)
    stats = Stats()
    names = ["a", "b", ""] * 4

    def answer(model, name):
        model = model.with_adapter(name)
        try:
            if not generates:
                return model.embed(["the cat"])[0].tolist()
            options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
            return model.generate([prompt_of(5)], **options)[0].token_ids
        except EngineError as error:
            return str(error)

    with form(Service.load(parts, folder, config, stats, isolated=True)) as model:
        overwrite(folder / "adapters/b")
        with ThreadPoolExecutor(len(names)) as pool:
            found = list(pool.map(partial(answer, model), names))

    for name, each in zip(names, found, strict=True):
        assert ("was changed after it was loaded" in str(each)) == (name == "b"), each
    for name in ("a", ""):
        answers_of = [each for each, own in zip(found, names, strict=True) if own == name]
        np.testing.assert_allclose(answers_of, [answers_of[0]] * 4, rtol=1e-4, atol=1e-5)
    assert not stats.drain().counts.get(CountedMetric.WORKER_RESTARTS)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tensor_parallel": 3}, "4 query heads"),
        pytest.param(
            {"tensor_parallel": 2, "dtype": "int8"},
            "allowed with ranks: auto, fp32, bf16",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"pipeline_parallel": 4},
            "this model has 3 layers .* allowed are 1 to 3",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(make, settings, message):
    with pytest.raises(ConfigError, match=message):
        Service.load(
            GeneratorParts,
            make("gpt2"),
            EngineConfig(**{**SETTINGS, **settings}),
            Stats(),
            isolated=True,
        )


@pytest.mark.parametrize("processes", [RANKS, STAGES], ids=str)
def test_they_need_processes_of_their_own(make, processes):
    config = EngineConfig(**SETTINGS, **processes)

    with pytest.raises(ConfigError, match="needs a server; in process, a model is one process"):
        Service.load(GeneratorParts, make("gpt2"), config, Stats())


@pytest.mark.full
@pytest.mark.parametrize("processes", [RANKS, STAGES], ids=str)
def test_vectors_of_an_encoder_are_those_of_one_process(tmp_path, processes):
    folder = save_checkpoint(tmp_path / "bert", num_attention_heads=4)
    texts = ["the cat", "river", "a b c d e f", "the the the river " * 9] * 3
    with Encoder.from_pretrained(folder, device="cpu", dtype="fp32") as alone:
        expected = alone.embed(texts)
    parallel = EngineConfig(device="cpu", dtype="fp32", threads=2, warmup_seconds=0, **processes)

    def embed(model):
        """Return the vectors of requests that run at the same time."""
        with ThreadPoolExecutor(8) as pool:
            return [job.result() for job in [pool.submit(model.embed, texts) for _ in range(20)]]

    with Encoder(Service.load(EncoderParts, folder, parallel, Stats(), isolated=True)) as model:
        found = embed(model)
        leader = model._service.model.workers.host.pid
        with ThreadPoolExecutor(1) as pool:
            # batches in flight run again
            again = pool.submit(embed, model)
            os.kill(leader, signal.SIGKILL)
            found += again.result()

    for vectors in found:
        assert_close(vectors, expected, roundings=encoder_roundings(folder))
