"""The recorded forward pass of an encoder: lifetimes, and the memory that it may touch."""

import random

import numpy as np
import pytest
import torch

from tests.checkpoints import KIND_OF_TASK
from tests.closeness import assert_close, assert_rows_close, encoder_roundings
from tests.plain_run import pack, run_without_arena
from varlen.config import EngineConfig
from varlen.execution.packing import dims_of
from varlen.execution.runner import Runner
from varlen.memory.arena import Arena
from varlen.memory.planner import Layout, Size, Usage
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import PackedBatch, bytes_of
from varlen.program.recorder import Recorder
from varlen.request.request import RequestOptions
from varlen_kernels import reference
from varlen_kernels.op_table import OPS

from ..requests import random_prompts
from .poison import POISON, PoisonBetweenOps

# one sequence of three tokens
THREE = dims_of([3])
PLAIN = RequestOptions()
NORMALIZED = RequestOptions(normalize=True)


@pytest.fixture(params=KIND_OF_TASK)
def runner(request, make_checkpoint):
    folder = make_checkpoint(KIND_OF_TASK[request.param])
    return Runner(
        Checkpoint.open(folder), EngineConfig(task=request.param, dtype="fp32"), kernels=reference
    )


def run(runner, lengths, seed=0):
    return runner.run(random_prompts(lengths, seed), [NORMALIZED] * len(lengths))


def make_arena(program, max_tokens=100):
    largest = {"tokens": max_tokens, "sequences": max_tokens, "masks": max_tokens}
    return Arena(Layout(program.buffers, 64), largest, torch.device("cpu"))


def spans(program):
    """Return (first op, last op) of each value, found by brute-force search."""
    found = {}
    for made_by, op in enumerate(program.ops):
        for name in [result.name for result in op.results]:
            readers = [
                index for index, op in enumerate(program.ops) if name in [x.name for x in op.reads]
            ]
            found[name] = (made_by, max([made_by, *readers]))
    return found


def make_batch(program, lengths, seed=0):
    return pack(program, random_prompts(lengths, seed), NORMALIZED)


@torch.inference_mode()
def poison(runner):
    """Fill the arena with NaN, in whichever float format it is read."""
    runner.arena.memory.fill_(POISON)


def test_usages_match_a_search_of_the_op_list(runner):
    program = runner.program
    expected = spans(program)
    in_place = {}
    for index, op in enumerate(program.ops[:-1]):
        parent = getattr(op.operands[0], "name", None)
        if (
            op.kernel in OPS
            and OPS[op.kernel].in_place
            and parent in expected
            and expected[parent][1] == index
        ):
            # the result reuses the parent's bytes
            in_place[op.results[0].name] = parent
    for name, parent in reversed(in_place.items()):
        expected[parent] = expected[parent][0], expected[name][1]
    kept = {
        name: span
        for name, span in expected.items()
        if name not in in_place and name != program.outputs[0].name
    }

    assert in_place
    assert {u.name: (u.first_op, u.last_op) for u in program.usages} == kept
    firsts = [usage.first_op for usage in program.usages]
    assert firsts == sorted(firsts)


def test_usages_have_the_bytes_of_what_ops_write(runner):
    results = {each.name: each for op in runner.program.ops for each in op.results}
    for usage in runner.program.usages:
        value = results[usage.name]
        for tokens, count in [(1, 1), (5, 1), (5, 5), (97, 13)]:
            dims = {"tokens": tokens, "sequences": count, "masks": count}
            size = torch.Size(value.at(dims)).numel() * value.dtype.itemsize
            assert usage.size.at(dims) == size


def test_a_batch_brings_only_what_the_task_reads(runner):
    names = ["token_ids", "position_ids", "type_ids", "cu_seqlens"]

    more = {"embed": ["cu_pooled", "normalize", "pooled_rows"], "fill_mask": ["mask_rows"]}
    expected = [*names, *more.get(runner.info.task, [])]
    assert [value.name for value in runner.program.inputs] == expected


def test_a_deeper_model_has_no_more_buffers(make_checkpoint):
    sizes = []
    for layers in (2, 9):
        folder = make_checkpoint(num_hidden_layers=layers)
        runner = Runner(Checkpoint.open(folder), EngineConfig(dtype="fp32"))
        sizes.append([buffer.size for buffer in runner.program.buffers])

    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("lengths", [[1], [3, 1, 7, 7, 20], [64] * 5], ids=str)
def test_poison_wherever_nothing_is_live_changes_no_bit(runner, lengths):
    batch = make_batch(runner.program, lengths)
    region = runner.arena.allocate(batch.dims)
    kernels = PoisonBetweenOps(runner.program, region.memory, reference)

    with torch.inference_mode():
        (poisoned,) = runner.program.run(batch, kernels, region)

    assert kernels.poisoned_bytes
    assert torch.equal(poisoned, run_without_arena(runner.program, batch.inputs)[0])


def test_answers_are_bit_equal_to_those_without_an_arena(runner):
    numbers = random.Random(0)
    for seed in range(40):
        lengths = [numbers.randint(1, 64) for _ in range(numbers.randint(1, 12))]
        batch = make_batch(runner.program, lengths, seed)
        region = runner.arena.allocate(batch.dims)
        with torch.inference_mode():
            region.memory.fill_(POISON)
            (planned,) = runner.program.run(batch, reference, region)

        assert torch.equal(planned, run_without_arena(runner.program, batch.inputs)[0])


def test_an_answer_is_not_arena_memory(runner):
    first = run(runner, [4, 9], seed=1)
    kept = [answer.copy() for answer in first]

    run(runner, [4, 9], seed=2)
    poison(runner)

    for answer, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(answer, copy)


def test_an_answer_shares_no_memory_with_the_next_one(runner):
    first, second = run(runner, [4, 9]), run(runner, [4, 9])

    assert not any(np.shares_memory(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("cores", [1, 3])
def test_the_number_of_cores_changes_no_answer(small_bert, cores):
    lengths = [9, 2, 30, 9, 5, 5, 17]
    kept = torch.get_num_threads()
    answers = []
    try:
        for threads in (2, cores):
            torch.set_num_threads(threads)
            runner = Runner(Checkpoint.open(small_bert), EngineConfig(dtype="fp32"))
            answers.append(run(runner, lengths))
            runner.close()
    finally:
        torch.set_num_threads(kept)

    assert_rows_close(*answers, roundings=encoder_roundings(small_bert))


def test_a_batch_does_not_depend_on_the_ones_before(runner):
    alone = [answer.copy() for answer in run(runner, [5, 2])]

    run(runner, [40, 1, 13])
    poison(runner)
    again = run(runner, [5, 2])

    for mine, theirs in zip(again, alone, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_batch_whose_sub_batches_do_not_fit_side_by_side_runs_as_a_whole(make_checkpoint):
    folder = make_checkpoint()
    roomy = Runner(Checkpoint.open(folder), EngineConfig(dtype="fp32"))
    # just enough for 64 tokens as a whole: sub-batches start at multiples of 64 bytes, and need more
    enough = roomy.arena.layout.plan(dims_of([1] * 64)).footprint
    config = EngineConfig(dtype="fp32", max_batch_tokens=64, arena_bytes=enough)
    tight = Runner(Checkpoint.open(folder), config)

    for lengths in ([31, 33], [15, 17, 32], [1] * 63, [64]):
        assert_rows_close(
            run(tight, lengths), run(roomy, lengths), roundings=encoder_roundings(folder)
        )
    assert tight.arena.use().reserved_bytes <= enough


def test_normalize_is_chosen_by_sequence(small_bert):
    runner = Runner(Checkpoint.open(small_bert), EngineConfig(dtype="fp32"))
    rows = random_prompts([9, 2, 9, 5])

    mixed = runner.run(rows, [NORMALIZED, PLAIN, PLAIN, NORMALIZED])

    plain = runner.run(rows, [PLAIN] * 4)
    for index, normalized in enumerate([True, False, False, True]):
        expected = plain[index] / np.linalg.norm(plain[index]) if normalized else plain[index]
        assert_close(mixed[index], expected, roundings=encoder_roundings(small_bert))


def test_a_value_read_by_two_ops_lives_until_the_second():
    ops = Recorder()
    x = ops.input("x", ("tokens", 4), torch.float32)
    weight, bias = torch.randn(4, 4), torch.randn(4)
    first = ops.linear(x, weight, bias)
    second = ops.activate(first, kind="relu")
    third = ops.linear(second, weight, bias)
    program = ops.finish(ops.add_layer_norm(third, first, bias, bias, eps=1e-6))

    assert program.usages[:2] == (
        Usage(first.name, 0, 3, Size(tokens=16)),
        # must not reuse the memory of the first, which is read again
        Usage(second.name, 1, 2, Size(tokens=16)),
    )
    batch = PackedBatch({"x": torch.randn(3, 4)}, THREE)
    (output,) = program.run(batch, reference, make_arena(program).allocate(THREE))
    hidden = batch.inputs["x"] @ weight + bias
    added = hidden.clamp(min=0) @ weight + bias + hidden
    expected = torch.nn.functional.layer_norm(added, (4,), bias, bias, 1e-6)
    torch.testing.assert_close(output, expected)


def test_a_value_that_is_read_twice_by_one_op_is_not_written_over():
    ops = Recorder()
    x = ops.input("x", ("tokens", 4), torch.float32)
    weight, bias = torch.randn(4, 4), torch.randn(4)
    first = ops.linear(x, weight, bias)
    second = ops.add_layer_norm(first, first, bias, bias, eps=1e-6)
    program = ops.finish(ops.to_fp32(second))

    assert [usage.name for usage in program.usages] == [first.name, second.name]


def test_a_batch_that_grows_keeps_what_it_holds():
    ops = Recorder()
    x = ops.input("x", ("tokens", 4), torch.float32)
    value = x
    for _ in range(3):
        value = ops.tanh(value)
    program = ops.finish(ops.to_fp32(value))
    arena = make_arena(program, 5000)

    for tokens in (1, 5000, 3):
        batch = PackedBatch({"x": torch.randn(tokens, 4)}, dims_of([tokens]))
        (output,) = program.run(batch, reference, arena.allocate(batch.dims))
        torch.testing.assert_close(output, batch.inputs["x"].tanh().tanh().tanh())


def test_an_op_never_writes_into_an_input():
    ops = Recorder()
    x = ops.input("x", ("tokens", 4), torch.float32)
    program = ops.finish(ops.to_fp32(ops.tanh(x)))
    inputs = torch.randn(3, 4)
    before = inputs.clone()

    batch = PackedBatch({"x": inputs}, THREE)
    program.run(batch, reference, make_arena(program).allocate(THREE))

    assert torch.equal(inputs, before)


def test_bytes_that_weights_share_count_once():
    table = torch.zeros(10, 4)
    others = [table, table.t(), table[:9].t(), table[3:7], table[:, 1:3], torch.zeros(0, 4)]

    assert bytes_of(others) == table.nbytes
    assert bytes_of([table[:2], table[5:]]) == 7 * 16
    assert bytes_of([*others, torch.zeros(3)]) == table.nbytes + 12
