"""Weights of logits, as compiled code computes them."""

import numba
import numpy as np

from varlen_kernels.cpu.bodies.sampling import _LARGEST, _weigh


@numba.njit
def weigh(logits, best, weights):
    _weigh(logits, best, 1.0, weights)


def weights_of(logits, best=0.0):
    logits = np.asarray(logits, np.float32)
    weights = np.full(len(logits), np.nan)
    weigh(logits, best, weights)
    return weights


def test_weights_are_powers_to_an_ulp():
    draw = np.random.default_rng(0)
    # all sizes, and the whole range
    logits = np.concatenate([-np.logspace(-30, 2.85, 20_000), -708 * draw.random(200_000)])
    logits = logits[logits > -708].astype(np.float32)

    exact = np.exp(logits.astype(np.longdouble))

    error = np.abs(weights_of(logits) - exact) / exact
    assert error.max() <= np.finfo(np.float64).eps


def test_ends_of_the_range_have_weights():
    found = weights_of([0, -0.0, -709, -np.inf, np.nan, -_LARGEST])
    assert found.tolist() == [1, 1, 0, 0, 0, 0]
    assert weights_of([np.inf, _LARGEST, -_LARGEST], float(_LARGEST)).tolist() == [1, 1, 0]
