"""Layer norms on a GPU or interpreted, against the reference in fp64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.triton import layer_norm
from varlen_kernels.triton.layer_norm import add_layer_norm, residual_layer_norm
from varlen_kernels.triton.rows import MAX_ROW
from varlen_kernels.tuning import forced_launch

from .compare import DTYPES, SIZES, assert_close, rand, spread
from .guards import write_guarded

EPS = 1e-5


def inputs(tokens, width, dtype, device):
    """Return x, residual, weight and bias."""
    rows = [rand(tokens, width, dtype=dtype, device=device, seed=i) for i in range(2)]
    return rows + [rand(width, dtype=dtype, device=device, seed=i) for i in range(2, 4)]


def reference64(*args):
    return reference.add_layer_norm(*(each.double() for each in args), eps=EPS)


@DTYPES
@SIZES
def test_matches_the_reference(tokens, width, dtype, device):
    args = inputs(tokens, width, dtype, device)

    actual = write_guarded(
        lambda out: add_layer_norm(*args, eps=EPS, out=out),
        (tokens, width),
        dtype,
        device,
    )

    assert_close(actual, reference64(*args), dtype)


@DTYPES
@pytest.mark.parametrize("width", [5, 501, 768])
def test_accepts_strided_rows(width, dtype, device):
    x, residual, weight, bias = inputs(6, width, dtype, device)

    actual = write_guarded(
        lambda out: add_layer_norm(spread(x), spread(residual, 24), weight, bias, eps=EPS, out=out),
        (6, width),
        dtype,
        device,
        gap=16,
    )

    assert_close(actual, reference64(x, residual, weight, bias), dtype)


@DTYPES
@pytest.mark.parametrize("width", [63, 768, 2048])
def test_in_place_writes_the_same_bits(width, dtype, device):
    x, residual, weight, bias = inputs(6, width, dtype, device)
    fresh = add_layer_norm(x, residual, weight, bias, eps=EPS)

    returned = add_layer_norm(x, residual, weight, bias, eps=EPS, out=x)

    assert returned.data_ptr() == x.data_ptr()
    assert torch.equal(x, fresh)


def test_in_place_when_x_is_also_the_residual(device):
    x, _, weight, bias = inputs(6, 100, torch.float32, device)
    fresh = add_layer_norm(x, x.clone(), weight, bias, eps=EPS)

    add_layer_norm(x, x, weight, bias, eps=EPS, out=x)

    assert torch.equal(x, fresh)


@pytest.mark.full
@pytest.mark.parametrize("width", [101, 768, 3072])
def test_every_candidate_launch_matches_the_reference(width, device):
    args = inputs(9, width, torch.float16, device)
    expected = reference64(*args)

    for launch in layer_norm.candidate_launches(width, torch.float16):
        with forced_launch("add_layer_norm", (width, torch.float16), launch):
            actual = add_layer_norm(*args, eps=EPS)
        assert_close(actual, expected, torch.float16)


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


def test_nan_in_a_token_changes_no_other_token(device):
    args = inputs(8, 384, torch.float16, device)
    fresh = add_layer_norm(*args, eps=EPS)
    args[0][3, 100] = torch.nan

    actual = add_layer_norm(*args, eps=EPS)

    others = torch.arange(8) != 3
    assert actual[3].isnan().all()
    assert torch.equal(actual[others], fresh[others])


def test_no_tokens(device):
    args = inputs(0, 768, torch.float16, device)

    assert add_layer_norm(*args, eps=EPS).shape == (0, 768)


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


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("width", [5, 501, 768, 2048])
def test_layer_norm_matches_the_reference(width, has_bias, dtype, device):
    x, _, weight, bias = inputs(6, width, dtype, device)
    bias = bias if has_bias else None

    actual = write_guarded(
        lambda out: layer_norm.layer_norm(spread(x), weight, bias, eps=EPS, out=out),
        (6, width),
        dtype,
        device,
        gap=8,
    )

    bias = None if bias is None else bias.double()
    expected = reference.layer_norm(x.double(), weight.double(), bias, eps=EPS)
    assert_close(actual, expected, dtype)


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@HALVES
@pytest.mark.parametrize("width", [5, 501, 768, 2048])
def test_a_norm_with_fp32_weights_is_fp32(width, dtype, device):
    x, residual, _, _ = inputs(6, width, dtype, device)
    weight, bias = inputs(1, width, torch.float32, device)[2:]
    vectors64 = weight.double(), bias.double()

    added = write_guarded(
        lambda out: add_layer_norm(spread(x), residual, weight, bias, eps=EPS, out=out),
        (6, width),
        torch.float32,
        device,
        gap=8,
    )
    alone = layer_norm.layer_norm(x, weight, bias, eps=EPS)
    total, normed = residual_layer_norm(x, residual, weight, bias, eps=EPS)

    expected = reference.add_layer_norm(x.double(), residual.double(), *vectors64, eps=EPS)
    assert_close(added, expected, torch.float32)
    assert_close(normed, expected, torch.float32)
    expected_alone = reference.layer_norm(x.double(), *vectors64, eps=EPS)
    assert_close(alone, expected_alone, torch.float32)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))


def test_rejects_an_output_that_has_not_the_dtype_of_the_weight(device):
    x, _, weight, bias = inputs(4, 8, torch.float16, device)

    with pytest.raises(ValueError, match=r"out is .* torch.float16; it must be .* torch.float32"):
        layer_norm.layer_norm(x, weight.float(), bias, eps=EPS, out=torch.empty_like(x))


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("width", [63, 768])
def test_residual_layer_norm_returns_the_sum_and_its_norm(width, has_bias, dtype, device):
    x, residual, weight, bias = inputs(6, width, dtype, device)
    bias = bias if has_bias else None

    total, normed = residual_layer_norm(x, spread(residual), weight, bias, eps=EPS)

    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    bias64 = None if bias is None else bias.double()
    _, expected = reference.residual_layer_norm(
        x.double(), residual.double(), weight.double(), bias64, eps=EPS
    )
    assert_close(normed, expected, dtype)

    returned = residual_layer_norm(x, residual, weight, bias, eps=EPS, out=(residual, x))

    assert returned[0] is residual
    assert returned[1] is x
    assert torch.equal(residual, total)
    assert torch.equal(x, normed)
