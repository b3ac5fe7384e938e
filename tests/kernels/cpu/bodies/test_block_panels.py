"""Products of codes are exact up to rounding; a row has the same bits."""

import pytest
import torch

from tests.kernels.float64 import DTYPES, check, f64, rand
from varlen_kernels import cpu
from varlen_kernels.cpu.bodies.panel_layout import pack_blocks
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native.threads import using_cores

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the products")

# Rows, hidden and output features, inputs of a block: of less than a tile, of several blocks of tokens, of one block.
SHAPES = pytest.mark.parametrize(
    "rows, hidden, features, size",
    [(0, 16, 5, 16), (1, 96, 96, 32), (5, 48, 64, 48), (200, 256, 129, 128), (7, 320, 1, 64)],
    ids=str,
)


def layer_of(hidden, features, size, *, has_zeros):
    """Return codes in panels, and the weight that they stand for in float64."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (features, hidden), generator=generator).to(torch.uint8)
    scale = torch.rand(features, hidden // size, generator=generator) / 8
    zero = torch.full_like(scale, 8)
    if has_zeros:
        zero = torch.randint(0, 16, scale.shape, generator=generator).float()
    weight = (codes - zero.repeat_interleave(size, 1)).double() * scale.repeat_interleave(size, 1)
    return pack_blocks(codes, scale, -zero * scale if has_zeros else None), weight.t()


@SHAPES
@DTYPES
@pytest.mark.parametrize("has_zeros", [True, False], ids=["zeros", "no-zeros"])
def test_a_product_is_the_exact_one(rows, hidden, features, size, has_zeros, dtype):
    packed, weight = layer_of(hidden, features, size, has_zeros=has_zeros)
    x, bias = rand(rows, hidden, dtype=dtype), rand(features, dtype=dtype, seed=2)
    out = torch.full((rows, features), torch.nan, dtype=dtype)

    actual = cpu.linear_blocks(x, packed, None if has_zeros else bias, out=out)

    assert actual is out
    check(actual, f64(x) @ f64(weight) + f64(bias) * (not has_zeros), dtype)


@DTYPES
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_cores(dtype):
    packed, _ = layer_of(64, 200, 32, has_zeros=True)
    x = rand(203, 64, dtype=dtype)
    expected = cpu.linear_blocks(x, packed)

    for first, last in [(0, 1), (1, 3), (2, 9), (100, 203)]:
        assert torch.equal(cpu.linear_blocks(x[first:last], packed), expected[first:last])
    with using_cores(2):
        assert torch.equal(cpu.linear_blocks(x, packed), expected)


def test_values_that_are_not_finite_stay_in_their_row():
    packed, _ = layer_of(32, 70, 16, has_zeros=False)
    x = rand(3, 32)
    expected = cpu.linear_blocks(x, packed)
    x[1, 5] = torch.inf

    actual = cpu.linear_blocks(x, packed)

    assert torch.equal(actual[[0, 2]], expected[[0, 2]])
    assert not actual[1].isfinite().any()
