"""Bias and activation on a GPU or in the interpreter, against the reference in fp64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import activation
from varlen_kernels.triton.activation import activate
from varlen_kernels.tuning import forced_launch

from ..float64 import check_activation, whole_range
from .compare import DTYPES, SIZES, assert_close, rand, spread
from .guards import write_guarded

KINDS = pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])


def inputs(tokens, width, dtype, device):
    """Return x and bias."""
    x = 3 * rand(tokens, width, dtype=dtype, device=device)
    return x, rand(width, dtype=dtype, device=device, seed=1)


@DTYPES
@KINDS
@SIZES
def test_matches_the_reference(tokens, width, kind, dtype, device):
    x, bias = inputs(tokens, width, dtype, device)

    actual = write_guarded(
        lambda out: activate(x, bias, kind=kind, out=out), (tokens, width), dtype, device
    )

    assert_close(actual, reference.activate(x.double(), bias.double(), kind=kind), dtype)


@DTYPES
@KINDS
def test_the_bias_is_optional(kind, dtype, device):
    x, _ = inputs(5, 300, dtype, device)

    assert_close(activate(x, kind=kind), reference.activate(x.double(), kind=kind), dtype)


@pytest.mark.parametrize("width", [5, 768])
def test_accepts_strided_rows(width, device):
    x, bias = inputs(6, width, torch.float16, device)

    actual = write_guarded(
        lambda out: activate(spread(x), bias, kind="gelu", out=out),
        (6, width),
        torch.float16,
        device,
        gap=16,
    )

    expected = reference.activate(x.double(), bias.double(), kind="gelu")
    assert_close(actual, expected, torch.float16)


@DTYPES
@KINDS
def test_in_place_writes_the_same_bits(kind, dtype, device):
    x, bias = inputs(6, 300, dtype, device)
    fresh = activate(x, bias, kind=kind)

    returned = activate(x, bias, kind=kind, out=x)

    assert returned.data_ptr() == x.data_ptr()
    assert torch.equal(x, fresh)


@pytest.mark.full
@pytest.mark.parametrize("width", [101, 3072])
def test_every_candidate_launch_matches_the_reference(width, device):
    x, bias = inputs(5, width, torch.float16, device)
    expected = reference.activate(x.double(), bias.double(), kind="gelu")

    for launch in activation.candidate_launches(width, torch.float16):
        with forced_launch("activate", (width, torch.float16), launch):
            assert_close(activate(x, bias, kind="gelu"), expected, torch.float16)


@KINDS
def test_activations_are_those_of_float64_over_the_whole_range(kind, device):
    x = whole_range().to(device)

    check_activation(activate(x, kind=kind).cpu(), x.cpu(), kind)


def test_gelu_is_exact_to_the_last_places_of_fp32(device):
    x = torch.linspace(-12, 12, 100_000, device=device).view(-1, 1000)
    expected = 0.5 * x.double() * torch.erfc(-x.double() / 2**0.5)

    error = (activate(x, kind="gelu").double() - expected).abs()

    # |x| * 2 ** -24 is half the last place of x
    assert (error <= 4 * 2**-24 * expected.abs().clamp_min(0.25)).all()
    # where the erf form cancels, this one does not
    tail = (x > -5) & (x < -1)
    assert (error[tail] <= 1e-4 * expected[tail].abs()).all()


@DTYPES
def test_gelu_of_every_16_bit_number_has_only_rounding_error(dtype, device):
    if dtype == torch.float32:
        pytest.skip("too many numbers")
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype).to(device)
    x = x[x.isfinite()].view(1, -1)

    actual = activate(x, kind="gelu").double()

    exact = 0.5 * x.double() * torch.erfc(-x.double() / 2**0.5)
    rounding = (exact.to(dtype).double() - exact).abs()
    # a number that lies halfway may go either way, and far below 0 GELU vanishes in 1e-14
    assert ((actual - exact).abs() <= rounding + 1e-2 * rounding + 2e-4 * exact.abs() + 1e-7).all()


@pytest.mark.parametrize("kind, below", [("gelu", 0.0), ("relu", 0.0)])
def test_infinities_give_the_limits(kind, below, device):
    x = torch.tensor([[torch.inf, -torch.inf]], device=device)

    actual = activate(x, kind=kind)

    assert actual[0, 0] == torch.inf
    assert abs(actual[0, 1] - below) < 1e-13


@KINDS
def test_nan_gives_nan(kind, device):
    x = torch.ones(3, 100, device=device)
    x[1, 7] = torch.nan

    actual = activate(x, kind=kind)

    assert torch.equal(actual.isnan(), x.isnan())


@KINDS
def test_no_tokens(kind, device):
    assert activate(torch.zeros(0, 64, device=device), kind=kind).shape == (0, 64)


def test_rejects_a_bias_of_another_width(device):
    x, _ = inputs(2, 8, torch.float32, device)

    with pytest.raises(ValueError, match=r"bias has shape \[7\] .* must be \[8\]"):
        activate(x, torch.zeros(7), kind="relu")
