"""The CUDA graph executor on a CPU, with a stand-in that repeats the captured work.

Buckets, padding of inputs, fixed addresses and answers by sequence are real.
`tests/kernels/triton/test_encoder.py` tests the executor on a GPU.
"""

import gc
import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.backend.requests import random_prompts
from tests.checkpoints import KIND_OF_TASK
from tests.closeness import assert_rows_close, encoder_roundings
from tests.repeated_work import RepeatedWork
from varlen.config import EngineConfig
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.model_state import OneShot
from varlen.execution.packing import largest_dims
from varlen.execution.runner import Runner
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Masks, RequestOptions
from varlen_kernels import reference

PLAIN = RequestOptions()
NORMALIZED = RequestOptions(normalize=True)

CPU = torch.device("cpu")
MAX_TOKENS = 160
prompts = partial(random_prompts, types=2)


@pytest.fixture(scope="module", params=KIND_OF_TASK)
def task(request):
    return request.param


# For tests that no task concerns; `make test-all` runs them with every one.
of_one_task = pytest.mark.parametrize(
    "task",
    [
        task if task == "embed" else pytest.param(task, marks=pytest.mark.full)
        for task in KIND_OF_TASK
    ],
    indirect=True,
)


@pytest.fixture(scope="module")
def folder(task, make_checkpoint):
    return make_checkpoint(KIND_OF_TASK[task])


@pytest.fixture(scope="module")
def runner(task, folder):
    """Return a CPU runner; the executor must give the same answers."""
    config = EngineConfig(task=task, device="cpu", dtype="fp32")
    return Runner(Checkpoint.open(folder), config, kernels=reference)


@pytest.fixture(scope="module")
def graphs():
    return RepeatedWork()


def make_arena(runner):
    return Arena(Layout(runner.program.buffers, 256), largest_dims(MAX_TOKENS), CPU)


@pytest.fixture(scope="module")
def executor(runner, graphs):
    """Return the executor; its capture of all graphs is most of a test's time."""
    return OneShot(CudaRunner(runner.program, reference, make_arena(runner), graphs))


BATCHES = pytest.mark.parametrize(
    "lengths",
    [[1], [16], [17], [1, 1, 1], [3, 9, 1, 9], [64, 2, 33], [1] * MAX_TOKENS, [60, 60, 40]],
    ids=lambda lengths: f"{len(lengths)}x{sum(lengths)}",
)


@BATCHES
def test_a_batch_gets_the_answers_of_the_cpu_in_the_order_given(folder, runner, executor, lengths):
    batch = prompts(lengths)
    options = [RequestOptions(normalize=index % 2 == 0) for index in range(len(batch))]

    answers = executor.run(batch, options)

    assert all(answer.dtype == np.float32 for answer in answers)
    expected = OneShot(runner.state.device).run(batch, options)
    assert_rows_close(answers, expected, roundings=encoder_roundings(folder))


def test_masks_get_the_answers_of_the_cpu(make_checkpoint):
    checkpoint = Checkpoint.open(make_checkpoint("BertForMaskedLM"))
    runner = Runner(checkpoint, EngineConfig(task="fill_mask", dtype="fp32"), kernels=reference)
    executor = OneShot(CudaRunner(runner.program, reference, make_arena(runner), RepeatedWork()))
    batch = [
        replace(prompt, payload=Masks(np.arange(masks, dtype=np.int32) * 2))
        for prompt, masks in zip(prompts([9, 3, 40, 16]), (1, 2, 8, 1), strict=True)
    ]

    answers = executor.run(batch, [PLAIN] * 4)

    assert [len(answer) for answer in answers] == [1, 2, 8, 1]
    for mine, theirs in zip(answers, runner.run(batch, [PLAIN] * 4), strict=True):
        np.testing.assert_array_equal(mine[:, 0], theirs[:, 0])
        np.testing.assert_allclose(mine[:, 1], theirs[:, 1], rtol=1e-4)


@of_one_task
def test_each_batch_is_one_replay_and_nothing_is_captured_in_service(executor, graphs):
    captured, replayed = graphs.captured, graphs.replayed
    largest = sorted({bucket.tokens for bucket in executor.device.buckets})
    sizes = [1, *largest, *(tokens + 1 for tokens in largest[:-1])]
    assert largest[-1] == MAX_TOKENS

    for tokens in sizes:
        lengths = [min(64, tokens - begin) for begin in range(0, tokens, 64)]
        executor.run(prompts(lengths), [NORMALIZED] * len(lengths))

    assert graphs.replayed == replayed + len(sizes)
    assert graphs.captured == captured


@of_one_task
def test_memory_stays_where_graphs_left_it(executor):
    arena, shape = executor.device.arena, largest_dims(MAX_TOKENS, 40)
    address, offsets = arena.memory.data_ptr(), arena.allocate(shape).offsets

    for lengths in ([1], [60, 60, 40], [1] * MAX_TOKENS):
        executor.run(prompts(lengths), [PLAIN] * len(lengths))

    assert arena.memory.data_ptr() == address
    assert arena.allocate(shape).offsets == offsets


@of_one_task
def test_what_is_in_use_is_the_footprint_of_the_bucket(executor):
    executor.run(prompts([10, 7]), [NORMALIZED] * 2)

    # the smallest bucket for 17 tokens holds 32 tokens and 2 sequences
    arena = executor.device.arena
    expected = arena.layout.plan(largest_dims(32, 2)).footprint
    assert arena.use().footprint_bytes == expected


@of_one_task
def test_an_answer_does_not_depend_on_the_batch_before(executor):
    alone = [answer.copy() for answer in executor.run(prompts([5, 2]), [NORMALIZED] * 2)]

    executor.run(prompts([60, 60, 40], seed=1), [PLAIN] * 3)
    with torch.inference_mode():
        # every bit set is NaN in each float format
        executor.device.arena.memory.fill_(0xFF)
        executor.device._output.fill_(torch.nan)
        for buffers in executor.device._buffers:
            buffers.results[0].fill_(torch.nan)
    again = executor.run(prompts([5, 2]), [NORMALIZED] * 2)

    for mine, theirs in zip(again, alone, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@of_one_task
def test_an_answer_is_a_copy(executor):
    first = executor.run(prompts([4, 9]), [NORMALIZED] * 2)
    kept = [answer.copy() for answer in first]

    executor.run(prompts([4, 9], seed=1), [NORMALIZED] * 2)
    with torch.inference_mode():
        for buffers in executor.device._buffers:
            buffers.results[0].fill_(torch.nan)

    for answer, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(answer, copy)


@of_one_task
def test_loading_logs_the_progress_and_the_cost_of_captures(runner, caplog):
    with caplog.at_level(logging.INFO, "varlen"):
        executor = CudaRunner(runner.program, reference, make_arena(runner), RepeatedWork())

    lines = [record.getMessage() for record in caplog.records]
    assert 2 <= len(lines) <= 5
    count = len(list(executor.buckets))
    assert lines[-1].startswith(f"captured {count} of {count} graphs in ")
    assert lines[-1].endswith(f" s; {count}.0 MB of device memory")
    use = executor.graph_use
    assert (use.count, use.num_bytes) == (count, count * 1_000_000)
    assert use.seconds > 0.0


@of_one_task
def test_close_releases_the_graphs(runner):
    class Graph:
        alive = 0

        def __init__(self):
            Graph.alive += 1

        def __call__(self):
            pass

        def __del__(self):
            Graph.alive -= 1

    class Counted(RepeatedWork):
        def __init__(self):
            super().__init__()
            self.graphs = []

        def capture(self, work):
            self.graphs.append(Graph())
            return self.graphs[-1]

        def close(self):
            self.graphs.clear()

    executor = CudaRunner(runner.program, reference, make_arena(runner), Counted())
    assert Graph.alive

    executor.close()

    gc.collect()
    assert Graph.alive == 0
