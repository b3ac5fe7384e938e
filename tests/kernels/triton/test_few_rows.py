"""Decode kernels for few rows against the reference in float64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.reference.few_rows import FoldedNorm
from varlen_kernels.triton import arrivals, few_rows

from .compare import DTYPES, assert_close, rand, spread
from .guards import Guarded, write_guarded

ROWS = pytest.mark.parametrize(
    "rows", [1, 3, *(pytest.param(each, marks=pytest.mark.full) for each in (4, 8)), 17]
)
NORMS = pytest.mark.parametrize("is_rms", [True, False], ids=["rms", "layer"])
EPS = 1e-5


def weight_of(hidden, features, dtype, device):
    """Return a weight in the layout of the kernels, `[hidden, features]`."""
    return (rand(features, hidden, device=device, seed=1) / hidden**0.5).to(dtype).t()


def norm_of(weight, bias, dtype, *, is_rms):
    """Return a norm folded into a linear layer."""
    device, hidden = weight.device, len(weight)
    gain = (rand(hidden, device=device, seed=2) / 4 + 1).to(dtype)
    if is_rms:
        return FoldedNorm(gain, None, None, bias)
    shift = rand(hidden, dtype=dtype, device=device, seed=3)
    folded = shift.double() @ weight.double() + (0 if bias is None else bias.double())
    return FoldedNorm(gain, shift, (gain.double() @ weight.double()).float(), folded.float())


def exact(value):
    """Return tensors of an argument in float64."""
    if isinstance(value, FoldedNorm):
        return FoldedNorm(*map(exact, value))
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floats else value


@DTYPES
@ROWS
@NORMS
@pytest.mark.parametrize(
    ("hidden", "features", "kind", "is_gated"),
    [(48, 40, None, False), (33, 70, "gelu_tanh", False), (80, 46, "silu", True)],
    ids=["plain", "activated", "gated"],
)
def test_norm_linear_is_right(rows, hidden, features, kind, is_gated, is_rms, dtype, device):
    # a mean that the norm has to take away
    x = spread((rand(rows, hidden, device=device) + 0.5).to(dtype))
    weight = weight_of(hidden, features, dtype, device)
    bias = rand(features, dtype=dtype, device=device, seed=4)
    arguments = (x, weight, bias, norm_of(weight, bias, dtype, is_rms=is_rms))
    options = {"eps": EPS, "is_gated": is_gated} | ({"kind": kind} if kind else {})

    expected = reference.norm_linear(*map(exact, arguments), **options)
    found = write_guarded(
        lambda out: few_rows.norm_linear(*arguments, **options, out=out),
        tuple(expected.shape),
        dtype,
        device,
        gap=3,
    )
    assert_close(found, expected, dtype, factor=2.0)
