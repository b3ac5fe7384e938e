"""Products of codes are exact up to rounding; a row has the same bits."""

import pytest
import torch

from tests.kernels.float64 import DTYPES, check, f64, rand
from varlen_kernels import cpu
from varlen_kernels.cpu.bodies.panel_layout import HAS_TABLES, pack_blocks
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native.threads import using_cores

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="numba compiles the products")

# Rows, hidden and output features, inputs of a block: of less than a tile, of several blocks of tokens, of one block.
SHAPES = pytest.mark.parametrize(
    "rows, hidden, features, size",
    [(0, 16, 5, 16), (1, 96, 96, 32), (5, 48, 64, 48), (200, 256, 129, 128), (7, 320, 1, 64)],
    ids=str,
)


# Bits of codes; whether inputs of a block have zero points; whether they have an order of their own.
FORMS = pytest.mark.parametrize(
    "bits, has_zeros, is_ordered",
    [(4, True, False), (4, False, True), (8, True, True), (8, False, False)],
    ids=str,
)


def layer_of(hidden, features, size, *, bits=4, has_zeros=True, is_ordered=False):
    """Return codes in panels, and the weight that they stand for in float64."""
    generator = torch.Generator().manual_seed(0)
    most, middle = 1 << bits, 1 << bits - 1
    codes = torch.randint(0, most, (features, hidden), generator=generator).to(torch.uint8)
    scale = torch.rand(features, hidden // size, generator=generator) * 2 / most
    zero = torch.full_like(scale, middle)
    if has_zeros:
        zero = torch.randint(0, most, scale.shape, generator=generator).float()
    weight = (codes - zero.repeat_interleave(size, 1)).double() * scale.repeat_interleave(size, 1)
    order = torch.randperm(hidden, generator=generator) if is_ordered else None
    packed = pack_blocks(
        codes, scale, (middle - zero) * scale if has_zeros else None, bits, order=order
    )
    return packed, weight.t() if order is None else weight.t()[order.argsort()]


@SHAPES
@DTYPES
@FORMS
def test_a_product_is_the_exact_one(
    rows, hidden, features, size, bits, has_zeros, is_ordered, dtype
):
    packed, weight = layer_of(
        hidden, features, size, bits=bits, has_zeros=has_zeros, is_ordered=is_ordered
    )
    x, bias = rand(rows, hidden, dtype=dtype), rand(features, dtype=dtype, seed=2)
    out = torch.full((rows, features), torch.nan, dtype=dtype)

    actual = cpu.linear_blocks(x, packed, None if has_zeros else bias, out=out)

    assert actual is out
    check(actual, f64(x) @ f64(weight) + f64(bias) * (not has_zeros), dtype)


@pytest.mark.skipif(not HAS_TABLES, reason="codes are whole numbers")
@DTYPES
def test_codes_of_a_table_have_its_values_in_the_dtype_of_the_inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (70, 96), generator=generator).to(torch.uint8)
    scale, table = torch.rand(70, 3, generator=generator), torch.randn(16, generator=generator)
    x = rand(5, 96, dtype=dtype)

    actual = cpu.linear_blocks(x, pack_blocks(codes, scale, None, table=table))

    values = table.to(dtype).double()[codes.long()] * scale.repeat_interleave(32, 1)
    check(actual, f64(x) @ f64(values.t()), dtype)


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
