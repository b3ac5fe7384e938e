"""Activations on a GPU or in the interpreter: precision, limits, and what is refused."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton.activation import activate, activate_gate

from ..float64 import check_activation, whole_range
from .compare import DTYPES, assert_close, rand

KINDS = pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])


@DTYPES
@KINDS
def test_the_bias_is_optional(kind, dtype, device):
    x = 3 * rand(5, 300, dtype=dtype, device=device)

    assert_close(activate(x, kind=kind), reference.activate(x.double(), kind=kind), dtype)


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


def test_rejects_a_bias_of_another_width(device):
    x = rand(2, 8, device=device)

    with pytest.raises(ValueError, match=r"bias has shape \[7\] .* must be \[8\]"):
        activate(x, torch.zeros(7), kind="relu")


def test_a_large_negative_gate_gives_zero(device):
    x = torch.tensor([[-1e4, 1e4, 3.0, 3.0]], device=device)

    assert torch.equal(activate_gate(x, kind="silu"), torch.tensor([[0.0, 3e4]], device=device))


def test_rejects_an_odd_width(device):
    with pytest.raises(ValueError, match="x has 7 features; it must be an even number"):
        activate_gate(torch.zeros(2, 7, device=device), kind="silu")


def test_rejects_an_out_of_another_shape(device):
    x = torch.zeros(2, 8, device=device)

    with pytest.raises(ValueError, match=r"out is \[2, 8\] torch.float32; it must be \[2, 4\]"):
        activate_gate(x, kind="silu", out=torch.zeros(2, 8, device=device))
