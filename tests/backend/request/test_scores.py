"""Scores equal the functions in float64 over the whole range of fp32."""

from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch

from varlen.request.vectors import scores_of

# Half a last place of fp32, also of subnormal numbers, whose last place is fixed.
ROUNDING, SMALLEST = 2.0**-24, 2.0**-150
LOGITS = np.concatenate(
    [
        np.linspace(-110, 110, 22_001),
        *(sign * np.logspace(-44, 38, 5_001) for sign in (1, -1)),
        [0.0, -0.0, np.finfo(np.float32).max, np.finfo(np.float32).min],
    ]
).astype(np.float32)


def assert_rounded_once(actual, expected):
    assert actual.dtype == np.float32
    error = np.abs(actual.astype(np.float64) - expected)
    assert (error <= 1.001 * np.maximum(ROUNDING * expected, SMALLEST)).all()


def sigmoid64(logits):
    return torch.sigmoid(torch.from_numpy(logits).double()).numpy()


def test_a_sigmoid_is_that_of_float64_over_the_whole_range():
    scores = scores_of(LOGITS[:, None], "sigmoid")[:, 0]

    assert_rounded_once(scores, sigmoid64(LOGITS))


@pytest.mark.parametrize("logit", ["-15.05", "-18", "-20", "-87", "-100", "0.5", "16"])
def test_a_sigmoid_is_that_of_decimal_arithmetic(logit):
    getcontext().prec = 40
    exact = 1 / (1 + (-Decimal(float(np.float32(logit)))).exp())

    (score,) = scores_of(np.array([logit], np.float32), "sigmoid")

    assert abs(Decimal(float(score)) - exact) <= max(exact * Decimal(ROUNDING), Decimal(SMALLEST))


def test_low_logits_keep_their_order():
    logits = np.linspace(-103, -1, 10_001, dtype=np.float32)

    scores = scores_of(logits, "sigmoid")

    # from -88 on they are subnormal, so the last of them are few
    assert (np.diff(scores) >= 0).all()
    assert (np.diff(scores[logits > -85]) > 0).all()


@pytest.mark.parametrize("spread", [1e-30, 1.0, 30.0, 1e4, 1e38])
@pytest.mark.parametrize("shape", [(50, 1), (50, 2), (7, 9, 28)], ids=str)
def test_a_softmax_is_that_of_float64_over_the_whole_range(rng, spread, shape):
    logits = (rng.uniform(-1, 1, shape) * spread).astype(np.float32)

    scores = scores_of(logits, "softmax")

    expected = torch.softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    assert_rounded_once(scores, expected)


def test_infinite_logits_give_the_limits_and_nan_stays():
    logits = np.array([np.inf, -np.inf, np.nan], np.float32)

    np.testing.assert_array_equal(scores_of(logits, "sigmoid"), [1, 0, np.nan])


def test_no_activation_returns_the_logits():
    assert scores_of(LOGITS, "none") is LOGITS
