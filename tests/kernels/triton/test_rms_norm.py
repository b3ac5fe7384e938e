"""Residual add and RMS norm on a GPU or in the interpreter, against the reference."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import rms_norm as module
from varlen_kernels.triton.rms_norm import residual_rms_norm, rms_norm
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, SIZES, assert_close, rand, spread
from .guards import Guarded, write_guarded

EPS = 1e-6


def inputs(tokens, width, dtype, device):
    """Return x, residual and weight."""
    return (
        rand(tokens, width, dtype=dtype, device=device),
        rand(tokens, width, dtype=dtype, device=device, seed=2),
        rand(width, dtype=dtype, device=device, seed=1),
    )


def expected_sum(x, residual, weight):
    """Return the sum in the dtype of x, and its norm in fp32."""
    total, normed = reference.residual_rms_norm(
        x.float(), residual.float(), weight.float(), eps=EPS
    )
    return total.to(x.dtype), normed


@DTYPES
@SIZES
def test_matches_the_reference(tokens, width, dtype, device):
    x, _, weight = inputs(tokens, width, dtype, device)

    actual = write_guarded(
        lambda out: rms_norm(x, weight, eps=EPS, out=out), (tokens, width), dtype, device
    )

    assert_close(actual, reference.rms_norm(x.float(), weight.float(), eps=EPS), dtype)


@DTYPES
@pytest.mark.parametrize("width", [63, 501, 768, 2048])
def test_returns_the_sum_with_the_residual_and_its_norm(width, dtype, device):
    args = inputs(6, width, dtype, device)
    guarded = [Guarded((6, width), dtype, device, gap=16) for _ in range(2)]

    returned = residual_rms_norm(*args, eps=EPS, out=tuple(guard.tensor for guard in guarded))

    total, normed = expected_sum(*args)
    assert torch.equal(returned[0], total)
    assert_close(returned[1], normed, dtype)
    for guard, tensor in zip(guarded, returned, strict=True):
        assert tensor is guard.tensor
        guard.check()


@DTYPES
@pytest.mark.parametrize("width", [100, 2048])
def test_the_sum_may_replace_the_residual_and_the_norm_x(width, dtype, device):
    x, residual, weight = inputs(6, width, dtype, device)
    total, normed = residual_rms_norm(x, residual, weight, eps=EPS)
    alone = rms_norm(x, weight, eps=EPS)

    residual_rms_norm(x, residual, weight, eps=EPS, out=(residual, x))

    assert torch.equal(residual, total)
    assert torch.equal(x, normed)
    x = inputs(6, width, dtype, device)[0]
    assert torch.equal(rms_norm(x, weight, eps=EPS, out=x), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("width", [5, 768, 2048])
def test_a_norm_with_fp32_weights_is_fp32(width, dtype, device):
    x, residual, _ = inputs(6, width, dtype, device)
    weight = inputs(1, width, torch.float32, device)[2]

    alone = rms_norm(x, weight, eps=EPS)
    total, normed = residual_rms_norm(x, residual, weight, eps=EPS)

    expected = reference.rms_norm(x.double(), weight.double(), eps=EPS)
    assert_close(alone, expected, torch.float32)
    expected_total, expected = expected_sum(x, residual, weight)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected, torch.float32)


@pytest.mark.parametrize("width", [5, 768])
def test_accepts_strided_rows(width, device):
    x, residual, weight = inputs(6, width, torch.float16, device)

    total, normed = residual_rms_norm(spread(x), spread(residual, 24), weight, eps=EPS)

    expected_total, expected = expected_sum(x, residual, weight)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected, torch.float16)


@pytest.mark.full
@pytest.mark.parametrize("width", [101, 3072])
def test_every_candidate_launch_matches_the_reference(width, device):
    args = inputs(9, width, torch.bfloat16, device)
    _, expected = expected_sum(*args)

    for launch in module.candidate_launches(width, torch.bfloat16):
        with forced_launch("residual_rms_norm", (width, torch.bfloat16), launch):
            _, actual = residual_rms_norm(*args, eps=EPS)
        assert_close(actual, expected, torch.bfloat16)


def test_nan_in_a_token_changes_no_other_token(device):
    x, _, weight = inputs(8, 384, torch.float16, device)
    fresh = rms_norm(x, weight, eps=EPS)
    x[3, 100] = torch.nan

    actual = rms_norm(x, weight, eps=EPS)

    others = torch.arange(8) != 3
    assert actual[3].isnan().all()
    assert torch.equal(actual[others], fresh[others])


def test_no_tokens(device):
    x, residual, weight = inputs(0, 768, torch.float16, device)

    assert rms_norm(x, weight, eps=EPS).shape == (0, 768)
    assert residual_rms_norm(x, residual, weight, eps=EPS)[1].shape == (0, 768)


def test_rejects_a_residual_of_another_shape(device):
    x, residual, weight = inputs(3, 8, torch.float32, device)

    with pytest.raises(ValueError, match=r"residual is \[2, 8\] torch.float32; x is \[3, 8\]"):
        residual_rms_norm(x, residual[:2], weight, eps=EPS)
