"""Batches on a CPU are padded where products are compiled, which changes no answer."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.closeness import assert_close, encoder_roundings
from varlen.config import EngineConfig
from varlen.execution.cpu.all_cores import batch_sizes, padded
from varlen.execution.cpu.linear_paths import PACKED, compiles_products, use_paths
from varlen.execution.cpu.runner import CpuRunner
from varlen.execution.model_state import OneShot
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Prompt, RequestOptions
from varlen_kernels import cpu, reference


@given(st.integers(1, 10**6))
def test_padding_is_less_than_an_eighth_or_seven_tokens(tokens):
    size = padded(tokens)

    assert tokens <= size
    assert size - tokens <= max(7, tokens / 8)
    assert padded(size) == size


def test_there_are_few_sizes():
    assert batch_sizes(40) == [8, 16, 24, 32, 40]
    assert len(batch_sizes(512)) == 32
    assert len(batch_sizes(4096)) == 32 + 3 * 8


@pytest.mark.parametrize("task", ["embed", "hidden"])
def test_padding_changes_no_answer(small_bert, task):
    runner = Runner(
        Checkpoint.open(small_bert),
        EngineConfig(device="cpu", dtype="fp32", task=task, max_batch_tokens=100),
        kernels=reference,
    )
    packed = use_paths(runner.program, {}, PACKED)
    assert compiles_products(packed)
    assert not compiles_products(runner.program)
    device = CpuRunner(packed, cpu, runner.arena)
    device.compile()
    other = OneShot(device)
    numbers = np.random.default_rng(0)
    roundings = encoder_roundings(small_bert, torch.float32)

    # the last one fills the arena
    for lengths in ([1], [5, 3], [9, 30, 2], [60, 39], [64, 36]):
        prompts = [Prompt(numbers.integers(0, 50, n, dtype=np.int32)) for n in lengths]
        options = [RequestOptions(normalize=True)] * len(lengths)
        rows = zip(other.run(prompts, options), runner.run(prompts, options), strict=True)
        for row, expected in rows:
            assert_close(row, expected, roundings=roundings)
