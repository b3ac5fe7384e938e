"""Decode kernels for few rows against the reference in float64."""

import pytest
import torch

from varlen_kernels import reference
from varlen_kernels.reference.few_rows import FoldedNorm
from varlen_kernels.reference.linear_layers import CodedWeight, widened
from varlen_kernels.reference.paged import FP8
from varlen_kernels.triton import few_rows, splits

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
    if isinstance(value, FoldedNorm | CodedWeight):
        return type(value)(*map(exact, value))
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
    (counters,) = splits._arrivals[x.device, 0]
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


# Codes, and whether the GPU converts fp8; else its bytes are widened by integer arithmetic.
CODES = pytest.mark.parametrize(
    ("codes", "converts"),
    [
        (torch.int8, True),
        (torch.float8_e4m3fn, True),
        (torch.float8_e4m3fn, False),
    ],
    ids=["int8", "fp8", "bytes"],
)
# All numbers of codes are exact in 16 bits.
CODED_DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.full)],
    ids=["fp16", "bf16"],
)


@pytest.fixture
def fp8_forms(monkeypatch):
    """Return a function that says whether the GPU converts fp8."""
    return lambda converts: monkeypatch.setattr(few_rows, "_converts_fp8", lambda: converts)


def coded_of(hidden, features, codes, device):
    """Return codes in the layout of the kernels, the extreme ones among them."""
    generator = torch.Generator().manual_seed(1)
    # 127 is the NaN of fp8
    numbers = torch.randint(-126, 127, (features, hidden), generator=generator)
    if codes is torch.float8_e4m3fn:
        found = torch.where(numbers < 0, numbers + 127 + 128, numbers).to(torch.uint8).view(codes)
    else:
        found = numbers.to(codes)
    scale = (rand(features, seed=6).abs() + 0.5) / (64 * hidden**0.5)
    return CodedWeight(found.to(device).t(), scale.to(device))


@CODED_DTYPES
@CODES
@pytest.mark.parametrize(
    "rows",
    [1, 3, *(pytest.param(each, marks=pytest.mark.full) for each in (4, 8, 17, 64, 200)), 65],
)
def test_a_product_of_codes_is_right(rows, codes, converts, dtype, fp8_forms, device):
    fp8_forms(converts)
    hidden, features = 70, 45
    weight = coded_of(hidden, features, codes, device)
    x, bias = rand(rows, hidden, dtype=dtype, device=device), rand(features, seed=4).to(dtype)
    arguments = (spread(x), weight, bias.to(device))
    kind = {"kind": "gelu_tanh"} if rows % 2 else {}
    op = "linear_activate" if kind else "linear"

    expected = getattr(reference, op)(*map(exact, arguments), **kind)
    found = write_guarded(
        lambda out: getattr(few_rows, op)(*arguments, **kind, out=out),
        tuple(expected.shape),
        dtype,
        device,
        gap=3,
    )
    assert_close(found, expected, dtype, factor=2.0)


@CODED_DTYPES
@CODES
@pytest.mark.parametrize(
    "rows", [pytest.param(each, marks=pytest.mark.full) for each in (1, 4, 8, 64)] + [17]
)
def test_ops_of_few_rows_take_codes(rows, codes, converts, dtype, fp8_forms, device):
    fp8_forms(converts)
    x, residual = (rand(rows, each, dtype=dtype, device=device) for each in (33, 46))
    weight = coded_of(33, 46, codes, device)
    norm = norm_of(widened(exact(weight), torch.float64), None, dtype, is_rms=rows % 2 > 0)

    for op, rest in (
        ("linear_residual", (None, residual)),
        ("norm_linear", (None, norm)),
        ("norm_next_tokens", (None, norm)),
    ):
        given = [x, weight, *rest]
        if op == "norm_next_tokens":
            given.insert(1, torch.arange(rows, dtype=torch.int32, device=device))
        options = {} if op == "linear_residual" else {"eps": EPS}
        expected = getattr(reference, op)(*map(exact, given), **options)
        found = getattr(few_rows, op)(*given, **options)
        if op == "norm_next_tokens":
            assert torch.equal(found[1], found[0].argmax(1).int())
            expected, found = expected[0], found[0].to(dtype)
        assert_close(found, expected, dtype, factor=2.0)


@CODES
@pytest.mark.parametrize("rows", [3, pytest.param(20, marks=pytest.mark.full)])
def test_keys_and_values_of_codes_are_appended(rows, codes, converts, fp8_forms, device):
    fp8_forms(converts)
    dtype, options = torch.float16, {"num_heads": 4, "num_kv_heads": 2, "eps": EPS}
    x, _, bias, norm, *rest = append_arguments(
        rows, 4, 2, 16, dtype, device, is_rms=True, rotates=True
    )
    arguments = (x, coded_of(35, 128, codes, device), bias, norm, *rest)
    exactly = [exact(each) for each in arguments]
    expected = reference.norm_append_kv(*exactly, **options)

    found = few_rows.norm_append_kv(*arguments, **options)

    assert_close(found[:, :64], expected[:, :64], dtype, factor=2.0)
    for cache, right in zip(arguments[5:7], exactly[5:7], strict=True):
        assert_close(cache, right, dtype, factor=2.0)


def test_other_codes_are_refused(device):
    weight = CodedWeight(torch.zeros(8, 8, dtype=torch.uint8, device=device).t(), torch.ones(8))

    with pytest.raises(ValueError, match=r"uint8 .* allowed: torch.int8 or torch.float8_e4m3fn"):
        few_rows.linear(torch.zeros(2, 8, device=device), weight)
