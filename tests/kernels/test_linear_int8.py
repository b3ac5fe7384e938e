"""int8 linear layers: the reference stays within its quantization error, and CPUs give its results."""

import pytest
import torch

from varlen_kernels import cpu
from varlen_kernels import linear_int8_cpu as module
from varlen_kernels.linear_int8_reference import (
    FULL_LEVELS,
    OUTLIERS,
    REDUCED_LEVELS,
    linear_int8,
    quantize_rows,
    quantize_weight,
)

from .float64 import rand

SHAPES = [(1, 5, 3), (63, 100, 33), (7, 1023, 64), (130, 64, 200)]
LEVELS = pytest.mark.parametrize("levels", [FULL_LEVELS, REDUCED_LEVELS], ids=["8bit", "7bit"])
EPS = torch.finfo(torch.float32).eps


def layer(hidden, features, *, has_bias=True):
    """Return a weight, a bias and outliers, the first column among them."""
    numbers = torch.randperm(hidden - 1, generator=torch.Generator().manual_seed(0))
    outliers = torch.cat([torch.zeros(1).long(), numbers[: OUTLIERS - 1] + 1]).sort().values
    bias = rand(features, seed=2) if has_bias else None
    return rand(hidden, features, seed=1), bias, outliers


def inputs(tokens, hidden, outliers):
    x = rand(tokens, hidden) + 0.5
    x[:, outliers] *= 30
    return x


def products():
    """Yield op, form of its weights, product and lowest code of each product."""
    yield cpu.linear_int8, lambda codes: codes, module._signed_product, -128
    yield cpu.linear_int8_packed, module.pack_codes, module._packed_product, 0


PRODUCTS = pytest.mark.parametrize(
    "op, pack, product_of, lowest", list(products()), ids=["signed", "packed"]
)


@LEVELS
@pytest.mark.parametrize("tokens, hidden, features", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_the_error_is_at_most_half_a_step_of_each_factor(
    tokens, hidden, features, has_bias, levels
):
    weight, bias, outliers = layer(hidden, features, has_bias=has_bias)
    x, quantized = inputs(tokens, hidden, outliers), quantize_weight(weight, bias, outliers)
    kept = [column for column in range(hidden) if column not in outliers.tolist()]
    steps = quantize_rows(x, outliers, levels).scale.double() / 2, quantized.scale.double() / 2

    actual = linear_int8(x, *quantized, levels=levels)

    inner, rows = x[:, kept].double().abs(), weight[kept].double().abs()
    bound = steps[0] * rows.sum(0) + inner.sum(1, keepdim=True) * steps[1]
    bound += len(kept) * steps[0] * steps[1]
    exact = x.double() @ weight.double() + (0 if bias is None else bias.double())
    # sums of codes are exact; the rest is a few roundings of numbers of this size
    size = inner @ rows + (x[:, outliers].double().abs() @ weight[outliers].double().abs())
    rounding = 64 * EPS * (size.max() + inner.sum(1).max() * rows.max())
    assert ((actual.double() - exact).abs() <= bound + rounding).all()


@LEVELS
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("tokens, hidden, features", SHAPES, ids=str)
def test_compiled_codes_equal_those_of_the_reference(tokens, hidden, features, signed, levels):
    _, _, outliers = layer(hidden, features)
    x = inputs(tokens, hidden, outliers)
    x[0] = 3.25
    expected = quantize_rows(x, outliers, levels)

    codes, scale, factors = module.quantize(x, outliers, levels, signed=signed)

    kept = [column for column in range(hidden) if column not in outliers.tolist()]
    lowest = -128 if signed else 0
    assert torch.equal(codes[:, kept].int(), expected.codes[:, kept] + lowest)
    assert torch.equal(scale[:, None], expected.scale)
    assert torch.equal(factors[:, 2:], x[:, outliers])
    # the value of code 0
    values = factors[:, :1] + lowest * scale[:, None]
    torch.testing.assert_close(values, expected.factors[:, :1], rtol=1e-5, atol=1e-5)


@PRODUCTS
@pytest.mark.parametrize("is_full", [True, False], ids=["most-levels", "7bit"])
@pytest.mark.parametrize("tokens, hidden, features", SHAPES, ids=str)
def test_products_of_cpus_match_the_reference(
    op, pack, product_of, lowest, tokens, hidden, features, is_full
):
    levels = module._exact_levels(product_of, lowest) if is_full else REDUCED_LEVELS
    weight, bias, outliers = layer(hidden, features)
    x, quantized = inputs(tokens, hidden, outliers), quantize_weight(weight, bias, outliers)
    out = torch.full((tokens, features), torch.nan)

    actual = op(x, pack(quantized.codes), *quantized[1:], levels=levels, out=out)

    assert actual is out
    expected = linear_int8(x, *quantized, levels=levels)
    # codes are the same; the offset of signed ones adds a product of this size
    size = (x.abs().max() * weight.abs().max() * hidden).item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=8 * EPS * size)


@PRODUCTS
def test_a_token_has_the_same_bits_alone_and_among_others(op, pack, product_of, lowest):
    weight, bias, outliers = layer(100, 33)
    x, quantized = inputs(40, 100, outliers), quantize_weight(weight, bias, outliers)
    operands = pack(quantized.codes), *quantized[1:]
    levels = module._exact_levels(product_of, lowest)

    together = op(x, *operands, levels=levels)

    for token in (0, 17, 39):
        alone = op(x[token : token + 1].contiguous(), *operands, levels=levels)
        assert torch.equal(alone[0], together[token])


@PRODUCTS
def test_no_tokens_give_no_rows(op, pack, product_of, lowest):
    weight, bias, outliers = layer(8, 3)
    quantized = quantize_weight(weight, bias, outliers)

    actual = op(torch.empty(0, 8), pack(quantized.codes), *quantized[1:], levels=REDUCED_LEVELS)

    assert actual.shape == (0, 3)


@PRODUCTS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("hidden", [100, 128])
def test_a_token_with_a_number_that_is_not_finite_gets_nan(
    op, pack, product_of, lowest, hidden, value
):
    weight, bias, outliers = layer(hidden, 33)
    x, quantized = inputs(9, hidden, outliers), quantize_weight(weight, bias, outliers)
    operands = pack(quantized.codes), *quantized[1:]
    expected = op(x, *operands, levels=REDUCED_LEVELS)
    # an outlier; the first and the last of the others
    inner = [column for column in range(hidden) if column not in outliers.tolist()]
    places = torch.tensor([1, 4, 7]), torch.tensor([int(outliers[1]), inner[0], inner[-1]])

    damaged = x.index_put(places, torch.tensor(value))

    expected[places[0]] = torch.nan
    for actual in (
        op(damaged, *operands, levels=REDUCED_LEVELS),
        linear_int8(damaged, *quantized, levels=REDUCED_LEVELS),
    ):
        assert actual[places[0]].isnan().all()
        assert actual.isfinite().all(1).sum() == 6
    actual = op(damaged, *operands, levels=REDUCED_LEVELS)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_another_number_of_outliers_is_refused():
    with pytest.raises(ValueError, match="outliers has 3 columns; it must have 4"):
        module.quantize(rand(2, 8), torch.arange(3), FULL_LEVELS, signed=True)


def test_outliers_do_not_change_the_codes_of_other_columns():
    _, _, outliers = layer(50, 3)
    x = inputs(9, 50, outliers)
    larger = x.index_copy(1, outliers, x[:, outliers] * 1000)

    expected, actual = (quantize_rows(each, outliers, FULL_LEVELS) for each in (x, larger))

    assert torch.equal(actual.codes, expected.codes)
    assert torch.equal(actual.scale, expected.scale)


def saturating_product(codes):
    """Return a product that sums pairs in 16 bits, as AVX2 does."""
    pairs = codes.view(-1, 2, codes.shape[1]).int()

    def product(row_codes):
        products = row_codes.int().view(len(row_codes), -1, 2, 1) * pairs
        return products.sum(2).clamp(-(2**15), 2**15 - 1).sum(1)

    return product


def exact_product(codes):
    return lambda row_codes: (row_codes.double() @ codes.double()).int()


@pytest.fixture
def small_products(monkeypatch):
    monkeypatch.setattr(module, "_WIDTH", 32)


@pytest.mark.usefixtures("small_products")
def test_sums_that_saturate_in_16_bits_get_7_bits():
    assert module._exact_levels(saturating_product, 0) == REDUCED_LEVELS


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("lowest", [0, -128], ids=["unsigned", "signed"])
def test_exact_sums_get_8_bits(lowest):
    assert module._exact_levels(exact_product, lowest) == FULL_LEVELS


@pytest.mark.usefixtures("small_products")
def test_a_product_that_is_never_exact_is_not_used():
    assert module._exact_levels(lambda codes: lambda rows: exact_product(codes)(rows) + 1, 0) == 0


@pytest.mark.usefixtures("small_products")
def test_a_cpu_without_the_packed_product_uses_the_signed_one(monkeypatch):
    def missing(codes):
        raise AttributeError("no qlinear_prepack")

    monkeypatch.setattr(module, "pack_codes", missing)

    assert module.choose_product.__wrapped__().kernel == "linear_int8"


@pytest.mark.usefixtures("small_products")
def test_a_cpu_whose_signed_product_is_inexact_uses_the_packed_one(monkeypatch):
    monkeypatch.setattr(module, "_signed_product", lambda codes: lambda rows: rows.int() + 1)
    monkeypatch.setattr(module, "_packed_product", exact_product)

    chosen = module.choose_product.__wrapped__()

    assert chosen == module.Int8Product("linear_int8_packed", FULL_LEVELS)


@pytest.mark.usefixtures("small_products")
def test_a_cpu_without_an_exact_product_is_an_error(monkeypatch):
    def missing(codes):
        raise NotImplementedError("aten::_int_mm")

    monkeypatch.setattr(module, "_signed_product", missing)
    monkeypatch.setattr(module, "_packed_product", missing)

    with pytest.raises(module.NoInt8ProductError, match="inexactly, or not at all"):
        module.choose_product.__wrapped__()
