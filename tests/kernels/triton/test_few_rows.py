"""Decode kernels for few rows against the reference in float64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.reference.few_rows import FoldedNorm
from varlen_kernels.reference.paged import FP8
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


@DTYPES
@ROWS
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", ""])
def test_linear_residual_is_right(rows, has_bias, dtype, device):
    hidden, features = 70, 45
    x, residual = (rand(rows, each, dtype=dtype, device=device) for each in (hidden, features))
    bias = rand(features, dtype=dtype, device=device, seed=4) if has_bias else None
    arguments = (x, weight_of(hidden, features, dtype, device), bias)
    expected = reference.linear_residual(*map(exact, arguments), residual.double())

    # the result may take the place of the residual
    out = Guarded((rows, features), dtype, device, gap=3)
    out.tensor.copy_(residual)
    found = few_rows.linear_residual(*arguments, out.tensor, out=out.tensor)

    out.check()
    assert found is out.tensor
    assert_close(found, expected, dtype, factor=2.0)


def append_arguments(rows, heads, key_heads, head_dim, dtype, device, *, is_rms, rotates):
    """Return the arguments of `norm_append_kv`; one row has no slot."""
    hidden, features = 35, (heads + 2 * key_heads) * head_dim
    weight = weight_of(hidden, features, dtype, device)
    bias = rand(features, dtype=dtype, device=device, seed=4)
    x = (rand(rows, hidden, device=device) + 0.5).to(dtype)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:rows].to(device)
    slots[rows // 2] = -1
    caches = (rand(5, key_heads, 16, head_dim, device=device, seed=5 + i) for i in range(2))
    positions = ()
    if rotates:
        angles = rand(9, head_dim // 2, device=device, seed=7)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        positions = (torch.arange(rows, dtype=torch.int32, device=device) % 9, cos_sin)
    norm = norm_of(weight, bias, dtype, is_rms=is_rms)
    return (x, weight, bias, norm, slots, *(each.to(dtype) for each in caches), *positions)


@DTYPES
@ROWS
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim", "is_rms", "rotates"),
    [(3, 3, 6, False, False), (4, 2, 16, True, True), (6, 1, 10, True, True)],
    ids=["gpt2", "grouped", "odd"],
)
def test_norm_append_kv_is_right(rows, heads, key_heads, head_dim, is_rms, rotates, dtype, device):
    arguments = append_arguments(
        rows, heads, key_heads, head_dim, dtype, device, is_rms=is_rms, rotates=rotates
    )
    options = {"num_heads": heads, "num_kv_heads": key_heads, "eps": EPS}
    exactly = [exact(each) for each in arguments]
    expected = reference.norm_append_kv(*exactly, **options)

    queries = heads * head_dim
    out = Guarded((rows, arguments[1].shape[1]), dtype, device)
    found = few_rows.norm_append_kv(*arguments, **options, out=out.tensor)

    out.check()
    # keys and values are only in the caches
    assert found[:, queries:].isnan().all()
    assert_close(found[:, :queries], expected[:, :queries], dtype, factor=2.0)
    for cache, right in zip(arguments[5:7], exactly[5:7], strict=True):
        assert_close(cache, right, dtype, factor=2.0)


@pytest.mark.parametrize("rows", [1, 17])
def test_norm_append_kv_writes_fp8(rows, device):
    *others, keys, values, position_ids, cos_sin = append_arguments(
        rows, 4, 2, 16, torch.float16, device, is_rms=True, rotates=True
    )
    options = {"num_heads": 4, "num_kv_heads": 2, "eps": EPS}
    caches = torch.stack((keys, values)).to(FP8)
    expected = caches.clone()

    few_rows.norm_append_kv(*others, *caches, position_ids, cos_sin, **options)
    reference.norm_append_kv(*others, *expected, position_ids, cos_sin, **options)

    # rounding before the last one may differ, and then by a step of 3 bits
    torch.testing.assert_close(caches.float(), expected.float(), rtol=0.13, atol=2**-9)


@DTYPES
@ROWS
@NORMS
def test_norm_next_tokens_is_right(rows, is_rms, dtype, device):
    hidden, vocabulary = 40, 133
    x = rand(2 * rows, hidden, dtype=dtype, device=device)
    weight = weight_of(hidden, vocabulary, dtype, device)
    of_rows = torch.arange(rows, dtype=torch.int32, device=device) * 2 + 1
    arguments = (x, of_rows, weight, None, norm_of(weight, None, dtype, is_rms=is_rms))
    expected, _ = reference.norm_next_tokens(*map(exact, arguments), eps=EPS)
    out = [
        Guarded((rows, vocabulary), torch.float32, device),
        Guarded((rows,), torch.int32, device),
    ]

    logits, tokens = few_rows.norm_next_tokens(
        *arguments, eps=EPS, out=(out[0].tensor, out[1].tensor)
    )

    for each in out:
        each.check()
    # products of 16 bits are exact, and weighted inputs are rounded to them
    error = torch.linalg.vector_norm(logits.double() - expected)
    most = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    assert error <= most * torch.linalg.vector_norm(expected)
    assert torch.equal(tokens, logits.argmax(1).int())
    (counters,) = arrivals._arrivals[x.device, 0]
    assert not counters.any()


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_most_rows_are_right(dtype, device):
    hidden, features = 48, 150
    x = rand(64, hidden, dtype=dtype, device=device)
    weight = weight_of(hidden, features, dtype, device)
    norm = norm_of(weight, None, dtype, is_rms=True)
    arguments = (x, weight, None, norm)

    gated = {"eps": EPS, "kind": "gelu", "is_gated": True}
    found = few_rows.norm_linear(*arguments, **gated)
    assert_close(found, reference.norm_linear(*map(exact, arguments), **gated), dtype, factor=2.0)
    rows = torch.arange(63, -1, -1, dtype=torch.int32, device=device)
    logits, tokens = few_rows.norm_next_tokens(x, rows, *arguments[1:], eps=EPS)
    assert torch.equal(tokens, logits.argmax(1).int())


def test_the_first_of_equal_logits_is_the_next_token(device):
    weight = torch.zeros(60, 16, device=device).t()
    bias = torch.full((60,), -3.0, device=device)
    bias[[17, 41, 59]] = torch.tensor([-2.0, -2.0, torch.nan], device=device)
    x = torch.zeros(2, 16, device=device)
    norm = FoldedNorm(torch.ones(16, device=device), None, None, bias)
    rows = torch.zeros(2, dtype=torch.int32, device=device)

    _, tokens = few_rows.norm_next_tokens(x, rows, weight, bias, norm, eps=EPS)

    assert tokens.tolist() == [17, 17]


@pytest.mark.parametrize(
    ("rows", "layout", "message"),
    [(65, "by_output", "65 rows"), (2, "by_input", "transpose of a contiguous weight")],
)
def test_other_rows_and_layouts_are_refused(rows, layout, message, device):
    x, weight = torch.zeros(rows, 8, device=device), torch.zeros(8, 8, device=device)
    weight = weight.t() if layout == "by_output" else torch.zeros(8, 16, device=device)[:, :8]

    with pytest.raises(ValueError, match=message):
        few_rows.linear_residual(x, weight, None, x)


def test_no_rows_launch_nothing(device):
    weight = torch.zeros(16, 8, device=device).t()
    x, norm = (
        torch.zeros(0, 8, device=device),
        FoldedNorm(torch.ones(8, device=device), *[None] * 3),
    )

    assert few_rows.norm_linear(x, weight, None, norm, eps=EPS).shape == (0, 16)
    rows = torch.zeros(0, dtype=torch.int32, device=device)
    logits, tokens = few_rows.norm_next_tokens(x, rows, weight, None, norm, eps=EPS)
    assert (logits.shape, tokens.shape) == ((0, 16), (0,))
