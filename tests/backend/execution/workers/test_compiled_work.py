"""Processes without torch give the bits of the model that was loaded with it."""

import logging
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.execution.thread_executor import CoreShare
from varlen.execution.workers import child, compiled_work
from varlen.execution.workers.compiled_work import (
    CompiledWork,
    StoredModel,
    read_content,
    torch_reason,
    write_model,
)
from varlen.execution.workers.messages import batch_message
from varlen.execution.workers.process import ModelProcess
from varlen.execution.workers.worker import WorkerProcess
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Prompt, RequestOptions
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="ops are compiled")

BATCHES = [(5,), (9, 1, 30), (64,) * 3, (1,) * 17]


def runner_of(folder, **settings):
    fields = {
        "device": "cpu",
        "dtype": "fp32",
        "threads": 2,
        "max_batch_tokens": 256,
        "warmup_seconds": 0,
        **settings,
    }
    return Runner(Checkpoint.open(folder), EngineConfig(**fields), workers=2)


def read_model(descriptor):
    work = CompiledWork(read_content(descriptor))
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)
    return work


def batch(lengths):
    numbers = np.random.default_rng(0)
    prompts = [Prompt(numbers.integers(0, 50, n, dtype=np.int32)) for n in lengths]
    return prompts, [RequestOptions(normalize=n % 2 == 0) for n in lengths]


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("BertModel", {"task": "embed"}),
        ("BertModel", {"task": "hidden"}),
        ("BertForSequenceClassification", {"task": "classify"}),
        ("BertModel", {"task": "embed", "dtype": "bf16"}),
        ("BertForTokenClassification", {"task": "token_classify"}),
        ("XLMRobertaForSequenceClassification", {"task": "rerank"}),
        ("BertForSequenceClassification", {"task": "classify", "dtype": "bf16"}),
        ("ModernBertForSequenceClassification", {"task": "rerank", "dtype": "bf16"}),
        ("ModernBertModel", {"task": "embed"}),
    ],
    ids=str,
)
def test_its_answers_have_the_bits_of_the_runner_that_wrote_it(make_checkpoint, kind, settings):
    labels = {"num_labels": 1} if settings["task"] == "rerank" else {}
    runner = runner_of(make_checkpoint(kind, **labels), **settings)
    expected = [runner.run(*batch(lengths)) for lengths in BATCHES]

    assert torch_reason(runner) == ""
    work = read_model(write_model(runner, "info"))
    del runner

    work.warm_up()
    share = CoreShare()
    work.runner.share_cores(share)
    for is_alone in (False, True):
        share.is_on = True
        share.set_alone(is_alone)
        for lengths, rows in zip(BATCHES, expected, strict=True):
            actual = work.run((), lambda lengths=lengths: batch(lengths))
            for one, other in zip(actual, rows, strict=True):
                np.testing.assert_array_equal(one, other)
    assert work.runner.use().reserved_bytes > 0
    work.runner.release_arenas()
    assert work.runner.use().reserved_bytes == 0
    share.close()


def test_weights_that_share_memory_are_written_once():
    memory = torch.arange(4096, dtype=torch.uint8).to(torch.uint8)
    apart = torch.zeros(100, dtype=torch.uint8)

    parts = compiled_work._parts(
        [memory[64:128], memory[100:300], memory[3000:], apart, memory[64:]]
    )

    sizes = sorted(num_bytes for _, num_bytes, _ in parts)
    assert sizes == [100, 4032]
    ends = [0, *(place + num_bytes for _, num_bytes, place in parts)]
    for (address, _, place), end in zip(parts, ends, strict=False):
        assert end <= place < end + 64
        assert place % 64 == address % 64


def maps_torch(pid):
    return "libtorch" in Path("/proc", str(pid), "maps").read_text()


def loaded(folder, **settings):
    fields = {
        "device": "cpu",
        "dtype": "fp32",
        "threads": 1,
        "log_level": "info",
        "warmup_seconds": 0,
        **settings,
    }
    return ModelProcess(folder, EngineConfig(**fields), generates=False)


def test_with_and_without_torch_and_from_the_cache_a_model_in_int8_answers_the_same(
    small_bert, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    settings = {"dtype": "int8", "cache_folder": str(tmp_path), "threads": 1}
    # it calibrates, for the others too
    expected = runner_of(small_bert, **settings).run(*batch((30, 5)))
    found = []
    for _ in range(2):
        host = loaded(small_bert, **settings)
        worker = WorkerProcess(host, lambda: None)
        rows = worker.launch(batch_message(*batch((30, 5))))()
        for one, other in zip(rows, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        assert not maps_torch(host.pid)
        assert not maps_torch(worker.pid)
        found.append(host.info)
        worker.close()
        host.close()

    assert found[0] == found[1]
    first, second = caplog.text.split("the workers hold no torch: the compiled model is read")
    assert "the workers hold no torch: all ops of the model are compiled" in first
    # it says what the load has said, and loads nothing
    assert "from the cache (when it was loaded)" in second
    assert "all ops" not in second


@pytest.fixture
def stored(small_bert, tmp_path):
    """Return the file of a small model, and the setup that it is of."""
    folder = shutil.copytree(small_bert, tmp_path / "model")
    fields = {"stored": str(tmp_path / "cache/compiled-1"), "folder": str(folder)}
    found = StoredModel.of(fields)
    with os.fdopen(write_model(runner_of(folder), "info", [(30, "a warning")])) as model:
        found.write(model.fileno())
    return found, fields


def test_a_stored_model_that_is_damaged_or_of_other_files_is_not_read(stored, monkeypatch):
    model, fields = stored
    assert [*model.read().lines[0]] == [30, "a warning"]
    content, folder = model.path.read_bytes(), Path(fields["folder"])

    for damaged in (b"", content[:-1], content[:100], content + b"0", content[:-1] + b"\1"):
        model.path.write_bytes(damaged)
        assert model.read() is None
    model.path.write_bytes(content)
    assert model.read() is not None
    # another model has its name
    assert StoredModel(model.path, "key").read() is None
    other = model.path.with_name("compiled-2")
    other.write_bytes(content)
    assert StoredModel(other, model.key).read() is None
    monkeypatch.setattr(compiled_work, "_MOST_STORED", 100)
    assert model.read() is None

    # other bytes, with the size and the time of the old ones
    weights = folder / "model.safetensors"
    before, copied = weights.stat(), folder / "copied"
    copied.write_bytes(weights.read_bytes())
    os.utime(copied, ns=(before.st_atime_ns, before.st_mtime_ns))
    copied.replace(weights)
    assert StoredModel.of(fields) != model


def test_settings_cores_and_code_decide_whether_a_stored_model_fits(stored, monkeypatch):
    model, fields = stored
    assert StoredModel.of(fields) == model
    for name, other in (
        ("memory_limit", lambda: 1),
        ("cpu_name", lambda: "another"),
        ("code_hash", lambda _: "changed"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(compiled_work, name, other)
            assert StoredModel.of(fields) != model
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert StoredModel.of(fields) != model
    assert StoredModel.of({**fields, "stored": ""}) is None
    monkeypatch.setattr(compiled_work, "_MOST_FILES", 1)
    assert StoredModel.of(fields) is None


def test_models_that_were_not_used_for_longest_make_room(stored, monkeypatch):
    model, _ = stored
    cache, size = model.path.parent, model.path.stat().st_size
    monkeypatch.setattr(compiled_work, "_MOST_TOTAL", 3 * size)
    for number, name in enumerate(
        ("compiled-old", ".compiled-3.unfinished", "other", "compiled-new")
    ):
        shutil.copy(model.path, cache / name)
        os.utime(cache / name, ns=(number, number))
    # a read counts as use
    os.utime(model.path, ns=(0, 0))
    assert model.read() is not None

    with os.fdopen(os.open(model.path, os.O_RDONLY)) as content:
        StoredModel(cache / "compiled-5", "key").write(content.fileno())

    assert {each.name for each in cache.iterdir()} == {
        "other",
        "compiled-new",
        "compiled-1",
        "compiled-5",
    }


@pytest.mark.full
def test_a_model_with_an_op_that_is_not_compiled_keeps_torch_and_the_log_names_the_op(
    make_checkpoint, caplog
):
    caplog.set_level(logging.INFO)
    host = loaded(make_checkpoint("BertForMaskedLM"), task="sparse_embed")

    assert maps_torch(host.pid)
    assert "the workers hold torch: no code is compiled for term_weights" in caplog.text
    host.close()


def test_adapters_padding_and_large_weights_need_torch(small_bert, monkeypatch):
    assert "pads" in torch_reason(runner_of(small_bert, execution="padded"))
    monkeypatch.setattr(compiled_work, "_MOST_BYTES", 1)
    assert "the weights have more" in torch_reason(runner_of(small_bert))


def test_a_process_that_cannot_execute_itself_keeps_torch(small_bert, monkeypatch, caplog):
    caplog.set_level(logging.INFO)

    def refuse(*_):
        raise OSError("no such file")

    monkeypatch.setattr(os, "execv", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child._leave_torch(theirs, runner_of(small_bert), "info", [], None)

    assert "the workers hold torch: no such file" in caplog.text
