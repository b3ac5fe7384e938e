"""Weights of terms by slices of a vocabulary, against float64."""

import numpy as np
import pytest
import torch

from tests.kernels.float64 import bounds_of, f64, rand
from varlen_kernels import reference
from varlen_kernels.reference.vocabulary import SLICE_TERMS

LENGTHS = [3, 0, 2, 2, 1]


def expected(x, weight, bias, lengths, mode, logs):
    weights = np.maximum(f64(x) @ f64(weight) + (0 if bias is None else f64(bias)), 0)
    for _ in range(logs):
        weights = np.log1p(weights)
    rows = np.split(weights[: sum(lengths)], np.cumsum(lengths)[:-1])
    reduce = np.max if mode == "max" else np.sum
    empty = np.zeros((1, weights.shape[1]))
    return np.stack([reduce(row if len(row) else empty, axis=0) for row in rows])


@pytest.mark.parametrize("mode", ["max", "sum"])
@pytest.mark.parametrize("logs", [1, 2])
@pytest.mark.parametrize("terms", [1, SLICE_TERMS, SLICE_TERMS + 5])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
def test_weights_match_float64(has_bias, terms, logs, mode):
    # two tokens belong to no sequence
    x, table = rand(sum(LENGTHS) + 2, 12), rand(terms, 12, seed=1)
    bias = rand(terms, seed=2) if has_bias else None

    weights, _ = reference.term_weights(
        x, table.t(), bias, bounds_of(LENGTHS), mode=mode, logs=logs
    )

    exact = expected(x, table.t(), bias, LENGTHS, mode, logs)
    assert weights.dtype == torch.float32
    np.testing.assert_allclose(weights, exact, rtol=0, atol=2e-6 * exact.max())


@pytest.mark.parametrize("mode", ["max", "sum"])
@pytest.mark.parametrize("terms", [50, SLICE_TERMS + 5])
def test_bf16_rounds_logits_alone(terms, mode):
    x, weight = rand(8, 12, dtype=torch.bfloat16), rand(12, terms, dtype=torch.bfloat16, seed=1)

    weights, _ = reference.term_weights(x, weight, None, bounds_of(LENGTHS), mode=mode)

    exact = expected(x, weight, None, LENGTHS, mode, 1)
    np.testing.assert_allclose(weights, exact, rtol=0, atol=2e-2 * exact.max())


@pytest.mark.parametrize("mode", ["max", "sum"])
def test_poisoned_results_are_fully_overwritten_with_the_same_bits(mode):
    x, weight = rand(8, 12), rand(12, SLICE_TERMS + 9, seed=1)
    fresh, _ = reference.term_weights(x, weight, None, bounds_of(LENGTHS), mode=mode)
    out = torch.full_like(fresh, torch.nan), torch.full((8, SLICE_TERMS), torch.nan)

    weights, _ = reference.term_weights(x, weight, None, bounds_of(LENGTHS), mode=mode, out=out)

    assert weights is out[0]
    assert torch.equal(weights, fresh)


@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("terms, count", [(7, 7), (50, 3), (SLICE_TERMS + 5, 9)])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
def test_top_terms_match_float64(has_bias, terms, count, rows):
    x, table = rand(rows, 12), rand(terms, 12, seed=1)
    bias = rand(terms, seed=2) if has_bias else None
    out = torch.full((rows, 2, count), torch.nan)

    assert reference.top_terms(x, table.t(), bias, count=count, out=out) is out

    logits = f64(x) @ f64(table.t()) + (0 if bias is None else f64(bias))
    exact = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    exact /= exact.sum(axis=1, keepdims=True)
    best = np.argsort(-logits, axis=1)[:, :count]
    # two terms whose logits differ by less than rounding may change places
    found = np.take_along_axis(exact, out[:, 0].long().numpy(), axis=1)
    np.testing.assert_allclose(found, np.take_along_axis(exact, best, axis=1), rtol=2e-5)
    np.testing.assert_allclose(out[:, 1], found, rtol=2e-5)
    assert all(len(set(row)) == count for row in out[:, 0].tolist())


def test_top_terms_of_bf16_are_probabilities():
    x, weight = rand(5, 12, dtype=torch.bfloat16), rand(12, 40, dtype=torch.bfloat16, seed=1)

    found = reference.top_terms(x, weight, count=40)

    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[:, 1].sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 10.0, 20.0, 300.0])
def test_probabilities_of_top_terms_are_those_of_float64_over_the_whole_range(spread):
    # the logits themselves: products round
    logits = rand(1, SLICE_TERMS * 3 + 5) * spread

    found = reference.top_terms(torch.ones(1, 1), logits, count=100)

    exact = np.sort(torch.softmax(logits.double(), 1)[0].numpy())[::-1][:100]
    np.testing.assert_allclose(found[0, 1].double(), exact, rtol=1e-6, atol=2**-149)


@pytest.mark.parametrize("logs", [1, 2])
def test_weights_of_terms_are_those_of_float64_over_the_whole_range(logs):
    logits = torch.cat([torch.logspace(-37, 38, 20_001), torch.linspace(-110, 110, 2_001)])

    weights, _ = reference.term_weights(
        torch.ones(1, 1), logits[None], None, bounds_of([1]), mode="max", logs=logs
    )

    exact = np.maximum(f64(logits), 0)
    for _ in range(logs):
        exact = np.log1p(exact)
    np.testing.assert_allclose(weights[0].double(), exact, rtol=2e-7)
