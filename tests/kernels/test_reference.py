"""The reference ops against float64 arithmetic written out in numpy, on awkward sizes.

The reference is the specification of every kernel, so nothing here calls the torch function that it is built on.
"""

import math

import numpy as np
import pytest
import torch

from varlen_kernels import reference

from .float64 import DTYPES, check, f64, rand

EPS = 1e-12
SIZES = pytest.mark.parametrize(
    "tokens, hidden", [(1, 1), (1, 64), (63, 100), (7, 768), (5, 1023)], ids=str
)


def layer_norm64(x, weight, bias, eps=EPS):
    mean = x.mean(axis=1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


@DTYPES
@SIZES
def test_embed_layer_norm_matches_float64(tokens, hidden, dtype):
    rng = np.random.default_rng(0)
    tables = [rand(rows, hidden, dtype=dtype, seed=i) for i, rows in enumerate((11, 70, 3))]
    ids = [torch.from_numpy(rng.integers(0, len(t), tokens, dtype=np.int32)) for t in tables]
    weight, bias = rand(hidden, dtype=dtype, seed=4), rand(hidden, dtype=dtype, seed=5)

    # 1 / sqrt(eps) would magnify the rounding of a single feature, whose variance is 0
    actual = reference.embed_layer_norm(*ids, *tables, weight, bias, eps=1e-3)

    summed = sum(f64(t)[i.numpy()] for t, i in zip(tables, ids, strict=True))
    check(actual, layer_norm64(summed, f64(weight), f64(bias), 1e-3), dtype)
    assert actual.dtype == dtype


@DTYPES
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_embed_layer_norm_accepts_both_integer_types(dtype, index_dtype):
    table, one = rand(5, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    ids = torch.tensor([4, 0, 4], dtype=index_dtype)

    actual = reference.embed_layer_norm(ids, ids, ids, table, table, table, one, one, eps=EPS)

    check(actual, layer_norm64(3 * f64(table)[[4, 0, 4]], 1.0, 1.0), dtype)


@DTYPES
@pytest.mark.parametrize("features", [1, 3, 64, 129])
@SIZES
def test_linear_matches_float64(tokens, hidden, features, dtype):
    x, weight = rand(tokens, hidden, dtype=dtype), rand(hidden, features, dtype=dtype, seed=1)
    bias = rand(features, dtype=dtype, seed=2)

    check(reference.linear(x, weight, bias), f64(x) @ f64(weight) + f64(bias), dtype)


def activate64(x, kind):
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@DTYPES
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
@SIZES
def test_activate_matches_float64(tokens, hidden, kind, dtype):
    x = 4 * rand(tokens, hidden, dtype=dtype)

    check(reference.activate(x, kind=kind), activate64(f64(x), kind), dtype)


@DTYPES
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
@SIZES
def test_activate_adds_a_bias_first(tokens, hidden, kind, dtype):
    x, bias = rand(tokens, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)
    before = x.clone()

    actual = reference.activate(x, bias, kind=kind)

    check(actual, activate64(f64(x) + f64(bias), kind), dtype)
    assert torch.equal(x, before)


@DTYPES
@SIZES
def test_silu_gate_matches_float64(tokens, hidden, dtype):
    x = 3 * rand(tokens, 2 * hidden, dtype=dtype)

    gate, up = f64(x)[:, :hidden], f64(x)[:, hidden:]
    check(reference.silu_gate(x), gate / (1 + np.exp(-gate)) * up, dtype)


def test_gelu_and_its_tanh_form_differ():
    x = torch.linspace(-4, 4, 999)

    assert not torch.equal(
        reference.activate(x, kind="gelu"), reference.activate(x, kind="gelu_tanh")
    )


@DTYPES
@SIZES
def test_tanh_matches_float64(tokens, hidden, dtype):
    x = 3 * rand(tokens, hidden, dtype=dtype)

    check(reference.tanh(x), np.tanh(f64(x)), dtype)


@DTYPES
@SIZES
def test_add_layer_norm_matches_float64(tokens, hidden, dtype):
    x, residual = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight, bias = rand(hidden, dtype=dtype, seed=2), rand(hidden, dtype=dtype, seed=3)

    actual = reference.add_layer_norm(x, residual, weight, bias, eps=1e-3)

    expected = layer_norm64(f64(x) + f64(residual), f64(weight), f64(bias), 1e-3)
    check(actual, expected, dtype)


@DTYPES
@SIZES
def test_add_layer_norm_adds_the_bias_of_x(tokens, hidden, dtype):
    x, residual = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight, bias, x_bias = (rand(hidden, dtype=dtype, seed=seed) for seed in (2, 3, 4))

    actual = reference.add_layer_norm(x, residual, weight, bias, eps=1e-3, x_bias=x_bias)

    total = f64(x) + f64(residual) + f64(x_bias)
    check(actual, layer_norm64(total, f64(weight), f64(bias), 1e-3), dtype)


def test_add_layer_norm_without_out_leaves_its_inputs_unchanged():
    x, residual, one = rand(3, 8), rand(3, 8, seed=1), torch.ones(8)
    before = x.clone(), residual.clone()

    reference.add_layer_norm(x, residual, one, one, eps=EPS)

    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def rms_norm64(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight


@DTYPES
@SIZES
def test_rms_norm_matches_float64(tokens, hidden, dtype):
    x, weight = rand(tokens, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)

    actual = reference.rms_norm(x, weight, eps=1e-3)

    check(actual, rms_norm64(f64(x), f64(weight), 1e-3), dtype)
    assert actual.dtype == dtype


@DTYPES
@SIZES
def test_rms_norm_adds_the_residual_and_stores_the_sum(tokens, hidden, dtype):
    x, residual = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight, sum_out = rand(hidden, dtype=dtype, seed=2), torch.full_like(x, torch.nan)

    actual = reference.rms_norm(x, weight, eps=1e-3, residual=residual, sum_out=sum_out)

    check(actual, rms_norm64(f64(x) + f64(residual), f64(weight), 1e-3), dtype)
    check(sum_out, f64(x) + f64(residual), dtype)


def test_the_sum_of_rms_norm_may_replace_the_residual():
    x, residual, weight = rand(7, 100), rand(7, 100, seed=1), rand(100, seed=2)
    total = torch.empty_like(x)
    fresh = reference.rms_norm(x, weight, eps=EPS, residual=residual, sum_out=total)

    reference.rms_norm(x, weight, eps=EPS, residual=residual, sum_out=residual, out=x)

    assert torch.equal(x, fresh)
    assert torch.equal(residual, total)


@DTYPES
def test_to_fp32_copies(dtype):
    x = rand(3, 5, dtype=dtype)

    actual = reference.to_fp32(x)

    np.testing.assert_array_equal(f64(actual), f64(x))
    assert actual.dtype == torch.float32
    assert actual.data_ptr() != x.data_ptr()


def calls(dtype):
    """Return a call for each op, as a function of `out`."""
    tokens, hidden = 18, 12
    x, other = rand(tokens, hidden, dtype=dtype), rand(tokens, hidden, dtype=dtype, seed=1)
    weight, bias = rand(hidden, dtype=dtype, seed=2), rand(hidden, dtype=dtype, seed=3)
    ids = torch.arange(tokens, dtype=torch.int32)
    return {
        "embed_layer_norm": lambda out: reference.embed_layer_norm(
            ids, ids, ids, x, other, x, weight, bias, eps=EPS, out=out
        ),
        "linear": lambda out: reference.linear(
            x, rand(hidden, 7, dtype=dtype, seed=5), bias[:7], out=out
        ),
        "gelu": lambda out: reference.activate(x, kind="gelu", out=out),
        "gelu_with_bias": lambda out: reference.activate(x, bias, kind="gelu", out=out),
        "gelu_tanh": lambda out: reference.activate(x, kind="gelu_tanh", out=out),
        "relu": lambda out: reference.activate(x, kind="relu", out=out),
        "tanh": lambda out: reference.tanh(x, out=out),
        "add_layer_norm": lambda out: reference.add_layer_norm(
            x, other, weight, bias, eps=EPS, out=out
        ),
        "add_layer_norm_with_bias": lambda out: reference.add_layer_norm(
            x, other, weight, bias, eps=EPS, x_bias=weight, out=out
        ),
        "rms_norm": lambda out: reference.rms_norm(x, weight, eps=EPS, out=out),
        "rms_norm_with_residual": lambda out: reference.rms_norm(
            x, weight, eps=EPS, residual=other, out=out
        ),
        "silu_gate": lambda out: reference.silu_gate(x, out=out),
        "to_fp32": lambda out: reference.to_fp32(x, out=out),
    }


@DTYPES
@pytest.mark.parametrize("op", calls(torch.float32))
def test_a_poisoned_out_is_fully_overwritten_with_the_same_bits(op, dtype):
    call = calls(dtype)[op]
    fresh = call(None)
    out = torch.full_like(fresh, torch.nan)

    returned = call(out)

    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, fresh)


IN_PLACE_CALLS = {
    "activate": lambda x, other, out: reference.activate(x, kind="gelu", out=out),
    "add_layer_norm": lambda x, other, out: reference.add_layer_norm(
        x, other, other[0], other[1], eps=EPS, out=out
    ),
    "rms_norm": lambda x, other, out: reference.rms_norm(
        x, other[0], eps=EPS, residual=other, out=out
    ),
    "tanh": lambda x, other, out: reference.tanh(x, out=out),
}


def test_every_in_place_op_is_tested():
    assert set(IN_PLACE_CALLS) == set(reference.IN_PLACE)


@SIZES
@pytest.mark.parametrize("op", IN_PLACE_CALLS)
def test_an_op_in_place_writes_the_same_bits(op, tokens, hidden):
    x, other = rand(tokens + 1, hidden), rand(tokens + 1, hidden, seed=1)
    fresh = IN_PLACE_CALLS[op](x.clone(), other, None)

    returned = IN_PLACE_CALLS[op](x, other, x)

    assert returned.data_ptr() == x.data_ptr()
    assert torch.equal(x, fresh)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
def test_every_activation_works_in_place(kind):
    x = rand(63, 100)
    fresh = reference.activate(x.clone(), kind=kind)

    reference.activate(x, kind=kind, out=x)

    assert torch.equal(x, fresh)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
def test_every_activation_works_in_place_with_a_bias(kind):
    x, bias = rand(63, 100), rand(100, seed=1)
    fresh = reference.activate(x.clone(), bias, kind=kind)

    reference.activate(x, bias, kind=kind, out=x)

    assert torch.equal(x, fresh)


def test_add_layer_norm_in_place_when_x_is_also_the_residual():
    x, one = rand(7, 100), torch.ones(100)
    fresh = reference.add_layer_norm(x.clone(), x.clone(), one, one, eps=EPS)

    reference.add_layer_norm(x, x, one, one, eps=EPS, out=x)

    assert torch.equal(x, fresh)
