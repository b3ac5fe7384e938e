"""int8 linear layers: the reference stays within its quantization error, and CPUs give its results."""

import pytest
import torch

from tests.kernels.float64 import check, rand
from varlen_kernels import cpu
from varlen_kernels.cpu.bodies.int8_layout import TILE_FEATURES, panel_levels
from varlen_kernels.cpu.calls import calls
from varlen_kernels.cpu.int8_products import Int8Product, int8_product
from varlen_kernels.cpu.native.threads import using_cores
from varlen_kernels.reference.linear_int8 import (
    FULL_LEVELS,
    OUTLIERS,
    REDUCED_LEVELS,
    WeightCodes,
    linear_int8,
    linear_int8_activate,
    nearest_codes,
    quantize_rows,
    quantize_weight,
)

# The last ones fill tiles of AMX: an odd number of them, more rows than tokens, and blocks that share a panel.
SHAPES = [
    *[(1, 5, 3), (63, 100, 33), (7, 1023, 64), (130, 64, 200), (17, 384, 70)],
    *[(33, 128, 64), (81, 64, 70), (426, 64, 130)],
]
LEVELS = pytest.mark.parametrize("levels", [FULL_LEVELS, REDUCED_LEVELS], ids=["8bit", "7bit"])
PANELS = Int8Product("linear_int8_panels", panel_levels())
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


PRODUCTS = pytest.mark.parametrize(
    "kernel",
    [
        "linear_int8_panels",
        "linear_int4_panels",
    ],
)


def codes(kernel, weight, outliers):
    return nearest_codes(weight, outliers, 4 if "int4" in kernel else 8)


@LEVELS
@pytest.mark.parametrize("tokens, hidden, features", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_the_error_is_at_most_half_a_step_of_each_factor(
    tokens, hidden, features, has_bias, levels
):
    weight, bias, outliers = layer(hidden, features, has_bias=has_bias)
    x = inputs(tokens, hidden, outliers)
    quantized = quantize_weight(weight, bias, outliers, levels)
    kept = [column for column in range(hidden) if column not in outliers.tolist()]
    steps = quantize_rows(x, outliers, levels).scale.double() / 2, quantized.scale.double() / 2

    actual = linear_int8(x, quantized)

    inner, rows = x[:, kept].double().abs(), weight[kept].double().abs()
    bound = steps[0] * rows.sum(0) + inner.sum(1, keepdim=True) * steps[1]
    bound += len(kept) * steps[0] * steps[1]
    exact = x.double() @ weight.double() + (0 if bias is None else bias.double())
    # sums of codes are exact; the rest is a few roundings of numbers of this size
    size = inner @ rows + (x[:, outliers].double().abs() @ weight[outliers].double().abs())
    rounding = 64 * EPS * (size.max() + inner.sum(1).max() * rows.max())
    assert ((actual.double() - exact).abs() <= bound + rounding).all()


@PRODUCTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_full", [True, False], ids=["most-levels", "7bit"])
@pytest.mark.parametrize("tokens, hidden, features", SHAPES, ids=str)
def test_products_of_cpus_match_the_reference(kernel, tokens, hidden, features, is_full, dtype):
    levels = panel_levels() if is_full else REDUCED_LEVELS
    weight, bias, outliers = layer(hidden, features)
    x = inputs(tokens, hidden, outliers).to(dtype)
    packed = Int8Product(kernel, levels).quantize(
        weight, bias, outliers, codes(kernel, weight, outliers)
    )
    out = torch.full((tokens, features), torch.nan, dtype=dtype)

    actual = getattr(cpu, kernel)(x, packed, out=out)

    assert actual is out
    chosen = codes(kernel, weight, outliers)
    expected = linear_int8(x, quantize_weight(weight, bias, outliers, levels, chosen))
    # codes are the same; the offset of signed ones adds a product of this size
    size = (x.abs().max() * weight.abs().max() * hidden).item()
    # results that are rounded to bf16 may differ by one step of it
    rtol = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=8 * EPS * size)


@PRODUCTS
@pytest.mark.parametrize("is_full", [True, False], ids=["most-levels", "7bit"])
def test_the_lowest_code_is_multiplied_exactly(kernel, is_full):
    """Codes of quantized checkpoints reach -128 and -8."""
    levels = panel_levels() if is_full else REDUCED_LEVELS
    weight, bias, outliers = layer(1023, 33)
    lowest = -8 if "int4" in kernel else -128
    chosen = WeightCodes(torch.full((33,), 0.01), torch.full((1023, 33), lowest).to(torch.int8))
    chosen.codes[outliers] = 0
    x = inputs(7, 1023, outliers)
    packed = Int8Product(kernel, levels).quantize(weight, bias, outliers, chosen)

    actual = getattr(cpu, kernel)(x, packed)

    expected = linear_int8(x, quantize_weight(weight, bias, outliers, levels, chosen))
    size = (x.abs().max() * 1.28 * 1023).item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=8 * EPS * size)


@PRODUCTS
def test_a_token_has_the_same_bits_alone_and_among_others(kernel):
    weight, bias, outliers = layer(100, 33)
    x, op = inputs(40, 100, outliers), getattr(cpu, kernel)
    product = Int8Product(kernel, panel_levels())
    packed = product.quantize(weight, bias, outliers, codes(kernel, weight, outliers))

    together = op(x, packed)

    for token in (0, 17, 39):
        alone = op(x[token : token + 1].contiguous(), packed)
        assert torch.equal(alone[0], together[token])


@PRODUCTS
def test_no_tokens_give_no_rows(kernel):
    weight, bias, outliers = layer(8, 3)
    chosen = codes(kernel, weight, outliers)
    packed = Int8Product(kernel, REDUCED_LEVELS).quantize(weight, bias, outliers, chosen)

    actual = getattr(cpu, kernel)(torch.empty(0, 8), packed)

    assert actual.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("tokens, hidden, features", SHAPES, ids=str)
@PRODUCTS
def test_an_activation_behind_a_layer_matches_the_reference(
    kind, tokens, hidden, features, kernel, dtype
):
    weights = layer(hidden, features)
    chosen = codes(kernel, weights[0], weights[-1])
    packed = Int8Product(kernel, REDUCED_LEVELS).quantize(*weights, chosen)
    x = inputs(tokens, hidden, weights[-1]).to(dtype)
    out = torch.full((tokens, features), torch.nan, dtype=dtype)

    assert getattr(cpu, f"{kernel}_activate")(x, packed, kind=kind, out=out) is out

    quantized = quantize_weight(*weights, REDUCED_LEVELS, chosen)
    check(out, linear_int8_activate(x, quantized, kind=kind), dtype)


@pytest.mark.parametrize("hidden", [100, 128])
@pytest.mark.parametrize("tokens", [1, 5, 301])
def test_threads_give_the_bits_of_one(monkeypatch, tokens, hidden):
    x, packed = rand(tokens, hidden), PANELS.quantize(*layer(hidden, 70))
    runs = [
        lambda out: cpu.linear_int8_panels(x, packed, out=out),
        lambda out: cpu.linear_int8_panels_activate(x, packed, kind="gelu", out=out),
    ]
    expected = [run(None) for run in runs]
    monkeypatch.setattr("varlen_kernels.cpu.calls.run_calls._LEAST_SHARED_WORK", 1)
    monkeypatch.setattr(calls, "_LEAST_SHARED_CALL", 1)

    for run, result in zip(runs, expected, strict=True):
        with using_cores(3):
            assert torch.equal(run(torch.full((tokens, 70), torch.nan)), result)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_panels_of_4_bits_have_every_code(tokens):
    numbers = torch.arange(-8, 8, dtype=torch.int8)
    # each code in each column of the input, for some feature
    every = torch.stack([numbers.roll(column) for column in range(37)])
    chosen = WeightCodes(torch.ones(16), every.index_fill(0, torch.arange(OUTLIERS), 0))
    weight, outliers = torch.zeros(37, 16), torch.arange(OUTLIERS)
    x = rand(tokens, 37)

    packed = int8_product(4).quantize(weight, None, outliers, chosen)

    quantized = quantize_weight(weight, None, outliers, PANELS.levels, chosen)
    assert packed.codes.nbytes == 40 * TILE_FEATURES // 2
    check(cpu.linear_int4_panels(x, packed), linear_int8(x, quantized))


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_panels_of_extreme_codes_are_exact(tokens):
    weight = torch.tensor([1.0, -1.0]).repeat(20, 1).index_fill(0, torch.arange(OUTLIERS), 0)
    # a column of the lowest value, all others of the highest
    x = torch.ones(tokens, 20).index_fill(1, torch.tensor([OUTLIERS]), 0)
    parts = None, torch.arange(OUTLIERS)

    actual = cpu.linear_int8_panels(x, PANELS.quantize(weight, *parts))

    assert torch.equal(actual, linear_int8(x, quantize_weight(weight, *parts, PANELS.levels)))


@PRODUCTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("hidden", [100, 128])
def test_a_token_with_a_number_that_is_not_finite_gets_nan(kernel, hidden, value, dtype):
    weight, bias, outliers = layer(hidden, 33)
    x, op = inputs(9, hidden, outliers).to(dtype), getattr(cpu, kernel)
    chosen = codes(kernel, weight, outliers)
    quantized = quantize_weight(weight, bias, outliers, REDUCED_LEVELS, chosen)
    packed = Int8Product(kernel, REDUCED_LEVELS).quantize(weight, bias, outliers, chosen)
    expected = op(x, packed)
    # an outlier; the first and the last of the others
    inner = [column for column in range(hidden) if column not in outliers.tolist()]
    places = torch.tensor([1, 4, 7]), torch.tensor([int(outliers[1]), inner[0], inner[-1]])

    damaged = x.index_put(places, torch.tensor(value, dtype=dtype))

    expected[places[0]] = torch.nan
    for actual in (op(damaged, packed), linear_int8(damaged, quantized)):
        assert actual[places[0]].isnan().all()
        assert actual.isfinite().all(1).sum() == 6
    actual = op(damaged, packed)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@PRODUCTS
def test_no_rows_have_no_products(kernel):
    weight, bias, outliers = layer(20, 7)
    chosen = codes(kernel, weight, outliers)
    packed = Int8Product(kernel, REDUCED_LEVELS).quantize(weight, bias, outliers, chosen)

    assert getattr(cpu, kernel)(torch.empty(0, 20), packed).shape == (0, 7)


@PRODUCTS
@pytest.mark.parametrize("hidden", [200, 320])
def test_a_row_has_the_same_bits_in_every_batch(hidden, kernel):
    weight, bias, outliers = layer(hidden, 70)
    chosen = codes(kernel, weight, outliers)
    packed = Int8Product(kernel, REDUCED_LEVELS).quantize(weight, bias, outliers, chosen)
    x, op = inputs(41, hidden, outliers), getattr(cpu, kernel)

    together = op(x, packed)

    for first, last in [(0, 1), (1, 3), (3, 6), (6, 10), (10, 17), (17, 41)]:
        assert torch.equal(op(x[first:last], packed), together[first:last])


def test_outliers_do_not_change_the_codes_of_other_columns():
    _, _, outliers = layer(50, 3)
    x = inputs(9, 50, outliers)
    larger = x.index_copy(1, outliers, x[:, outliers] * 1000)

    expected, actual = (quantize_rows(each, outliers, FULL_LEVELS) for each in (x, larger))

    assert torch.equal(actual.codes, expected.codes)
    assert torch.equal(actual.scale, expected.scale)
