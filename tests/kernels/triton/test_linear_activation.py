"""A linear layer with its activation, against the reference in fp64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton.activation import linear_activate

from .compare import DTYPES, assert_close, rand
from .guards import write_guarded

KINDS = pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])


@DTYPES
@KINDS
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("tokens, features", [(1, 24), (7, 5), (33, 64)], ids=str)
def test_matches_the_reference(tokens, features, has_bias, kind, dtype, device):
    x = rand(tokens, 24, dtype=dtype, device=device)
    weight = rand(24, features, dtype=dtype, device=device, seed=1)
    bias = rand(features, dtype=dtype, device=device, seed=2) if has_bias else None

    actual = write_guarded(
        lambda out: linear_activate(x, weight, bias, kind=kind, out=out),
        (tokens, features),
        dtype,
        device,
    )

    bias64 = None if bias is None else bias.double()
    expected = reference.linear_activate(x.double(), weight.double(), bias64, kind=kind)
    # in two steps, the product is rounded before the activation
    assert_close(actual, expected, dtype, factor=2.0)


def test_the_tanh_form_of_gelu_is_as_close_to_the_exact_form_as_the_setting_says():
    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64)

    exact, tanh = (reference.activate(x, kind=kind) for kind in ("gelu", "gelu_tanh"))

    assert (exact - tanh).abs().max() <= 4.74e-4
