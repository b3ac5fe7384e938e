"""Ops on the vectors of sequences give the results of float64."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from varlen_kernels import reference

from .float64 import bounds_of, rand

SHAPES = [(0, 5, 3), (1, 1, 1), (7, 100, 63), (3, 384, 1023)]


@pytest.mark.parametrize("rows, features, _", SHAPES, ids=str)
@pytest.mark.parametrize("out", ["fresh", "out", "in place"])
def test_a_residual_is_added(rows, features, _, out):
    x, residual = rand(rows, features), rand(rows, features, seed=1)
    expected = (x.double() + residual.double()).float()
    into = {"fresh": None, "out": torch.full_like(x, torch.nan), "in place": x}[out]

    actual = reference.add(x, residual, out=into)

    assert torch.equal(actual, expected)
    assert into is None or actual is into


@pytest.mark.parametrize("rows, features, _", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_total", [False, True], ids=["first", "next"])
def test_a_scaled_sum_is_in_fp32(rows, features, _, dtype, has_total):
    x, total = (
        rand(rows, features, dtype=dtype),
        rand(rows, features, seed=1) if has_total else None,
    )
    expected = 0.3 * x.double() + (0 if total is None else total.double())

    for out in (None, torch.full((rows, features), torch.nan)):
        actual = reference.add_scaled(x, total, factor=0.3, out=out)

        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=1e-6)
        assert out is None or actual is out


def test_rounded_numbers_keep_their_signs():
    x = torch.tensor([[0.0, 1e-3, -1e-3, 0.5, -0.5, 9.0, -9.0]])

    actual = reference.round_tanh(x, limit=127.0)

    assert actual.tolist() == [[0, 0, 0, 59, -59, 127, -127]]
    assert torch.equal(torch.signbit(actual), x < 0)


@pytest.mark.parametrize("rows, left, right", SHAPES, ids=str)
@pytest.mark.parametrize("has_out", [False, True], ids=["fresh", "out"])
def test_concat_puts_features_side_by_side(rows, left, right, has_out):
    parts = rand(rows, left), rand(rows, right, seed=1)
    out = torch.full((rows, left + right), torch.nan) if has_out else None

    joined = reference.concat(*parts, out=out)

    assert torch.equal(joined[:, :left], parts[0])
    assert torch.equal(joined[:, left:], parts[1])
    assert out is None or joined is out


@pytest.mark.parametrize("rows, features", [(0, 5), (1, 1), (7, 100), (3, 1023)], ids=str)
@pytest.mark.parametrize("has_out", [False, True], ids=["fresh", "out"])
def test_rows_are_normalized_where_asked_for(rows, features, has_out):
    x = rand(rows, features)
    normalize = torch.arange(rows) % 2 == 0
    out = torch.full_like(x, torch.nan) if has_out else None

    actual = reference.normalize_rows(x, normalize, out=out)

    expected = F.normalize(x.double(), dim=1).float()
    torch.testing.assert_close(actual[normalize], expected[normalize], rtol=1e-5, atol=1e-7)
    assert torch.equal(actual[~normalize], x[~normalize])
    assert out is None or actual is out


def test_a_row_of_zeros_stays_one_and_nan_stays_in_its_row():
    x = torch.zeros(3, 4)
    x[1, 2], x[2] = torch.nan, 2.0

    actual = reference.normalize_rows(x, torch.ones(3, dtype=torch.bool))

    assert not actual[0].any()
    assert actual[1].isnan().all()
    assert actual[2].tolist() == [0.5] * 4


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-13, 1e-6, 1.0, 1e15, 1e18, 1e30, 3e37])
@pytest.mark.parametrize("op", ["normalize_rows", "pool", "pool bf16"])
def test_vectors_of_any_size_are_normalized_as_in_float64(op, size):
    x = rand(4, 384) * size
    normalize = torch.tensor([True, True, False, True])

    if op.startswith("pool"):
        x = x.bfloat16() if op.endswith("bf16") else x
        actual = reference.pool(x, bounds_of([1] * 4), normalize, mode="cls")
    else:
        actual = reference.normalize_rows(x, normalize)

    expected = torch.where(normalize[:, None], F.normalize(x.double(), dim=1), x.double())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=2**-149)
