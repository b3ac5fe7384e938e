"""The compiled activation of CPUs, on sizes that are and are not whole vectors."""

from typing import get_args

import pytest
import torch

from tests.kernels.float64 import DTYPES, check, check_activation, rand, whole_range
from varlen_kernels import Activation, cpu, reference
from varlen_kernels.op_table import OPS

SIZES = pytest.mark.parametrize(
    "rows, features", [(0, 8), (3, 5), (4096, 1), (300, 100), (5, 1023), (64, 768)], ids=str
)


@pytest.fixture(autouse=True)
def compiled_for_every_width(monkeypatch):
    for name in ("activate", "activate_gate"):
        monkeypatch.setattr(OPS[name], "runs", None)


@DTYPES
@SIZES
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_gelu_tanh_matches_the_reference_in_a_poisoned_out_and_in_place(
    rows, features, has_bias, dtype
):
    x = 4 * rand(rows, features, dtype=dtype)
    bias = rand(features, dtype=dtype, seed=1) if has_bias else None
    before, expected = x.clone(), reference.activate(x, bias, kind="gelu_tanh")
    out = torch.full_like(x, torch.nan)

    assert cpu.activate(x, bias, kind="gelu_tanh", out=out) is out
    assert torch.equal(x, before)
    check(out, expected, dtype)
    assert torch.equal(cpu.activate(x, bias, kind="gelu_tanh"), out)
    assert torch.equal(cpu.activate(x, bias, kind="gelu_tanh", out=x), out)


@DTYPES
@SIZES
def test_a_gate_of_gelu_tanh_matches_the_reference(rows, features, dtype):
    x = 3 * rand(rows, 2 * features, dtype=dtype)
    out = torch.full((rows, features), torch.nan, dtype=dtype)

    assert cpu.activate_gate(x, kind="gelu_tanh", out=out) is out
    check(out, reference.activate_gate(x, kind="gelu_tanh"), dtype)


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("kind", get_args(Activation))
def test_activations_are_those_of_float64_over_the_whole_range(kind, ops):
    x = whole_range()

    check_activation(ops.activate(x, kind=kind), x, kind)
    gates = torch.cat([x, torch.ones_like(x)], dim=1)
    check_activation(ops.activate_gate(gates, kind=kind), x, kind)


def test_nan_changes_only_its_own_result():
    x = torch.zeros(8, 600)
    x[3, 5] = torch.nan

    actual = cpu.activate(x, kind="gelu_tanh")

    assert torch.equal(actual.isnan(), x.isnan())


@pytest.mark.parametrize("runs", [None, lambda _: False], ids=["compiled", "torch"])
def test_a_row_has_the_same_bits_alone_and_among_others(monkeypatch, runs):
    for name in ("activate", "activate_gate"):
        monkeypatch.setattr(OPS[name], "runs", runs)
    # torch computes the rest beside whole vectors in another way
    x = 4 * rand(9, 1280)

    together = cpu.activate(x, kind="gelu_tanh")
    gated = cpu.activate_gate(x, kind="gelu_tanh")

    for row in range(9):
        alone = x[row : row + 1].contiguous()
        assert torch.equal(cpu.activate(alone, kind="gelu_tanh")[0], together[row])
        assert torch.equal(cpu.activate_gate(alone, kind="gelu_tanh")[0], gated[row])


def test_threads_give_the_same_bits(monkeypatch):
    x = rand(401, 700)
    expected = cpu.activate(x, kind="gelu_tanh")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    assert torch.equal(cpu.activate(x, kind="gelu_tanh"), expected)
