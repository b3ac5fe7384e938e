"""A batch that runs alone uses all cores and has the same answers."""

import os

import numpy as np
import pytest
import torch

from tests.checkpoints import SMALL_ENCODERS, save_checkpoint
from tests.closeness import assert_close, encoder_roundings
from varlen.config import EngineConfig
from varlen.execution.cpu import all_cores
from varlen.execution.cpu.all_cores import AllCores, token_bounds
from varlen.execution.cpu.linear_paths import PACKED, use_paths
from varlen.execution.cpu.runner import CpuRunner
from varlen.execution.model_state import OneShot
from varlen.execution.runner import Runner
from varlen.execution.thread_executor import CoreShare, LoneCores
from varlen.memory.planner import Size
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Op, Program, Value
from varlen.request.request import Prompt, RequestOptions
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.native.threads import usable_cores

CORES = 3


@pytest.fixture(autouse=True)
def _small_work_is_shared(monkeypatch):
    monkeypatch.setattr(all_cores, "_LEAST_WORK", 1)
    monkeypatch.setattr(all_cores, "_LEAST_TOGETHER", 1)


@pytest.fixture
def share():
    made = CoreShare()
    made.is_on = True
    yield made
    made.close()


def runner_of(folder, kernels=None, **settings):
    config = EngineConfig(device="cpu", max_batch_tokens=512, warmup_seconds=0, **settings)
    return Runner(Checkpoint.open(folder), config, workers=CORES, kernels=kernels)


def prompts_of(*lengths):
    numbers = np.random.default_rng(0)
    return [Prompt(numbers.integers(0, 50, n, dtype=np.int32)) for n in lengths]


def run(runner, *lengths):
    return runner.run(prompts_of(*lengths), [RequestOptions(normalize=True)] * len(lengths))


@pytest.mark.parametrize("lengths", [[1], [40], [60, 3, 50]])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_answers_are_those_of_one_core(small_bert, share, dtype, lengths):
    runner = runner_of(small_bert, dtype=dtype)
    expected = run(runner, *lengths)
    runner.share_cores(share)

    share.set_alone(True)

    roundings = encoder_roundings(small_bert, torch.float32)
    for row, one in zip(run(runner, *lengths), expected, strict=True):
        assert_close(row, one, roundings=roundings)


@pytest.mark.parametrize("family", SMALL_ENCODERS)
def test_every_family_has_the_same_answers(tmp_path, share, family):
    folder = save_checkpoint(tmp_path / "model", f"{family}Model", **SMALL_ENCODERS[family])
    runner = runner_of(folder, dtype="fp32", task="hidden")
    expected = run(runner, 39, 12)
    runner.share_cores(share)

    share.set_alone(True)

    roundings = encoder_roundings(folder, torch.float32)
    for row, one in zip(run(runner, 39, 12), expected, strict=True):
        assert_close(row, one, roundings=roundings)


def test_cores_change_from_one_op_to_the_next(small_bert, share, monkeypatch):
    runner = runner_of(small_bert, dtype="fp32")
    used = []

    class Kernels:
        """The kernels of a CPU; another batch runs beside the third op and the fourth."""

        def __getattr__(self, name):
            def call(*operands, **options):
                used.append((name, usable_cores()))
                share.set_alone(len(used) not in (2, 3))
                return getattr(cpu, name)(*operands, **options)

            return call

    # each op once
    monkeypatch.setattr("varlen.execution.cpu.all_cores.run_parts", whole)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    other = OneShot(CpuRunner(runner.program, Kernels(), runner.arena))
    other.device.share_cores(share, CORES)
    share.set_alone(True)

    run(other, 60)

    names = [op.kernel for op in runner.program.ops]
    assert [name for name, _ in used] == names
    attention = [cores for name, cores in used if name == "attention_varlen"]
    # of two layers: beside another batch, then alone
    assert attention == [1, CORES]


def whole(function, bounds, *arguments):
    function(bounds[0], bounds[-1], *arguments)


def test_ops_that_see_sequences_are_not_split(small_bert):
    program: Program = runner_of(small_bert, dtype="fp32").program

    together = {op.kernel for op in program.ops if not op.is_by_token}

    assert together == {"attention_varlen", "pool"}


def test_an_op_may_write_one_number_for_each_token(share):
    tokens = Size(tokens=1)
    x, length = Value("x", (tokens, 8), torch.float32), Value("length", (tokens,), torch.float32)
    program = Program([Op("norm", (x,), {}, (length,))], [length])

    class Kernels:
        @staticmethod
        def norm(x, *, out):
            torch.linalg.vector_norm(x, dim=1, out=out)

    share.set_alone(True)
    rows, out = torch.rand(90, 8), torch.empty(90)
    AllCores(program, LoneCores(share, CORES))(program.ops[0], Kernels.norm, [rows], (out,))

    torch.testing.assert_close(out, rows.norm(dim=1))


def test_packed_products_run_on_parts_of_usual_sizes(small_bert, share, monkeypatch):
    # another process may have a core meanwhile
    monkeypatch.setattr(LoneCores, "add_gain", lambda *_: None)
    runner = runner_of(small_bert, reference, dtype="fp32")
    rows = []

    class Kernels:
        def __getattr__(self, name):
            def call(*operands, **options):
                if name == PACKED:
                    rows.append(len(operands[0]))
                return getattr(cpu, name)(*operands, **options)

            return call

    other = OneShot(CpuRunner(use_paths(runner.program, {}, PACKED), Kernels(), runner.arena))
    other.device.share_cores(share, 2)
    share.set_alone(True)

    run(other, 60, 56)

    # 116 tokens are padded to 120
    assert set(rows) == {64, 56}


def test_an_op_of_little_work_stays_on_one_core(small_bert, share, monkeypatch):
    monkeypatch.undo()
    runner = runner_of(small_bert, dtype="fp32")
    monkeypatch.setattr(AllCores, "_run_rows", None)
    runner.share_cores(share)
    share.set_alone(True)

    # a product of 24 x 40 features needs 34,953 tokens
    assert len(run(runner, 60)) == 1


@pytest.mark.parametrize(
    "tokens, cores, bounds",
    [(1, 4, [0, 1]), (20, 4, [0, 16, 20]), (64, 2, [0, 32, 64]), (100, 3, [0, 40, 80, 100])],
)
def test_parts_have_enough_tokens_and_usual_sizes(tokens, cores, bounds):
    assert token_bounds(tokens, cores) == bounds


def test_another_process_reads_what_the_executor_writes(share):
    other = CoreShare(os.dup(share.file))

    assert not other.is_alone
    share.set_alone(True)
    assert other.is_alone
    share.is_on = False
    share.set_alone(True)
    assert not other.is_alone
    other.close()
