"""Compiled norms are the exact ones, also over their inputs."""

import pytest
import torch

from tests.kernels.float64 import check, rand
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.calls import calls
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native.threads import using_cores

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="norms are compiled")
SHAPES = pytest.mark.parametrize("rows, hidden", [(0, 8), (1, 1), (3, 48), (70, 100)], ids=str)
# Which tensors each op takes after its rows: a residual, a weight, a bias.
OPERANDS = {
    "layer_norm": "wb",
    "rms_norm": "w",
    "add_layer_norm": "rwb",
    "residual_layer_norm": "rwb",
    "residual_rms_norm": "rw",
}


def operands_of(name, rows, hidden):
    others = {"r": rand(rows, hidden, seed=1), "w": rand(hidden, seed=2), "b": rand(hidden, seed=3)}
    return [rand(rows, hidden), *(others[each] for each in OPERANDS[name])]


def results(value):
    return value if isinstance(value, tuple) else (value,)


@SHAPES
@pytest.mark.parametrize("name", OPERANDS)
def test_a_norm_is_the_exact_one(name, rows, hidden):
    operands = operands_of(name, rows, hidden)

    actual = results(getattr(cpu, name)(*operands, eps=1e-3))

    expected = getattr(reference, name)(*(each.double() for each in operands), eps=1e-3)
    for mine, exact in zip(actual, results(expected), strict=True):
        check(mine, exact)


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("cores", [1, 3])
def test_results_may_lie_over_the_inputs(name, cores, monkeypatch):
    monkeypatch.setattr("varlen_kernels.cpu.calls.run_calls._LEAST_SHARED_WORK", 1)
    monkeypatch.setattr(calls, "_LEAST_SHARED_CALL", 1)
    operands = operands_of(name, 70, 100)
    expected = results(getattr(cpu, name)(*operands, eps=1e-3))
    # the sum over the residual, the norm over the rows
    out = (operands[1], operands[0]) if len(expected) == 2 else operands[0]

    with using_cores(cores):
        actual = results(getattr(cpu, name)(*operands, eps=1e-3, out=out))

    for mine, right in zip(actual, expected, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "residual_layer_norm"])
def test_a_layer_norm_may_have_no_bias(name):
    operands = operands_of(name, 5, 40)[:-1]

    actual = results(getattr(cpu, name)(*operands, None, eps=1e-3))

    zero = torch.zeros(40)
    for mine, right in zip(
        actual, results(getattr(cpu, name)(*operands, zero, eps=1e-3)), strict=True
    ):
        check(mine, right)


def test_what_is_not_finite_stays_in_its_row():
    x, weight, bias = operands_of("layer_norm", 4, 40)
    expected = cpu.layer_norm(x, weight, bias, eps=1e-3)
    x[2, 7] = torch.nan

    actual = cpu.layer_norm(x, weight, bias, eps=1e-3)

    assert actual[2].isnan().all()
    assert torch.equal(actual[[0, 1, 3]], expected[[0, 1, 3]])


def test_equal_numbers_without_eps_have_no_layer_norm():
    assert cpu.layer_norm(torch.ones(2, 20), torch.ones(20), None, eps=0.0).isnan().all()


def test_embeddings_are_added_in_the_order_of_the_reference():
    ids = [torch.arange(40, dtype=torch.int32) % rows for rows in (30, 20, 2)]
    tables = [rand(rows, 48, seed=rows) for rows in (30, 20, 2)]
    weight, bias = rand(48, seed=1), rand(48, seed=2)

    actual = cpu.embed_layer_norm(*ids, *tables, weight, bias, eps=1e-3)

    token, position, kind = (table[each] for table, each in zip(tables, ids, strict=True))
    assert torch.equal(actual, cpu.layer_norm(token + position + kind, weight, bias, eps=1e-3))
