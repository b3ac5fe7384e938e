"""Products of rows sorted by group, and the choice of experts, against float64 in numpy."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.kernels.float64 import DTYPES, bounds_of, check, f64, rand
from varlen_kernels import reference

COUNTS = pytest.mark.parametrize(
    "counts", [[3, 0, 1, 7], [0, 0, 5], [1], [0, 0], [130, 2, 0]], ids=str
)


@DTYPES
@COUNTS
@pytest.mark.parametrize("hidden, features", [(1, 1), (63, 100), (16, 768), (129, 5)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_linear_groups_matches_float64(counts, hidden, features, has_bias, dtype):
    groups, rows = len(counts), sum(counts) + 2
    x = rand(rows, hidden, dtype=dtype)
    weight = rand(groups, features, hidden, dtype=dtype, seed=1)
    bias = rand(groups, features, dtype=dtype, seed=2) if has_bias else None

    actual = reference.linear_groups(x, weight, bounds_of(counts), bias)

    expected = np.zeros((rows, features))
    group_of = np.repeat(np.arange(groups), counts)
    for row, group in enumerate(group_of):
        expected[row] = f64(x)[row] @ f64(weight)[group].T
        if bias is not None:
            expected[row] += f64(bias)[group]
    check(actual, expected, dtype)
    assert not actual[sum(counts) :].any()


def routed(logits, count, normalize):
    """Return weights and experts of each token, with the rules written out."""
    logits = f64(logits)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights = np.take_along_axis(powers / powers.sum(axis=1, keepdims=True), chosen, axis=1)
    if normalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return weights, chosen


@pytest.mark.parametrize("tokens, experts, count", [(1, 1, 1), (7, 8, 2), (300, 60, 8)], ids=str)
@pytest.mark.parametrize("normalize", [0, 1], ids=["parts", "normalized"])
def test_route_tokens_sorts_choices_by_expert(tokens, experts, count, normalize):
    # few different numbers, so that many are equal
    logits = rand(tokens, experts, dtype=torch.float32).mul(4).round()

    weights, places, rows, cu_groups = reference.route_tokens(
        logits, count=count, normalize=normalize
    )

    expected, chosen = routed(logits, count, normalize)
    check(weights, expected, torch.float32)
    expert_of_row = np.repeat(np.arange(experts), cu_groups.diff().numpy())
    assert expert_of_row[places.numpy()].tolist() == chosen.tolist()
    assert sorted(places.flatten().tolist()) == list(range(tokens * count))
    assert rows[places].tolist() == [[token] * count for token in range(tokens)]
    for begin, end in pairwise(cu_groups.tolist()):
        assert rows[begin:end].tolist() == sorted(rows[begin:end].tolist())


@DTYPES
def test_sum_experts_matches_float64(dtype):
    logits = rand(300, 6, dtype=torch.float32)
    weights, places, rows, _ = reference.route_tokens(logits, count=3, normalize=0)
    x = rand(len(rows), 100, dtype=dtype)

    bias = rand(100, dtype=dtype, seed=1)

    actual, plain = (reference.sum_experts(x, weights, places, each) for each in (bias, None))

    expected = (f64(x)[places.numpy()] * f64(weights)[..., None]).sum(1)
    check(plain, expected, dtype)
    check(actual, expected + f64(bias), dtype)
