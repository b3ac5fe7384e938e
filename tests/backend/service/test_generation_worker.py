"""Generation in a worker process: its end costs no request a token."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread, Timer
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import WEIGHTS, save_checkpoint
from tests.processes import is_gone
from tests.threads import arriving_together
from varlen.config import EngineConfig
from varlen.decoding.sampling.sampling import EditSlots
from varlen.errors import ConfigError, EngineError, ModelFaultError
from varlen.execution.model_state import DraftModel
from varlen.execution.packing import pack_step
from varlen.execution.runner import Runner
from varlen.execution.workers import steps
from varlen.execution.workers.process import RestartLimit
from varlen.in_process.generator import Generator
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.generation import GenerationOptions
from varlen.scheduling.iteration.step_size import DraftCost
from varlen.service.generation import GeneratorParts
from varlen.service.service import Service
from varlen.telemetry.metrics import CountedMetric, Stats

SECONDS = 60.0
SETTINGS = {
    "device": "cpu",
    "dtype": "fp32",
    "threads": 1,
    "max_running_sequences": 24,
    "max_step_tokens": 64,
    "kv_block_tokens": 16,
    "kv_bytes": 4_000_000,
    "warmup_seconds": 0,
}
POLICIES = ["reserve", "optimistic"]
SHARED = list(range(1, 40))
# Options of each kind of answer; the first prompts share a beginning, which the prefix cache finds.
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3, "top_p": 0.9},
    "samples": {"seed": 4, "n": 3, "top_k": 50},
    "logprobs": {"seed": 5, "logprobs": 3},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "bias": {"seed": 6, "logit_bias": {"17": 3.0, "18": -5.0}},
    "beams": {"num_beams": 4, "n": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True, "temperature": 1.5, "seed": 7},
    "grammar": {"seed": 8, "structured_outputs": {"regex": "[a-f]{40}"}},
}
# The process chooses all of these.
EDITED = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "samples": {"seed": 4, "n": 3, "top_k": 50, "presence_penalty": 1.0, "repetition_penalty": 1.1},
    "bias": {"seed": 6, "logit_bias": {"17": 3.0, "18": -5.0}},
    "least": {"seed": 7, "min_tokens": 12, "stop_token_ids": [17, 18, 19], "top_k": 30},
}
TRANSLATIONS = {
    "one beam": {"num_beams": 1},
    "beams": {"num_beams": 4, "n": 2},
    "other beams": {"num_beams": 3, "length_penalty": 0.5},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("decoder"), "GPT2LMHeadModel")


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("translator"), "MarianMTModel")


@contextmanager
def generator_of(folder, *, restarts=100, stats=None, **settings):
    """Yield a generator whose model runs in a process, which may end often."""
    config = EngineConfig(**{**SETTINGS, **settings})
    service = Service.load(GeneratorParts, folder, config, stats or Stats(), isolated=True)
    service.model.runner.host.restarts = RestartLimit(restarts, 600.0)
    with Generator(service) as generator:
        yield generator


@pytest.fixture
def free_drafts(monkeypatch):
    """Let rows of drafts run whatever this machine takes for them."""
    monkeypatch.setattr(DraftCost, "step_seconds", lambda *_: 1.0)
    monkeypatch.setattr(DraftCost, "row_seconds", lambda *_: 0.0)


class Killer:
    """Kills the worker while it runs some steps.

    Attributes:
        at: numbers of these steps.
        steps: number of steps so far.
    """

    def __init__(self, generator, *at):
        self.at = set(at)
        self.steps = 0
        self._runner = generator._service.model.runner
        self._start = type(self._runner).start
        self._runner.start = self.start

    def start(self, step, packed):
        if self.steps in self.at:
            # it gets the step and cannot answer
            os.kill(self._runner.pid, signal.SIGSTOP)
            Timer(0.05, os.kill, (self._runner.pid, signal.SIGKILL)).start()
        self.steps += 1
        return self._start(self._runner, step, packed)

    def stop(self):
        del self._runner.start


def answers_of(generator, kinds, *, max_tokens=24):
    """Return the answer of each kind, and the parts that were sent."""
    parts = {}

    def submit(number, kind, options):
        def on_part(row, part):
            assert parts.get((kind, row, "end")) is None
            parts.setdefault((kind, row), []).extend(part.token_ids)
            if part.finish_reason is not None:
                parts[kind, row, "end"] = part.finish_reason

        checked = generator._service.model.options({"max_tokens": max_tokens, **options})
        prompt = (
            "a text to translate"
            if generator._service.checkpoint.translate
            else [*SHARED[: 20 + number], number + 1]
        )
        return generator.submit(prompt, checked, on_part)

    with arriving_together(generator):
        futures = {
            kind: submit(number, kind, options)
            for number, (kind, options) in enumerate(kinds.items())
        }
    wait(futures.values(), SECONDS)
    return {kind: future.result(0) for kind, future in futures.items()}, parts


@pytest.mark.parametrize(
    "prefix_cache",
    [
        pytest.param(True, id="prefix cache"),
        pytest.param(False, id="no prefix cache", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("policy", [pytest.param("reserve", marks=pytest.mark.full), "optimistic"])
def test_answers_of_every_kind_are_the_same_though_the_worker_is_killed(
    decoder, policy, prefix_cache
):
    stats = Stats()
    with generator_of(decoder, kv_policy=policy, prefix_cache=prefix_cache, stats=stats) as made:
        undisturbed = answers_of(made, KINDS)
        runner = made._service.model.runner
        for at in (0, 11):
            killed = runner.pid
            killer = Killer(made, at)
            disturbed = answers_of(made, KINDS)
            killer.stop()
            assert runner.pid != killed
            assert is_gone(killed)
            assert disturbed[1] == undisturbed[1]
            for kind, answers in undisturbed[0].items():
                for expected, found in zip(answers, disturbed[0][kind], strict=True):
                    assert found.text == expected.text, kind
                    assert found.finish_reason == expected.finish_reason, kind
                    if expected.score is not None:
                        assert found.score == pytest.approx(expected.score, rel=1e-5)
                    for one, other in zip(expected.logprobs, found.logprobs, strict=True):
                        assert other.token_id == one.token_id
                        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert made.snapshot().running == 0
        assert made.snapshot().blocks.used == 0
    assert stats.drain().counts[CountedMetric.WORKER_RESTARTS] == 2


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_edited_answers_are_those_in_process_though_the_worker_is_killed(
    decoder, policy, monkeypatch
):
    config = EngineConfig(**{**SETTINGS, "kv_policy": policy})
    with Generator(Service.load(GeneratorParts, decoder, config, Stats())) as made:
        expected = answers_of(made, EDITED)[1]
    listed = []

    def packed(*arguments):
        step = pack_step(*arguments)
        assert step.draws
        if step.edits:
            listed.append("tokens" in step.edits)
        return step

    with generator_of(decoder, kv_policy=policy) as made:
        with monkeypatch.context() as context:
            context.setattr(steps, "pack_step", packed)
            assert answers_of(made, EDITED)[1] == expected
        # most steps send no list
        assert 0 < sum(listed) < len(listed) / 2
        for at in (0, 3, 11):
            killer = Killer(made, at)
            assert answers_of(made, EDITED)[1] == expected
            killer.stop()
            assert killer.steps > at


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("free_drafts")
def test_drafts_change_no_answer_though_the_worker_is_killed(decoder, policy):
    kinds = {
        **KINDS,
        "endless": {"temperature": 0.0, "ignore_eos": True},
        "least": {"seed": 7, "min_tokens": 9, "temperature": 0.3},
        "stop": {"seed": 9, "stop": ["a", "e"], "temperature": 0.5},
    }
    config = EngineConfig(**{**SETTINGS, "kv_policy": policy})
    with Generator(Service.load(GeneratorParts, decoder, config, Stats())) as made:
        expected = answers_of(made, kinds, max_tokens=60)[1]
    drafts = {"speculation": "ngram", "prompt_lookup_min": 1}
    with generator_of(decoder, kv_policy=policy, **drafts) as made:
        assert answers_of(made, kinds, max_tokens=60)[1] == expected
        killer = Killer(made, 11)
        assert answers_of(made, kinds, max_tokens=60)[1] == expected
        killer.stop()
        counts = made.snapshot()
        assert 0 < counts.accepted_tokens < counts.drafted_tokens
        assert counts.blocks.used == 0


@pytest.mark.parametrize(
    "slots",
    [pytest.param(True, id="device"), pytest.param(False, id="host", marks=pytest.mark.full)],
)
@pytest.mark.usefixtures("free_drafts")
def test_drafts_change_no_answer_with_penalties(decoder, slots, monkeypatch):
    if not slots:
        monkeypatch.setattr(EditSlots, "_claim", lambda *_: False)
    kinds = {
        "repetition": {"temperature": 0.0, "repetition_penalty": 1.001},
        "sampled": {"seed": 2, "top_k": 1, "frequency_penalty": 1e-4, "logit_bias": {"17": 0.5}},
        "least": {"temperature": 0.0, "presence_penalty": 1e-3, "min_tokens": 9},
        "strong": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    }
    config = EngineConfig(**SETTINGS)
    drafts = {"speculation": "ngram", "prompt_lookup_min": 1}
    with Generator(Service.load(GeneratorParts, decoder, config, Stats())) as made:
        expected = answers_of(made, kinds, max_tokens=100)[1]
    with generator_of(decoder, **drafts) as made:
        assert answers_of(made, kinds, max_tokens=100)[1] == expected
        counts = made.snapshot()
    assert 0 < counts.accepted_tokens < counts.drafted_tokens


@pytest.fixture(scope="module")
def drafts(decoder, tmp_path_factory):
    """Folders of draft models: the decoder itself, one that is like it, and another one."""
    folder = tmp_path_factory.mktemp("drafts")
    shutil.copytree(decoder, folder / "like")
    weights = load_file(folder / "like" / WEIGHTS)
    numbers = torch.Generator().manual_seed(0)
    for name, each in weights.items():
        weights[name] = each + 0.03 * each.std() * torch.randn(each.shape, generator=numbers)
    save_file(weights, folder / "like" / WEIGHTS, metadata={"format": "pt"})
    torch.manual_seed(5)
    other = save_checkpoint(folder / "other", "LlamaForCausalLM")
    return {"same": decoder, "like": folder / "like", "other": other}


def drafting(folder, **settings):
    return {"speculation": "draft_model", "draft_model": str(folder), **settings}


# answers whose tokens the process draws from the logits alone
DRAWN = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"seed": 3, "top_p": 0.9, "ignore_eos": True},
    "samples": {"seed": 4, "n": 3, "top_k": 50, "ignore_eos": True},
    "more samples": {"seed": 5, "n": 3, "temperature": 0.7, "ignore_eos": True},
}


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize("policy", [pytest.param("reserve", marks=pytest.mark.full), "optimistic"])
@pytest.mark.parametrize("name", ["same", "like", pytest.param("other", marks=pytest.mark.full)])
def test_a_draft_model_changes_no_answer(decoder, drafts, name, policy):
    more = {
        "least": {"seed": 7, "min_tokens": 9, "temperature": 0.3},
        "stop": {"seed": 9, "stop": ["a", "e"], "temperature": 0.5},
    }
    # few blocks: sequences are preempted
    few = {**SETTINGS, "kv_policy": policy, "kv_bytes": 500_000}
    config = EngineConfig(**few)
    with Generator(Service.load(GeneratorParts, decoder, config, Stats())) as made:
        expected = [answers_of(made, each, max_tokens=48)[1] for each in (DRAWN, {**KINDS, **more})]
    config = EngineConfig(**few, **drafting(drafts[name]))
    with Generator(Service.load(GeneratorParts, decoder, config, Stats())) as made:
        assert answers_of(made, DRAWN, max_tokens=48)[1] == expected[0]
        counts = made.snapshot()
        assert (counts.preemptions > 0) == (policy == "optimistic")
        assert (counts.accepted_tokens > counts.drafted_tokens / 4) == (name != "other")
        if name == "same":
            # its blocks hold the keys of every token: of shared, copied and preempted ones too
            assert counts.accepted_tokens > 0.97 * counts.drafted_tokens
        assert answers_of(made, {**KINDS, **more}, max_tokens=48)[1] == expected[1]
        assert made.snapshot().blocks.used == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_draft_model_reads_rows_without_drafts_together(decoder, drafts, policy, monkeypatch):
    """Drafts come and go, and the keys of the tokens between them are there."""
    few = {**SETTINGS, "kv_policy": policy, "kv_bytes": 500_000}
    with Generator(Service.load(GeneratorParts, decoder, EngineConfig(**few), Stats())) as made:
        expected = answers_of(made, DRAWN, max_tokens=48)[1]
    numbers, calls = random.Random(0), Counter()
    monkeypatch.setattr(DraftCost, "step_seconds", lambda *_: float(numbers.random() < 0.1))
    monkeypatch.setattr(DraftCost, "row_seconds", lambda *_: 0.0)
    for name in ("run", "_catch_up", "_run"):
        of_class = getattr(DraftModel, name)

        def counted(*arguments, name=name, of_class=of_class):
            calls[name] += 1
            return of_class(*arguments)

        monkeypatch.setattr(DraftModel, name, counted)
    config = EngineConfig(**few, **drafting(drafts["same"]))
    with Generator(Service.load(GeneratorParts, decoder, config, Stats())) as made:
        for _ in range(3):
            assert answers_of(made, DRAWN, max_tokens=48)[1] == expected
        counts = made.snapshot()
    assert counts.accepted_tokens > 0.97 * counts.drafted_tokens > 20
    assert calls["_catch_up"] < calls["run"] / 2


@pytest.mark.full
@pytest.mark.usefixtures("free_drafts")
def test_a_draft_model_in_a_process_changes_no_answer_though_it_is_killed(decoder, drafts):
    kinds = {**KINDS, **DRAWN}
    config = EngineConfig(**SETTINGS)
    with Generator(Service.load(GeneratorParts, decoder, config, Stats())) as made:
        expected = answers_of(made, kinds, max_tokens=40)[1]
    with generator_of(decoder, **drafting(drafts["like"])) as made:
        killer = Killer(made, 11)
        assert answers_of(made, kinds, max_tokens=40)[1] == expected
        killer.stop()
        assert answers_of(made, DRAWN, max_tokens=40)[1]
        counts = made.snapshot()
        assert 0 < counts.accepted_tokens < counts.drafted_tokens
        assert counts.blocks.used == 0


def test_caches_of_both_models_share_kv_bytes(decoder, drafts):
    blocks = []
    for more in ({}, drafting(drafts["same"])):
        config = EngineConfig(**{**SETTINGS, "kv_bytes": 600_000}, **more)
        with Generator(Service.load(GeneratorParts, decoder, config, Stats())) as made:
            info = made._service.model.runner.info
            blocks.append((info.num_blocks, info.block_bytes, info.weight_bytes, info.arena_bytes))
    alone, both = blocks
    assert both == (alone[0] // 2, *(2 * each for each in alone[1:]))


def test_draft_models_that_do_not_fit_are_refused_by_name(decoder, translator, drafts, tmp_path):
    def refusal(folder, draft):
        config = EngineConfig(**SETTINGS, **drafting(draft))
        with pytest.raises(ConfigError) as refused:
            Service.load(GeneratorParts, folder, config, Stats())
        return str(refused.value)

    other = save_checkpoint(tmp_path / "words", "GPT2LMHeadModel")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {
        token: number for number, token in enumerate(reversed(tokenizer["model"]["vocab"]))
    }
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "whose vocabulary differs in" in refusal(decoder, other)
    assert "allowed: a model with the same tokenizer.json" in refusal(decoder, other)
    short = save_checkpoint(tmp_path / "short", "GPT2LMHeadModel", n_positions=32)
    assert "set max_sequence_tokens to that" in refusal(decoder, short)
    assert "task is translate" in refusal(translator, translator)
    assert f'draft_model is "{decoder / "nowhere"}": ' in refusal(decoder, "nowhere")
    embeds = save_checkpoint(tmp_path / "embeds", "BertModel")
    assert f'draft_model is "{embeds}": ' in refusal(decoder, embeds)
    config, on_gpu = EngineConfig(**SETTINGS, **drafting(drafts["same"])), torch.device("cuda")
    opened = Checkpoint.open(decoder)
    with pytest.raises(ConfigError, match="the device is a GPU; set device: cpu, or speculation"):
        # a GPU that this machine need not have
        Runner._load_draft(SimpleNamespace(device=on_gpu, _config=config), opened, 64, 0.0)
    with_adapters = shutil.copytree(decoder, tmp_path / "adapted")
    (with_adapters / "adapters" / "one").mkdir(parents=True)
    (with_adapters / "adapters" / "one" / "adapter_config.json").write_text("{}")
    assert "it has adapters; set adapters: none" in refusal(with_adapters, drafts["same"])
    for more in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        with pytest.raises(ConfigError, match="allowed with tensor_parallel and pipeline_parallel"):
            EngineConfig(**drafting("draft"), **more)
    with pytest.raises(ConfigError, match="allowed: a folder with draft_model, none without"):
        EngineConfig(speculation="draft_model")
    with pytest.raises(ConfigError, match="allowed: a folder with draft_model, none without"):
        EngineConfig(draft_model="draft")


def test_a_translation_has_no_drafts(translator):
    config = EngineConfig(**SETTINGS, speculation="ngram")
    with pytest.raises(ConfigError, match='speculation is "ngram" and the task is translate'):
        Service.load(GeneratorParts, translator, config, Stats())


@pytest.mark.full
@pytest.mark.parametrize(
    "seconds,last",
    [pytest.param(0.0, 5, id="steps"), pytest.param(1e6, 1, id="launches of several steps")],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_translations_are_the_same_though_the_worker_is_killed(
    translator, policy, seconds, last, monkeypatch
):
    monkeypatch.setattr("varlen.scheduling.device_plan.LAUNCH_SECONDS", seconds)
    with generator_of(translator, kv_policy=policy) as made:
        undisturbed = answers_of(made, TRANSLATIONS, max_tokens=12)
        for at in (0, last):
            killer = Killer(made, at)
            disturbed = answers_of(made, TRANSLATIONS, max_tokens=12)
            killer.stop()
            assert killer.steps > at
            assert disturbed[1] == undisturbed[1]


@pytest.mark.full
def test_a_request_in_the_steps_of_two_killed_workers_fails_and_the_next_one_is_answered(decoder):
    with generator_of(decoder) as made:
        expected = made.generate([SHARED], max_tokens=8, temperature=0.0)
        killer = Killer(made, 2, 4)
        with pytest.raises(EngineError, match="worker processes ended while they ran this"):
            made.generate([SHARED], max_tokens=30, temperature=0.0, ignore_eos=True)
        killer.stop()

        assert made.generate([SHARED], max_tokens=8, temperature=0.0) == expected


@pytest.mark.full
def test_after_too_many_restarts_the_model_stops(decoder, caplog):
    with generator_of(decoder, restarts=1) as made:
        killer = Killer(made, 1)
        made.generate([SHARED], max_tokens=4, temperature=0.0)
        killer.at.add(killer.steps)
        with pytest.raises(ModelFaultError):
            made.generate([SHARED], max_tokens=4, temperature=0.0)

        assert not made._service.is_ready
        with pytest.raises(ModelFaultError):
            made.generate([SHARED], max_tokens=4, temperature=0.0)
        assert is_gone(made._service.model.runner.pid)
    assert "ended with code -9, after" in caplog.text


@pytest.mark.full
def test_an_idle_worker_that_is_killed_is_replaced_at_the_next_request(decoder):
    with generator_of(decoder) as made:
        expected = made.generate([SHARED], max_tokens=8, temperature=0.0)
        killed = made._service.model.runner.pid
        os.kill(killed, signal.SIGKILL)
        assert is_gone(killed)

        assert made.generate([SHARED], max_tokens=8, temperature=0.0) == expected
        assert made._service.model.runner.pid != killed


def test_a_step_that_fails_in_the_worker_fails_its_requests_and_no_worker_ends(
    decoder, monkeypatch, caplog
):
    with generator_of(decoder) as made:
        pid = made._service.model.runner.pid

        def broken(*step):
            return replace(pack_step(*step), inputs={})

        with monkeypatch.context() as context:
            context.setattr(steps, "pack_step", broken)
            with pytest.raises(EngineError, match="the model failed on the step"):
                made.generate([SHARED], max_tokens=4, temperature=0.0)

        made.generate([SHARED], max_tokens=4, temperature=0.0)
        assert made._service.model.runner.pid == pid
    assert "KeyError" in caplog.text


@pytest.mark.full
def test_closing_while_the_worker_starts_again_answers_what_is_open_and_leaves_no_process(decoder):
    config = EngineConfig(**SETTINGS)
    service = Service.load(GeneratorParts, decoder, config, Stats(), isolated=True)
    made = Generator(service)
    expected = made.generate([SHARED], max_tokens=8, temperature=0.0, ignore_eos=True)
    killed = service.model.runner.pid
    Killer(made, 2)
    answer = made.submit(SHARED, GenerationOptions(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert is_gone(killed)

    closing = Thread(target=made.close)
    closing.start()
    closing.join(SECONDS)

    assert not closing.is_alive()
    assert answer.result(0) == expected
    assert is_gone(service.model.runner.pid)


def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason(decoder):
    with pytest.raises(ConfigError, match="kv_bytes allows 64 bytes"):
        Service.load(
            GeneratorParts,
            decoder,
            EngineConfig(**{**SETTINGS, "kv_bytes": 64}),
            Stats(),
            isolated=True,
        )


def test_in_process_there_is_no_worker(decoder):
    with Generator.from_pretrained(decoder, device="cpu", dtype="fp32") as made:
        assert isinstance(made._service.model.runner, Runner)


SCRIPT = """
import sys, time
from varlen.config import EngineConfig
from varlen.service.generation import GeneratorParts
from varlen.service.service import Service
from varlen.telemetry.metrics import Stats
config = EngineConfig(device="cpu", dtype="fp32", threads=1)
service = Service.load(GeneratorParts, sys.argv[1], config, Stats(), isolated=True)
print(service.model.runner.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.full
def test_the_death_of_the_engine_ends_the_worker(decoder):
    command = [sys.executable, "-c", SCRIPT, str(decoder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        worker = int(engine.stdout.readline())

        engine.kill()

    assert is_gone(worker)
