"""Costs at model load: measured once, then read from the cache, or assumed."""

import json
import logging
import os
import pwd
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import varlen
import varlen_kernels
from tests.backend.fakes.engine_parts import Clock
from varlen.config import EngineConfig
from varlen.costs import store as cost_store
from varlen.costs.model import BatchShape
from varlen.costs.store import CostStore, cache_folder, code_hash, find_cache
from varlen.errors import EngineError
from varlen.execution import device as fingerprint
from varlen.execution.device import (
    checkpoint_hash,
    cost_fields,
    device_name,
    library_versions,
)
from varlen.execution.model_info import ModelInfo
from varlen.execution.runner import Runner
from varlen.execution.thread_executor import ThreadExecutor
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import MAX_MASKS
from varlen.scheduling.batch import BatchResult
from varlen.service import costs as cost_warmup
from varlen.service.costs import assumed_costs, costs_for, measured_costs

VOCAB_SIZE = 50

INFO = ModelInfo(
    task="embed",
    device="cpu",
    device_name="2 cores",
    dtype="float32",
    vocab_size=VOCAB_SIZE,
    type_vocab_size=2,
    max_sequence_tokens=64,
    max_batch_tokens=512,
    max_arena_tokens=512,
    weight_bytes=1 << 20,
    arena_bytes=1 << 20,
    is_padded=False,
    workers=2,
    cost_fields={"checkpoint": "00ff", "device": "a CPU, 2 cores", "torch": "2"},
)


class FakeExecutor:
    """Runs batches on a virtual clock, in time proportional to their tokens."""

    def __init__(self, clock):
        self.clock = clock
        self.ran = []
        self.started = 0

    def start(self, batch, completed):
        failure = None
        # both workers run the same batch, and the second one decides
        self.started += 1
        if self.started % INFO.workers == 0:
            try:
                self.run([each.prompt for each in batch.sequences])
            except MemoryError:
                failure = "memory"
            except RuntimeError:
                failure = "batch"
        completed(batch, BatchResult([], 0.0, failure=failure))

    def run(self, prompts):
        self.ran.append(prompts)
        self.clock.now += 1e-3 + 1e-5 * sum(prompt.num_tokens for prompt in prompts)


@pytest.fixture(autouse=True)
def _no_warning_yet():
    cost_store._warn.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    """A clock that only a fake executor moves."""
    made = Clock(0.0)
    monkeypatch.setattr(cost_warmup.time, "perf_counter", made)
    return made


@pytest.fixture
def executor(clock):
    return FakeExecutor(clock)


@pytest.fixture
def checkpoint(small_bert):
    return Checkpoint.open(small_bert)


@pytest.fixture
def config(tmp_path):
    return EngineConfig(
        cache_folder=str(tmp_path / "cache"), max_batch_sequences=16, max_batch_tokens=512
    )


@pytest.fixture(autouse=True)
def _info(caplog):
    caplog.set_level(logging.INFO, logger="varlen")


def lines(caplog):
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_the_first_start_measures_and_the_second_one_reads(
    executor, clock, checkpoint, config, caplog
):
    first = costs_for(INFO, executor, checkpoint, config)
    *progress, done = lines(caplog)
    again = FakeExecutor(clock)
    second = costs_for(INFO, again, checkpoint, config)

    assert len(progress) == 3
    assert all(line.startswith("measured ") for line in progress)
    assert re.match(
        r"costs measured in \d+\.\d s \(\d+ batches\); the fit's median error is \d", done
    )
    assert again.ran == []
    (said,) = lines(caplog)
    assert re.fullmatch(r"costs read from the cache, measured \d{4}-\d\d-\d\d \d\d:\d\d UTC", said)
    for lengths in ([1], [64] * 8, [3, 60]):
        shape = BatchShape.of(lengths)
        assert second.seconds(shape) == first.seconds(shape)
    assert first.seconds(BatchShape.of([20, 30])) == pytest.approx(1.5e-3, rel=0.02)


def test_batches_are_of_valid_random_ids(executor, checkpoint, config):
    costs_for(INFO, executor, checkpoint, config)

    ids = np.concatenate([sequence.token_ids for batch in executor.ran for sequence in batch])
    assert ids.dtype == np.int32
    assert ids.min() == 0
    assert ids.max() == VOCAB_SIZE - 1
    assert all(s.token_ids.flags.c_contiguous for batch in executor.ran for s in batch)


def test_batches_of_a_model_that_fills_masks_have_masks(executor, checkpoint, config):
    costs_for(replace(INFO, task="fill_mask"), executor, checkpoint, config)

    prompts = [prompt for batch in executor.ran for prompt in batch]
    assert all(each.num_masks == min(each.num_tokens, MAX_MASKS) for each in prompts)


def test_no_batch_passes_the_limits(executor, checkpoint, config):
    costs_for(INFO, executor, checkpoint, config)

    assert max(len(batch) for batch in executor.ran) == 16
    assert max(s.num_tokens for batch in executor.ran for s in batch) == 64
    assert 400 < max(sum(s.num_tokens for s in batch) for batch in executor.ran) <= 512


def test_without_warm_up_nothing_runs_and_nothing_is_read_or_written(
    executor, checkpoint, config, caplog
):
    costs = costs_for(INFO, executor, checkpoint, replace(config, warmup_seconds=0))

    assert executor.ran == []
    assert not Path(config.cache_folder).exists()
    assert lines(caplog) == [
        "warmup_seconds is 0; using assumed costs, which batches correct as they run"
    ]
    assert costs.seconds(BatchShape.of([64])) == pytest.approx(2e-3 + 150e-6 * 64 + 50e-9 * 64**2)


@pytest.mark.parametrize("execution", ["packed", "padded"])
def test_costs_are_assumed_for_one_sequence_a_batch_and_on_a_gpu(executor, config, execution):
    alone = replace(config, max_batch_sequences=1, execution=execution)

    assert assumed_costs(INFO, alone).seconds(BatchShape.of([10])) > 0
    on_gpu = assumed_costs(replace(INFO, device="cuda"), alone)
    assert on_gpu.execution == execution
    # a GPU batch counts as at least 256 tokens
    assert on_gpu.seconds(BatchShape.of([32])) == pytest.approx(3.0e-3, rel=0.01)


def test_costs_are_those_of_batches_that_fit_however_many_sequences_are_allowed(executor, config):
    without_limit = replace(config, max_batch_sequences=2**60)
    fitting = replace(config, max_batch_sequences=INFO.max_batch_tokens)
    shape = BatchShape.of([64])

    assert assumed_costs(INFO, without_limit).seconds(shape) == pytest.approx(
        assumed_costs(INFO, fitting).seconds(shape)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"execution": "padded"},
        {"max_batch_sequences": 8},
    ],
    ids=str,
)
def test_a_setting_that_changes_costs_is_measured_by_itself(
    executor, clock, checkpoint, config, changes
):
    costs_for(INFO, executor, checkpoint, config)
    again = FakeExecutor(clock)

    costs = costs_for(INFO, again, checkpoint, replace(config, **changes))

    assert again.ran
    assert costs.execution == changes.get("execution", "packed")
    assert len(CostStore(Path(config.cache_folder)).entries()) == 2


@pytest.mark.parametrize(
    "changes", [{"policy": "fifo"}, {"trigger": "lazy"}, {"warmup_seconds": 5}, {"max_delay_ms": 7}]
)
def test_a_setting_that_changes_no_cost_does_not_measure_again(
    executor, clock, checkpoint, config, changes
):
    costs_for(INFO, executor, checkpoint, config)
    again = FakeExecutor(clock)

    costs_for(INFO, again, checkpoint, replace(config, **changes))

    assert again.ran == []


def test_what_was_cut_short_is_measured_again_only_with_more_time(
    executor, clock, checkpoint, config, caplog
):
    slow = replace(config, warmup_seconds=1)
    executor.run = lambda sequences: setattr(clock, "now", clock.now + 0.1 * len(sequences))
    costs_for(INFO, executor, checkpoint, slow)
    assert "cut short" in lines(caplog)[-1]
    again = FakeExecutor(clock)

    costs_for(INFO, again, checkpoint, slow)
    assert again.ran == []
    costs_for(INFO, again, checkpoint, replace(config, warmup_seconds=3))
    assert again.ran != []
    assert "cut short" not in lines(caplog)[-1]


def test_what_another_server_measured_meanwhile_is_read(
    executor, clock, checkpoint, config, monkeypatch, caplog
):
    theirs = measured_costs(INFO, executor, checkpoint, config)
    store = CostStore(Path(config.cache_folder))
    load, answers = CostStore.load, [None]

    def not_there_at_first(self, key):
        return answers.pop() if answers else load(self, key)

    monkeypatch.setattr(CostStore, "load", not_there_at_first)
    again = FakeExecutor(clock)

    assert measured_costs(INFO, again, checkpoint, config) == theirs
    assert again.ran == []
    assert store.entries() == [theirs]


def test_measuring_again_replaces_what_is_kept(executor, checkpoint, config):
    old = measured_costs(INFO, executor, checkpoint, config)
    store = CostStore(Path(config.cache_folder))
    store.save(replace(old, measured_at=old.measured_at - timedelta(days=9)))
    executor.ran.clear()

    new = measured_costs(INFO, executor, checkpoint, config, again=True)

    assert executor.ran
    assert store.entries() == [new]


def test_a_cache_that_cannot_be_used_costs_one_warning(executor, checkpoint, config, caplog):
    costs = costs_for(INFO, executor, checkpoint, replace(config, cache_folder="/dev/null/varlen"))

    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "/dev/null/varlen" in warned[0]
    assert costs.seconds(BatchShape.of([32])) == pytest.approx(1.32e-3)


def test_a_busy_machine_is_warned_of(executor, checkpoint, config, caplog):
    run, calls = executor.run, []

    def sometimes_slow(prompts):
        calls.append(len(prompts))
        for _ in range(3 if len(calls) % 3 == 0 else 1):
            run(prompts)

    executor.run = sometimes_slow

    costs_for(INFO, executor, checkpoint, config)

    (warned,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "took 3.0 times as long" in warned
    assert "varlen costs --again" in warned


def test_stored_costs_without_batches_are_measured_again(
    executor, clock, checkpoint, config, caplog
):
    stored = measured_costs(INFO, executor, checkpoint, config)
    empty = replace(stored.measurement, batches=())
    CostStore(Path(config.cache_folder)).save(replace(stored, measurement=empty))
    again = FakeExecutor(clock)

    costs_for(INFO, again, checkpoint, config)

    assert again.ran
    assert any("measuring them again" in line for line in lines(caplog))


def test_too_little_memory_to_measure_anything_leaves_assumed_costs(
    executor, checkpoint, config, caplog
):
    def run(prompts):
        raise MemoryError

    executor.run = run

    costs = costs_for(INFO, executor, checkpoint, config)

    shape = BatchShape.of([3, 60])
    assert costs.seconds(shape) == assumed_costs(INFO, config).seconds(shape)
    assert "too little memory to measure costs; using assumed costs" in lines(caplog)


def test_a_model_that_fails_is_not_served(executor, checkpoint, config):
    def run(prompts):
        raise RuntimeError("broken")

    executor.run = run

    with pytest.raises(EngineError, match="first batches"):
        costs_for(INFO, executor, checkpoint, config)
    # the next load may measure
    executor.run = lambda prompts: FakeExecutor.run(executor, prompts)
    costs_for(INFO, executor, checkpoint, config)


@pytest.mark.parametrize("execution", ["packed", "padded"])
def test_a_real_model_is_measured(small_bert, tmp_path, execution):
    config = EngineConfig(
        device="cpu",
        dtype="fp32",
        execution=execution,
        max_batch_sequences=8,
        max_batch_tokens=256,
        cache_folder=str(tmp_path),
    )
    checkpoint = Checkpoint.open(small_bert)
    runner = Runner(checkpoint, config)
    executor = ThreadExecutor([runner])

    stored = measured_costs(runner.info, executor, checkpoint, config)

    executor.close()
    assert stored.measurement.batches
    costs = stored.measurement.model(execution)
    assert costs.seconds(BatchShape.of([64] * 4)) >= costs.seconds(BatchShape.of([4])) > 0
    key = stored.key
    assert key["model"] == "bert, 2 layers of 24"
    assert key["dtype"] == "float32"
    assert key["workers"] == "1"
    assert key.keys() >= {"checkpoint", "device", "task", "varlen", "torch", "plan"}
    assert all(isinstance(value, str) for value in key.values())
    # a key holds no path: another folder may hold the same checkpoint
    assert str(small_bert) not in json.dumps(dict(key))


def test_what_decides_costs_on_a_gpu_includes_triton(checkpoint, monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)

    fields = cost_fields(checkpoint, torch.device("cuda"))

    assert fields["device"] == "NVIDIA H200, 132 multiprocessors"
    assert "triton" in fields


@pytest.mark.parametrize("is_usable", [True, False], ids=["compiled", "torch"])
def test_what_decides_costs_on_a_cpu_includes_compiled_code(monkeypatch, is_usable):
    monkeypatch.setattr(fingerprint, "has_compiled_ops", lambda: is_usable)

    assert ("level" in library_versions(torch.device("cpu"))) == is_usable


def test_a_checkpoint_is_known_by_its_architecture(make_checkpoint):
    plain = make_checkpoint()
    same = make_checkpoint(initializer_range=0.5)
    (same / "config.json").write_bytes((plain / "config.json").read_bytes())
    deeper = make_checkpoint(num_hidden_layers=3)

    # other weights cost the same
    assert checkpoint_hash(plain) == checkpoint_hash(same)
    assert checkpoint_hash(plain) != checkpoint_hash(deeper)


def test_a_checkpoint_in_shards_or_of_another_dtype_is_another(make_checkpoint):
    folders = [
        make_checkpoint(),
        make_checkpoint(save={"max_shard_size": "20KB"}),
        make_checkpoint("BertForSequenceClassification"),
    ]
    half = make_checkpoint()
    header = next(half.glob("*.safetensors"))
    header.write_bytes(header.read_bytes().replace(b'"F32"', b'"I32"', 1))

    assert len({checkpoint_hash(folder) for folder in [*folders, half]}) == 4


def test_a_device_is_named_with_its_cores():
    name = device_name(torch.device("cpu"))

    assert name.endswith(f"{len(os.sched_getaffinity(0))} cores")
    assert torch.backends.cpu.get_cpu_capability() in name


def test_a_cpu_without_a_name_is_called_by_its_kind(monkeypatch, tmp_path):
    def unreadable(self, **_):
        raise FileNotFoundError

    monkeypatch.setattr(fingerprint.Path, "read_text", unreadable)
    monkeypatch.setattr(cost_store.platform, "machine", lambda: "aarch64")

    assert device_name(torch.device("cpu")).startswith("aarch64, ")


def test_code_that_changes_is_another_version(tmp_path):
    (tmp_path / "kernel.py").write_text("x = 1")
    before = code_hash([tmp_path])

    assert code_hash([tmp_path]) == before
    (tmp_path / "notes.txt").write_text("no code")
    assert code_hash([tmp_path]) == before
    (tmp_path / "kernel.py").write_text("x = 2")
    assert code_hash([tmp_path]) != before
    ours = [Path(varlen.__path__[0], name) for name in ("models", "program", "execution", "memory")]
    whole = code_hash([*ours, Path(varlen_kernels.__path__[0])])
    assert library_versions(torch.device("cpu"))["varlen"] == whole


@pytest.mark.parametrize(
    "setting, environment, folder",
    [
        ("/srv/costs", {}, "/srv/costs"),
        ("~/costs", {"HOME": "/home/someone"}, "/home/someone/costs"),
        ("auto", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/varlen"),
        ("auto", {"XDG_CACHE_HOME": "not/absolute", "HOME": "/h"}, "/h/.cache/varlen"),
        ("auto", {"HOME": "/h"}, "/h/.cache/varlen"),
    ],
)
def test_the_cache_is_where_the_setting_says(monkeypatch, setting, environment, folder):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_folder(setting) == Path(folder)


@pytest.mark.parametrize("setting", ["auto", "~/costs"])
def test_a_user_without_a_home_stores_nothing_and_is_told_so(monkeypatch, setting, caplog):
    def no_user(_):
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)

    for _ in range(2):
        assert find_cache(setting) is None

    assert "has no home; set" in caplog.text
    assert caplog.text.count("each start measures again") == 1
