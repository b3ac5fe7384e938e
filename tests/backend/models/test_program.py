"""The recorded forward pass: its lifetimes, and what running it may and may not touch."""

import numpy as np
import pytest
import torch

from varlen.config import EngineConfig
from varlen.memory.workspace import Usage, Workspace, assign_slots
from varlen.models.checkpoint import Checkpoint
from varlen.models.program import Batch, Recorder, Value
from varlen.models.runner import Runner
from varlen.request import Sequence
from varlen_kernels import reference

TASK_KINDS = {
    "embed": "BertModel",
    "hidden": "BertModel",
    "classify": "BertForSequenceClassification",
    "rerank": "BertForSequenceClassification",
    "token_classify": "BertForTokenClassification",
}


@pytest.fixture(params=TASK_KINDS)
def runner(request, make_checkpoint):
    folder = make_checkpoint(TASK_KINDS[request.param])
    return Runner(Checkpoint.open(folder), EngineConfig(task=request.param, dtype="fp32"))


def sequences(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [Sequence(rng.integers(0, 50, n).astype(np.int32)) for n in lengths]


def run(runner, lengths, seed=0):
    return runner.run(sequences(lengths, seed), [True] * len(lengths))


def spans(program):
    """Return (first op, last op) of each value that ops write, found by searching the whole list for each."""
    names = [op.result.name for op in program.ops]
    found = {}
    for name in names:
        readers = [
            index
            for index, op in enumerate(program.ops)
            if name in [x.name for x in op.operands if isinstance(x, Value)]
        ]
        found[name] = (names.index(name), max([names.index(name), *readers]))
    return found


def buffers(runner):
    """Return every buffer of every workspace: one workspace per core, and one for all of them."""
    return [buffer for workspace in runner.executor.workspaces for buffer in workspace._buffers]


@torch.inference_mode()
def poison(runner):
    """Fill every buffer with NaN, in whichever float format it is read."""
    for buffer in buffers(runner):
        buffer.fill_(0xFF)


def poison_every_view(runner, monkeypatch):
    """Fill each view with NaN as it is handed out, unless it takes over what its op reads."""
    usages, view, poisoned = runner.program.usages(), Workspace.view, []

    def poisoned_view(self, name, shape, dtype):
        out = view(self, name, shape, dtype)
        parent = usages[name].inherits
        if parent is None or usages[parent].last_op != usages[name].first_op:
            out.view(torch.uint8).fill_(0xFF)
            poisoned.append(name)
        return out

    monkeypatch.setattr(Workspace, "view", poisoned_view)
    return poisoned


def test_usages_match_a_search_of_the_op_list(runner):
    program = runner.program

    usages = program.usages()

    expected = spans(program)
    del expected[program.output.name]
    assert {name: (u.first_op, u.last_op) for name, u in usages.items()} == expected
    firsts = [usage.first_op for usage in usages.values()]
    assert firsts == sorted(firsts)


def test_usages_hold_enough_bytes_for_every_batch(runner):
    usages = runner.program.usages()
    for op in runner.program.ops:
        if op.result.name not in usages:
            continue
        for tokens, count in [(1, 1), (5, 1), (5, 5), (97, 13)]:
            size = torch.Size(op.result.at(tokens, count)).numel() * op.result.dtype.itemsize
            assert size <= tokens * usages[op.result.name].bytes_per_token


def test_only_ops_that_work_in_place_inherit(runner):
    usages = runner.program.usages()
    for op in runner.program.ops:
        if op.result.name not in usages:
            continue
        parent = usages[op.result.name].inherits
        if parent is not None:
            assert op.kernel in reference.IN_PLACE
            assert parent == op.operands[0].name


def test_the_residual_is_kept_until_it_is_added(runner):
    usages = runner.program.usages()
    slot_of = assign_slots(usages)
    for index, op in enumerate(runner.program.ops):
        if op.kernel != "add_layer_norm":
            continue
        residual = op.operands[1].name
        assert usages[residual].last_op >= index
        between = [n for n, u in usages.items() if usages[residual].first_op < u.first_op <= index]
        assert all(slot_of[name] != slot_of[residual] for name in between)


def test_a_deeper_model_needs_no_more_slots(make_checkpoint):
    slots = []
    for layers in (2, 9):
        folder = make_checkpoint(num_hidden_layers=layers)
        runner = Runner(Checkpoint.open(folder), EngineConfig(dtype="fp32"))
        slots.append(len(set(assign_slots(runner.program.usages()).values())))

    assert slots[0] == slots[1]


def test_poisoned_memory_changes_no_bit(runner, monkeypatch):
    clean = [answer.copy() for answer in run(runner, [3, 1, 7, 7, 20])]
    poison(runner)
    seen = poison_every_view(runner, monkeypatch)

    poisoned = run(runner, [3, 1, 7, 7, 20])

    assert seen
    for mine, theirs in zip(poisoned, clean, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_an_answer_is_not_workspace_memory(runner):
    first = run(runner, [4, 9], seed=1)
    kept = [answer.copy() for answer in first]

    run(runner, [4, 9], seed=2)
    poison(runner)

    for answer, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(answer, copy)


def test_an_answer_shares_no_memory_with_the_next_one(runner):
    first, second = run(runner, [4, 9]), run(runner, [4, 9])

    assert not any(np.shares_memory(a, b) for a, b in zip(first, second, strict=True))


def test_memory_does_not_grow_with_batches_of_one_size(runner):
    run(runner, [8, 8, 3])
    run(runner, [1])
    addresses = [buffer.data_ptr() for buffer in buffers(runner)]
    sizes = [buffer.numel() for buffer in buffers(runner)]
    assert any(sizes)

    for seed in range(5):
        run(runner, [8, 8, 3], seed=seed)
        run(runner, [1], seed=seed)

    assert [buffer.data_ptr() for buffer in buffers(runner)] == addresses
    assert [buffer.numel() for buffer in buffers(runner)] == sizes


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

    for mine, theirs in zip(*answers, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_a_batch_does_not_depend_on_the_ones_before(runner):
    alone = [answer.copy() for answer in run(runner, [5, 2])]

    run(runner, [40, 1, 13])
    again = run(runner, [5, 2])

    for mine, theirs in zip(again, alone, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_normalize_is_chosen_by_sequence(small_bert):
    runner = Runner(Checkpoint.open(small_bert), EngineConfig(dtype="fp32"))
    rows = sequences([9, 2, 9, 5])

    mixed = runner.run(rows, [True, False, False, True])

    plain = runner.run(rows, [False] * 4)
    for index, normalized in enumerate([True, False, False, True]):
        expected = plain[index] / np.linalg.norm(plain[index]) if normalized else plain[index]
        np.testing.assert_allclose(mixed[index], expected, rtol=0, atol=1e-6)


def test_a_value_read_by_two_ops_lives_until_the_second():
    ops, x = Recorder(), Value("x", ("tokens", 4), torch.float32)
    weight, bias = torch.randn(4, 4), torch.randn(4)
    first = ops.linear(x, weight, bias)
    second = ops.activate(first, kind="relu")
    third = ops.linear(second, weight, bias)
    program = ops.finish(ops.add_layer_norm(third, first, bias, bias, eps=1e-6))

    usages = program.usages()
    slots = assign_slots(usages)

    assert usages[first.name] == Usage(0, 3, 16)
    # `second` may not take the memory of `first`, which is read again
    assert slots[second.name] != slots[first.name]
    batch = Batch({"x": torch.randn(3, 4)}, tokens=3, sequences=1)
    output = program.run(batch, reference, Workspace(usages))
    hidden = batch.inputs["x"] @ weight + bias
    added = hidden.clamp(min=0) @ weight + bias + hidden
    expected = torch.nn.functional.layer_norm(added, (4,), bias, bias, 1e-6)
    torch.testing.assert_close(output, expected)


def test_a_batch_that_grows_keeps_what_it_holds():
    ops, x = Recorder(), Value("x", ("tokens", 4), torch.float32)
    value = x
    for _ in range(3):
        value = ops.tanh(value)
    program = ops.finish(ops.to_fp32(value))
    workspace = Workspace(program.usages())

    for tokens in (1, 5000, 3):
        batch = Batch({"x": torch.randn(tokens, 4)}, tokens=tokens, sequences=1)
        output = program.run(batch, reference, workspace)
        torch.testing.assert_close(output, batch.inputs["x"].tanh().tanh().tanh())


def test_an_op_never_writes_into_an_input():
    ops, x = Recorder(), Value("x", ("tokens", 4), torch.float32)
    program = ops.finish(ops.to_fp32(ops.tanh(x)))
    inputs = torch.randn(3, 4)
    before = inputs.clone()

    batch = Batch({"x": inputs}, tokens=3, sequences=1)
    program.run(batch, reference, Workspace(program.usages()))

    assert torch.equal(inputs, before)
