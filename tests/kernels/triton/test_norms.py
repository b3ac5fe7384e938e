"""Norms on a GPU or interpreted: sums with a residual, precision, refusals."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton.norms import (
    add_layer_norm,
    layer_norm,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from varlen_kernels.triton.rows import MAX_ROW, row_launches
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, assert_close, rand, spread
from .guards import Guarded, write_guarded

EPS = 1e-5
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def inputs(tokens, width, dtype, device):
    """Return x, residual, weight and bias."""
    rows = [rand(tokens, width, dtype=dtype, device=device, seed=i) for i in range(2)]
    return rows + [rand(width, dtype=dtype, device=device, seed=i) for i in range(2, 4)]


def reference64(*args, of=reference.add_layer_norm):
    return of(*(each if each is None else each.double() for each in args), eps=EPS)


def test_in_place_when_x_is_also_the_residual(device):
    x, _, weight, bias = inputs(6, 100, torch.float32, device)
    fresh = add_layer_norm(x, x.clone(), weight, bias, eps=EPS)

    add_layer_norm(x, x, weight, bias, eps=EPS, out=x)

    assert torch.equal(x, fresh)


def test_accepts_the_widest_row(device):
    args = inputs(1, MAX_ROW, torch.float32, device)

    assert_close(add_layer_norm(*args, eps=EPS), reference64(*args), torch.float32)


def test_a_mean_far_above_the_variance_adds_only_rounding_error(device):
    x, _, weight, bias = inputs(4, 768, torch.float32, device)
    x += 1000
    zeros = torch.zeros_like(x)

    actual = add_layer_norm(x, zeros, weight, bias, eps=EPS)

    # the mean itself has an error of 1000 * 2 ** -24
    assert_close(actual, reference64(x, zeros, weight, bias), torch.float32, factor=60)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"residual": torch.zeros(4, 7)}, r"residual is \[4, 7\] torch.float32; x is \[4, 8\]"),
        ({"residual": torch.zeros(4, 8).half()}, "residual is .* torch.float16; x is"),
        ({"x": torch.zeros(8, 4).t()}, r"x has strides \(1, 4\); the last must be 1"),
        ({"x": torch.zeros(4, 8).double()}, "x is torch.float64; allowed: torch.float32"),
        ({"out": torch.zeros(3, 8)}, r"out is \[3, 8\]"),
        ({"weight": torch.zeros(7)}, r"weight has shape \[7\] .* must be \[8\], contiguous"),
        ({"bias": torch.zeros(16)[::2]}, "bias has shape .* strides .2,."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rejects_invalid_arguments(change, message, device):
    arguments = {
        "x": torch.zeros(4, 8),
        "residual": torch.zeros(4, 8),
        "weight": torch.zeros(8),
        "bias": torch.zeros(8),
    }
    arguments |= change

    with pytest.raises(ValueError, match=message):
        add_layer_norm(**{name: on_device(t, device) for name, t in arguments.items()}, eps=EPS)


def on_device(tensor, device):
    """Return a copy with the same strides, which `to` would make contiguous."""
    size, strides = tensor.size(), tensor.stride()
    return torch.empty_strided(size, strides, dtype=tensor.dtype, device=device).copy_(tensor)


def test_rejects_a_row_that_is_too_wide(device):
    wide, vector = torch.zeros(1, MAX_ROW + 1, device=device), torch.zeros(MAX_ROW + 1)

    with pytest.raises(ValueError, match="x has rows of 16385; allowed: 1 to 16384"):
        add_layer_norm(wide, wide, vector, vector, eps=EPS)


def test_rejects_a_residual_of_another_shape(device):
    x, residual, weight, _ = inputs(3, 8, torch.float32, device)

    with pytest.raises(ValueError, match=r"residual is \[2, 8\] torch.float32; x is \[3, 8\]"):
        residual_rms_norm(x, residual[:2], weight, eps=EPS)


def test_rejects_an_output_that_has_not_the_dtype_of_the_weight(device):
    x, _, weight, bias = inputs(4, 8, torch.float16, device)

    with pytest.raises(ValueError, match=r"out is .* torch.float16; it must be .* torch.float32"):
        layer_norm(x, weight.float(), bias, eps=EPS, out=torch.empty_like(x))


@HALVES
@pytest.mark.parametrize("width", [5, 501, 768, 2048])
def test_a_norm_with_fp32_weights_is_fp32(width, dtype, device):
    x, residual, _, _ = inputs(6, width, dtype, device)
    weight, bias = inputs(1, width, torch.float32, device)[2:]
    summed = (x.float() + residual.float()).to(dtype)

    added = write_guarded(
        lambda out: add_layer_norm(spread(x), residual, weight, bias, eps=EPS, out=out),
        (6, width),
        torch.float32,
        device,
        gap=8,
    )
    total, normed = residual_layer_norm(x, residual, weight, bias, eps=EPS)
    rms_total, rms_normed = residual_rms_norm(x, residual, weight, eps=EPS)

    expected = reference64(x, residual, weight, bias)
    for actual in (added, normed):
        assert_close(actual, expected, torch.float32)
    alone = layer_norm(x, weight, bias, eps=EPS)
    assert_close(alone, reference64(x, weight, bias, of=reference.layer_norm), torch.float32)
    alone = rms_norm(x, weight, eps=EPS)
    assert_close(alone, reference64(x, weight, of=reference.rms_norm), torch.float32)
    _, expected = reference64(x, residual, weight, of=reference.residual_rms_norm)
    assert_close(rms_normed, expected, torch.float32)
    assert torch.equal(total, summed)
    assert torch.equal(rms_total, summed)


# the op, and the vectors behind its rows
RESIDUAL_OPS = pytest.mark.parametrize(
    "op, vectors",
    [(residual_layer_norm, (2, 3)), (residual_layer_norm, (2, None)), (residual_rms_norm, (2,))],
    ids=["layer norm", "layer norm without bias", "RMS norm"],
)


def residual_arguments(vectors, width, dtype, device):
    args = inputs(6, width, dtype, device)
    return args[:2] + [None if each is None else args[each] for each in vectors]


@DTYPES
@pytest.mark.parametrize("width", [5, 63, 501, 768, 2048])
@RESIDUAL_OPS
def test_returns_the_sum_with_the_residual_and_its_norm(op, vectors, width, dtype, device):
    x, residual, *rest = residual_arguments(vectors, width, dtype, device)
    guarded = [Guarded((6, width), dtype, device, gap=16) for _ in range(2)]

    returned = op(
        spread(x), spread(residual, 24), *rest, eps=EPS, out=tuple(each.tensor for each in guarded)
    )

    assert torch.equal(returned[0], (x.float() + residual.float()).to(dtype))
    _, expected = reference64(x, residual, *rest, of=getattr(reference, op.__name__))
    assert_close(returned[1], expected, dtype)
    for guard, tensor in zip(guarded, returned, strict=True):
        assert tensor is guard.tensor
        guard.check()


@DTYPES
@pytest.mark.parametrize("width", [63, 768, 2048])
@RESIDUAL_OPS
def test_the_sum_may_replace_the_residual_and_the_norm_x(op, vectors, width, dtype, device):
    x, residual, *rest = residual_arguments(vectors, width, dtype, device)
    total, normed = op(x, residual, *rest, eps=EPS)

    returned = op(x, residual, *rest, eps=EPS, out=(residual, x))

    assert returned[0] is residual
    assert returned[1] is x
    assert torch.equal(residual, total)
    assert torch.equal(x, normed)


@pytest.mark.full
@pytest.mark.parametrize("width", [101, 3072])
@RESIDUAL_OPS
def test_every_candidate_launch_matches_the_reference(op, vectors, width, device):
    dtype = torch.bfloat16
    args = residual_arguments(vectors, width, dtype, device)
    _, expected = reference64(*args, of=getattr(reference, op.__name__))

    for launch in row_launches(width, dtype):
        with forced_launch(op.__name__, (width, dtype), launch):
            _, actual = op(*args, eps=EPS)
        assert_close(actual, expected, dtype)


@RESIDUAL_OPS
def test_no_tokens(op, vectors, device):
    args = residual_arguments(vectors, 768, torch.float16, device)

    assert op(args[0][:0], args[1][:0], *args[2:], eps=EPS)[1].shape == (0, 768)
