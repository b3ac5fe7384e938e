"""Residual add and RMS norm on a GPU or in the interpreter, against the reference."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels import rms_norm as module
from varlen_kernels.rms_norm import rms_norm
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, SIZES, assert_close, rand, spread
from .guards import write_guarded

EPS = 1e-6


def inputs(tokens, width, dtype, device):
    """Return x, weight and residual."""
    return (
        rand(tokens, width, dtype=dtype, device=device),
        rand(width, dtype=dtype, device=device, seed=1),
        rand(tokens, width, dtype=dtype, device=device, seed=2),
    )


def reference32(x, weight, residual=None):
    return reference.rms_norm(
        x.float(), weight.float(), eps=EPS, residual=None if residual is None else residual.float()
    )


@DTYPES
@SIZES
def test_matches_the_reference(tokens, width, dtype, device):
    x, weight, _ = inputs(tokens, width, dtype, device)

    actual = write_guarded(
        lambda out: rms_norm(x, weight, eps=EPS, out=out), (tokens, width), dtype, device
    )

    assert_close(actual, reference32(x, weight), dtype)


@DTYPES
@pytest.mark.parametrize("width", [63, 501, 768, 2048])
def test_adds_the_residual_and_stores_the_sum(width, dtype, device):
    x, weight, residual = inputs(6, width, dtype, device)
    sum_out = torch.full_like(x, torch.nan)

    actual = write_guarded(
        lambda out: rms_norm(x, weight, eps=EPS, residual=residual, sum_out=sum_out, out=out),
        (6, width),
        dtype,
        device,
    )

    assert_close(actual, reference32(x, weight, residual), dtype)
    assert torch.equal(sum_out, (x.float() + residual.float()).to(dtype))


@DTYPES
@pytest.mark.parametrize("width", [100, 2048])
def test_the_sum_may_replace_the_residual_and_the_result_x(width, dtype, device):
    x, weight, residual = inputs(6, width, dtype, device)
    total = torch.empty_like(x)
    fresh = rms_norm(x, weight, eps=EPS, residual=residual, sum_out=total)

    rms_norm(x, weight, eps=EPS, residual=residual, sum_out=residual, out=x)

    assert torch.equal(x, fresh)
    assert torch.equal(residual, total)


def test_the_sum_of_x_alone_is_a_copy(device):
    x, weight, _ = inputs(3, 64, torch.float16, device)
    sum_out = torch.empty_like(x)

    rms_norm(x, weight, eps=EPS, sum_out=sum_out)

    assert torch.equal(sum_out, x)


@pytest.mark.parametrize("width", [5, 768])
def test_accepts_strided_rows(width, device):
    x, weight, residual = inputs(6, width, torch.float16, device)
    sum_out = spread(torch.zeros_like(x), 16)

    actual = write_guarded(
        lambda out: rms_norm(
            spread(x), weight, eps=EPS, residual=spread(residual, 24), sum_out=sum_out, out=out
        ),
        (6, width),
        torch.float16,
        device,
        gap=32,
    )

    assert_close(actual, reference32(x, weight, residual), torch.float16)
    assert torch.equal(sum_out, x + residual)


@pytest.mark.parametrize("width", [101, 3072])
def test_every_candidate_launch_matches_the_reference(width, device):
    x, weight, residual = inputs(9, width, torch.bfloat16, device)
    expected = reference32(x, weight, residual)

    for launch in module.candidate_launches(width, torch.bfloat16):
        with forced_launch("rms_norm", (width, torch.bfloat16), launch):
            actual = rms_norm(x, weight, eps=EPS, residual=residual)
        assert_close(actual, expected, torch.bfloat16)


def test_nan_in_a_token_changes_no_other_token(device):
    x, weight, _ = inputs(8, 384, torch.float16, device)
    fresh = rms_norm(x, weight, eps=EPS)
    x[3, 100] = torch.nan

    actual = rms_norm(x, weight, eps=EPS)

    others = torch.arange(8) != 3
    assert actual[3].isnan().all()
    assert torch.equal(actual[others], fresh[others])


def test_no_tokens(device):
    x, weight, residual = inputs(0, 768, torch.float16, device)

    assert rms_norm(x, weight, eps=EPS, residual=residual, sum_out=residual).shape == (0, 768)


def test_rejects_a_sum_of_another_shape(device):
    x, weight, _ = inputs(3, 8, torch.float32, device)

    with pytest.raises(ValueError, match=r"sum_out is \[2, 8\] torch.float32; x is \[3, 8\]"):
        rms_norm(x, weight, eps=EPS, sum_out=x[:2])
