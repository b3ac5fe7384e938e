"""Where nothing can be compiled, every op of CPUs runs in plain torch."""

import logging
import sys

import pytest
import torch

from tests.kernels.float64 import bounds_of, rand
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.reference.logit_edits import EditLists, EditState
from varlen_kernels.reference.rank_memory import rank_words

# Modules of ops on CPUs that need neither LLVM nor numba.
PLAIN = {
    "varlen_kernels.cpu.calls.calls",
    "varlen_kernels.cpu.calls.run_calls",
    "varlen_kernels.cpu.native.target_cpu",
    "varlen_kernels.cpu.native.threads",
}
ROOMS = ("bodies", "calls", "native")


def is_compiled(name):
    """Return whether a module, not a package, is in the rooms of compiled code."""
    rooms = tuple(f"varlen_kernels.cpu.{room}." for room in ROOMS)
    return name.startswith(rooms) and name not in PLAIN


@pytest.fixture(params=[ImportError("No module named 'llvmlite'"), OSError("no folder")], ids=str)
def without_code(request, monkeypatch):
    """Make the import of compiled ops fail."""

    class Refuses:
        def find_spec(self, name, path=None, target=None):
            if is_compiled(name):
                raise request.param

    for name in filter(is_compiled, [*sys.modules]):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    has_compiled_ops.cache_clear()
    yield
    has_compiled_ops.cache_clear()


def calls():
    """Return a call of each compiled op, as a function of the module of ops."""
    qkv, caches = rand(7, 3 * 2 * 8), [rand(4, 2, 16, 8, seed=seed) for seed in (1, 2)]
    ids, logits = torch.tensor([2, 0], dtype=torch.int32), rand(3, 50)
    paged = (qkv, *caches, bounds_of([1, 6]), torch.tensor([9, 6]).int(), ids, bounds_of([1, 1]))
    heads = {"num_heads": 2, "num_kv_heads": 2}
    half, zero = torch.full((3,), 0.5), torch.zeros(3, dtype=torch.int32)

    def append(ops):
        copies = [cache.clone() for cache in caches]
        slots, positions = torch.arange(3, 10), torch.arange(7, dtype=torch.int32)
        rows = ops.append_kv(qkv, slots, *copies, positions, rand(9, 8, seed=3), **heads)
        return torch.cat([each.flatten() for each in (rows, *copies)])

    x, alone = rand(4, 2048), {"rank": 0, "size": 1}

    def edit(ops):
        copy, ids = logits.clone(), torch.zeros(2, dtype=torch.int32)
        rows = torch.tensor([[1, 0, 1, 0, 0, 1]], dtype=torch.int32)
        begun = EditLists(torch.tensor([5]).int(), ids[:1], half[:1])
        state = EditState.new(1, 2, torch.device("cpu"))
        ops.edit_logits(copy, ids, ids, rows, torch.full((1, 3), 1.3), begun, state)
        return copy

    return {
        "activate": lambda ops: ops.activate(x, kind="gelu_tanh"),
        "activate_gate": lambda ops: ops.activate_gate(x, kind="gelu_tanh"),
        "attention_varlen": lambda ops: ops.attention_varlen(
            qkv, bounds_of([3, 4]), num_heads=2, scale=0.3
        ),
        "attention_paged": lambda ops: ops.attention_paged(*paged, **heads, scale=0.3),
        "append_kv": append,
        "all_reduce": lambda ops: ops.all_reduce(x, torch.zeros(rank_words(1)).long(), **alone),
        "gather_columns": lambda ops: ops.gather_columns(
            x, torch.zeros(rank_words(1)).long(), **alone, width=2048
        ),
        "sample_tokens": lambda ops: ops.sample_tokens(
            logits, half, zero, half, 0 * half, half.double()
        ),
        "edit_logits": edit,
        "beam_step": lambda ops: ops.beam_step(logits, half[None]).scores,
    }


@pytest.mark.parametrize("op", calls())
def test_an_op_gives_the_same_bits_as_its_reference(op, without_code):
    call = calls()[op]

    assert torch.equal(call(cpu), call(reference))


def test_blocks_are_copied(without_code):
    memory = rand(2, 6, 2, 3, 4)
    expected = memory.clone()
    expected[:, 5] = memory[:, 0]

    cpu.copy_blocks(memory, torch.tensor([(0, 5), (3, 3)], dtype=torch.int32))

    assert torch.equal(memory, expected)


def test_code_that_cannot_be_compiled_or_stored_counts_as_none(monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("varlen_kernels.cpu.calls.run_calls.prepare", fail)

    assert not has_compiled_ops.__wrapped__()
    assert "No space left on device" in caplog.text


def test_one_line_of_the_log_says_so(without_code, caplog):
    with caplog.at_level(logging.WARNING):
        for call in calls().values():
            call(cpu)

    assert [record.name for record in caplog.records] == ["varlen_kernels.cpu.calls.run_calls"]
    assert "ops on CPUs are not compiled" in caplog.text
