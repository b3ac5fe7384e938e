"""Compiled programs give the results of their ops, on any number of cores."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.backend.models.paged import run_in_chunks
from tests.closeness import assert_close, encoder_roundings
from tests.plain_run import pack
from varlen.config import EngineConfig
from varlen.execution.cpu.compiled_program import compile_program
from varlen.execution.cpu.linear_paths import PLAIN
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Program
from varlen.request.request import Prompt, RequestOptions
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native.threads import using_cores

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the functions")

KINDS = ["BertModel", "DistilBertModel", "ModernBertModel", "NomicBertModel", "LlamaModel"]


def runner_of(folder, task="hidden"):
    config = EngineConfig(device="cpu", dtype="fp32", task=task, max_batch_tokens=512)
    return Runner(Checkpoint.open(folder), config)


def batch_of(program, lengths):
    numbers = np.random.default_rng(0)
    prompts = [Prompt(numbers.integers(0, 50, n, dtype=np.int32)) for n in lengths]
    return pack(program, prompts, RequestOptions(normalize=True))


@torch.inference_mode()
def run(runner, batch, cores=1, executor=None):
    region = runner.arena.allocate(batch.dims)
    region.memory.fill_(0xFF)
    with using_cores(cores):
        (output,) = (executor or runner.program).run(batch, cpu, region)
    return output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[1], [3, 40], [7] * 20, [60, 2]], ids=str)
def test_an_encoder_has_the_results_of_its_ops(make_checkpoint, kind, lengths):
    folder = make_checkpoint(kind)
    runner = runner_of(folder)
    compiled = compile_program(runner.program, cpu)
    batch = batch_of(runner.program, lengths)

    one = run(runner, batch, executor=compiled)

    assert_close(one, run(runner, batch), roundings=encoder_roundings(folder))
    for cores in (2, 3):
        assert torch.equal(run(runner, batch, cores, compiled), one)


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(small_bert):
    runner = runner_of(small_bert)
    compiled = compile_program(runner.program, cpu)
    batch = batch_of(runner.program, [30, 11, 60])

    together = run(runner, batch, executor=compiled)

    alone = batch_of(runner.program, [30])
    assert torch.equal(run(runner, alone, executor=compiled), together[:30])


def test_each_run_has_its_own_sizes_and_cores(small_bert):
    runner = runner_of(small_bert)
    compiled = compile_program(runner.program, cpu)
    batches = [batch_of(runner.program, lengths) for lengths in ([30, 11], [41], [5])]

    for batch, cores in [(0, 1), (0, 1), (1, 1), (1, 2), (0, 2), (2, 1), (0, 1)]:
        actual = run(runner, batches[batch], cores, compiled)
        fresh = compile_program(runner.program, cpu)
        assert torch.equal(actual, run(runner, batches[batch], executor=fresh))


@pytest.mark.parametrize("task", ["embed", "hidden"])
def test_an_encoder_with_its_head_is_one_stretch_of_calls(small_bert, task):
    runner = runner_of(small_bert, task)
    compiled = compile_program(runner.program, cpu)
    batch = batch_of(runner.program, [5, 9])

    actual = run(runner, batch, executor=compiled)

    assert compiled.is_one_call
    assert_close(actual, run(runner, batch), roundings=encoder_roundings(small_bert))


def test_a_step_whose_products_are_not_compiled_has_the_results_of_its_ops(make_checkpoint):
    folder = make_checkpoint("GPT2LMHeadModel")
    rows, sizes = [range(1, 30), range(5, 12), range(20, 21)], [7, 1, 1]

    hidden, logits = run_in_chunks(folder, rows, sizes, compiled=True, path=PLAIN)

    expected = run_in_chunks(folder, rows, sizes)
    roundings = encoder_roundings(folder)
    for actual, right in zip((*hidden, *logits), (*expected[0], *expected[1]), strict=True):
        assert_close(actual, right, roundings=roundings)


def test_an_encoder_whose_products_are_not_compiled_is_not(small_bert):
    runner = runner_of(small_bert)
    products = {op.kernel for op in runner.program.ops if op.kernel.startswith("linear")}
    plain = Program(
        [
            replace(op, kernel="linear_packed") if op.kernel in products else op
            for op in runner.program.ops
        ],
        runner.program.outputs,
    )

    assert compile_program(runner.program, cpu, needs_products=True) is not None
    assert compile_program(plain, cpu, needs_products=True) is None
    assert compile_program(plain, cpu) is not None


def test_kernels_of_other_modules_have_no_compiled_form(small_bert):
    program = Runner(
        Checkpoint.open(small_bert), EngineConfig(device="cpu", dtype="fp32"), kernels=reference
    ).program

    assert compile_program(program, reference) is None
