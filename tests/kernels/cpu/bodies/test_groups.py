"""Products of groups and experts equal the reference; a row always has the same bits."""

import pytest
import torch

from tests.kernels.float64 import DTYPES, bounds_of, check, f64, rand
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.bodies.panel_layout import pack_groups
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native.threads import using_cores

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the products")

# Rows of each group: of none, of less than a tile, of several blocks.
COUNTS = pytest.mark.parametrize("counts", [[0, 1, 0, 5], [200, 3], [1] * 9, [0, 0]], ids=str)
SIZES = pytest.mark.parametrize(
    "hidden, features", [(1, 1), (33, 100), (16, 130), (300, 5)], ids=str
)


def multiply(x, weight, counts, bias, out=None):
    return cpu.linear_groups_panels(x, pack_groups(weight), bounds_of(counts), bias, out=out)


def layer_of(counts, hidden, features, dtype=torch.float32, rest=0):
    groups = len(counts)
    x = rand(sum(counts) + rest, hidden, dtype=dtype)
    weight = rand(groups, features, hidden, dtype=dtype, seed=1)
    return x, weight, rand(groups, features, dtype=dtype, seed=2)


@COUNTS
@SIZES
@DTYPES
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_a_product_is_the_exact_one(counts, hidden, features, has_bias, dtype):
    x, weight, bias = layer_of(counts, hidden, features, dtype, rest=3)
    out = torch.full((len(x), features), torch.nan, dtype=dtype)

    actual = multiply(x, weight, counts, bias if has_bias else None, out)

    assert actual is out
    exact = reference.linear_groups(
        x.double(), weight.double(), bounds_of(counts), bias.double() if has_bias else None
    )
    check(actual, f64(exact), dtype)
    assert not actual[sum(counts) :].any()


@DTYPES
def test_a_row_has_the_same_bits_alone_among_others_and_on_any_number_of_cores(dtype):
    counts = [120, 0, 90]
    x, weight, bias = layer_of(counts, 700, 900, dtype)

    def results(cores):
        with using_cores(cores):
            return multiply(x, weight, counts, bias)

    expected = results(1)

    assert torch.equal(results(2), expected)
    for row, alone in [(0, [1, 0, 0]), (119, [1, 0, 0]), (150, [0, 0, 1])]:
        actual = multiply(x[row : row + 1], weight, alone, bias)
        assert torch.equal(actual, expected[row : row + 1])


@pytest.mark.parametrize("tokens, experts, count", [(1, 1, 1), (0, 4, 2), (70, 60, 8)], ids=str)
@pytest.mark.parametrize("normalize", [0, 1], ids=["parts", "normalized"])
def test_choices_are_those_of_the_reference(tokens, experts, count, normalize):
    # few different numbers, so that many are equal
    logits = rand(tokens, experts).mul(4).round()

    weights, *actual = cpu.route_tokens(logits, count=count, normalize=normalize)

    expected_weights, *expected = reference.route_tokens(logits, count=count, normalize=normalize)
    check(weights, f64(expected_weights))
    assert all(map(torch.equal, actual, expected))


def test_every_row_has_a_token_where_logits_are_no_numbers():
    logits = torch.full((5, 8), torch.nan)

    _, places, rows, cu_groups = cpu.route_tokens(logits, count=3, normalize=1)

    assert sorted(places.flatten().tolist()) == list(range(15))
    assert rows.bincount().tolist() == [3] * 5
    assert cu_groups[-1] == 15


@DTYPES
def test_a_sum_of_experts_is_the_exact_one(dtype):
    weights, places, rows, _ = reference.route_tokens(rand(70, 6), count=3, normalize=0)
    x = rand(len(rows), 100, dtype=dtype)

    bias = rand(100, dtype=dtype, seed=1)

    for each in (None, bias):
        exact = reference.sum_experts(
            x.double(), weights.double(), places, None if each is None else each.double()
        )
        check(cpu.sum_experts(x, weights, places, each), f64(exact), dtype)
