"""Products with panels are exact up to rounding; a row always has the same bits."""

import numpy as np
import pytest
import torch

from tests.kernels.float64 import DTYPES, check, check_activation, f64, rand, whole_range
from varlen_kernels import cpu, reference
from varlen_kernels.cpu.bodies.panel_layout import pack_panels
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native.threads import using_cores

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the products")

# Rows, hidden and output features: of less than a tile, of several blocks, of widths that are no whole vectors or that
# fill the tiles of AMX.
SHAPES = pytest.mark.parametrize(
    "rows, hidden, features",
    [
        *[(0, 8, 5), (1, 48, 96), (5, 7, 64), (13, 33, 100), (200, 70, 129), (7, 300, 1)],
        *[(1, 32, 64), (17, 320, 100), (33, 64, 129), (81, 64, 70), (500, 64, 70)],
    ],
    ids=str,
)
KINDS = ["gelu", "gelu_tanh", "silu", "relu"]


def layer_of(rows, hidden, features, dtype=torch.float32):
    x = rand(rows, hidden, dtype=dtype)
    return x, rand(hidden, features, dtype=dtype, seed=1), rand(features, dtype=dtype, seed=2)


@SHAPES
@DTYPES
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_a_product_is_the_exact_one(rows, hidden, features, has_bias, dtype):
    x, weight, bias = layer_of(rows, hidden, features, dtype)
    out = torch.full((rows, features), torch.nan, dtype=dtype)

    actual = cpu.linear_panels(x, pack_panels(weight), bias if has_bias else None, out=out)

    assert actual is out
    check(actual, f64(x) @ f64(weight) + f64(bias) * has_bias, dtype)


@SHAPES
@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_follows(rows, hidden, features, kind):
    x, weight, bias = layer_of(rows, hidden, features)

    actual = cpu.linear_panels_activate(x, pack_panels(weight), bias, kind=kind)

    exact = reference.linear(*(each.double() for each in (x, weight, bias)))
    check(actual, reference.activate(exact, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_activation_is_that_of_float64_over_the_whole_range(kind):
    x = whole_range()

    actual = cpu.linear_panels_activate(x.view(-1, 1), pack_panels(torch.ones(1, 1)), kind=kind)

    check_activation(actual.view_as(x), x, kind)


@DTYPES
@pytest.mark.parametrize("hidden", [70, 320])
def test_a_row_has_the_same_bits_alone_and_among_others(hidden, dtype):
    x, weight, bias = layer_of(211, hidden, 129, dtype)
    panels = pack_panels(weight)
    expected = cpu.linear_panels(x, panels, bias)

    for first, last in [(0, 1), (3, 10), (90, 211), (100, 113)]:
        assert torch.equal(cpu.linear_panels(x[first:last], panels, bias), expected[first:last])


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 40, 211, 500])
def test_a_row_has_the_same_bits_on_any_number_of_cores(rows, dtype):
    # enough work to be shared
    x, weight, bias = layer_of(rows, 512, 1000 if rows == 500 else 2000, dtype)
    panels = pack_panels(weight)

    def results(cores):
        with using_cores(cores):
            return [
                cpu.linear_panels(x, panels, bias),
                cpu.linear_panels_activate(x, panels, bias, kind="gelu"),
            ]

    for one, several in zip(results(1), results(3), strict=True):
        assert torch.equal(one, several)


@DTYPES
def test_what_is_not_finite_stays_in_its_row(dtype):
    x, weight, bias = layer_of(9, 33, 20, dtype)
    panels = pack_panels(weight)
    expected = cpu.linear_panels(x, panels, bias)
    x[4, 7], x[5, 0] = torch.nan, torch.inf

    actual = cpu.linear_panels(x, panels, bias)

    others = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(actual[others], expected[others])
    assert actual[4].isnan().all()
    assert not actual[5].isfinite().any()


def test_rows_and_results_may_be_parts_of_wider_matrices():
    x, weight, bias = layer_of(13, 40, 24)
    wide, out = rand(13, 100, seed=6), torch.full((13, 60), torch.nan)
    wide[:, 10:50] = x

    cpu.linear_panels(wide[:, 10:50], pack_panels(weight), bias, out=out[:, :24])

    assert torch.equal(out[:, :24], cpu.linear_panels(x, pack_panels(weight), bias))
    assert np.isnan(out[:, 24:].numpy()).all()
