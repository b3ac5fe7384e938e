"""Processes without torch give the bits of the model that was loaded with it."""

import logging
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.execution.thread_executor import CoreShare
from varlen.execution.workers import child, compiled_work
from varlen.execution.workers.compiled_work import CompiledWork, torch_reason, write_model
from varlen.execution.workers.process import ModelProcess
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
    work = CompiledWork(write_model(runner, "info"))
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


def test_neither_its_host_nor_its_workers_hold_torch(small_bert, caplog):
    caplog.set_level(logging.INFO)
    host = loaded(small_bert)
    worker = host.connect()

    assert not maps_torch(host.pid)
    assert not maps_torch(worker.pid)
    assert "the workers hold no torch" in caplog.text
    worker.connection.close()
    host.close()


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
        child._leave_torch(theirs, runner_of(small_bert), "info")

    assert "the workers hold torch: no such file" in caplog.text
