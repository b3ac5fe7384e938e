"""The ops that CPUs run in another way than the reference give its results."""

import pkgutil

import pytest
import torch

from tests.kernels.float64 import check, rand
from varlen_kernels import cpu, reference
from varlen_kernels.cpu import products
from varlen_kernels.cpu.products import can_pack, pack_weight
from varlen_kernels.op_table import OPS


def test_no_file_has_the_name_of_an_op():
    """The import of `cpu/linear_int8.py` replaced the op of that name by the module."""
    files = {module.name for module in pkgutil.iter_modules(cpu.__path__)}

    assert not files & set(OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows, hidden, features", [(0, 8, 5), (1, 48, 96), (33, 100, 7)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_a_packed_weight_multiplies_as_its_original(rows, hidden, features, has_bias, dtype):
    if not can_pack(dtype):
        pytest.skip("oneDNN does not multiply bf16 on this CPU")
    x, weight = rand(rows, hidden, dtype=dtype), rand(hidden, features, dtype=dtype, seed=1)
    bias = rand(features, dtype=dtype, seed=2) if has_bias else None
    out = torch.full((rows, features), torch.nan, dtype=dtype)

    actual = cpu.linear_packed(x, pack_weight(weight), bias, out=out)

    assert actual is out
    check(actual, reference.linear(x, weight, bias), dtype)


@pytest.mark.parametrize("tile", [1, 300, 1 << 20])
@pytest.mark.parametrize("rows, hidden, features", [(0, 8, 5), (1, 48, 96), (33, 100, 7)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_a_widened_product_is_the_exact_one_rounded_to_bf16(
    rows, hidden, features, has_bias, tile, monkeypatch
):
    monkeypatch.setattr(products, "_TILE_ELEMENTS", tile)
    dtype = torch.bfloat16
    x, weight = rand(rows, hidden, dtype=dtype), rand(hidden, features, dtype=dtype, seed=1)
    bias = rand(features, dtype=dtype, seed=2) if has_bias else None
    out = torch.full((rows, features), torch.nan, dtype=dtype)

    actual = cpu.linear_widened(x, weight, bias, out=out)

    assert actual is out
    assert torch.equal(actual, cpu.linear_widened(x, weight, bias))
    operands = [each if each is None else each.double() for each in (x, weight, bias)]
    exact = reference.linear(*operands)
    # sums in fp32, then one rounding to the 8 bits of bf16
    sizes = reference.linear(*(each if each is None else each.abs() for each in operands))
    bound = 2**-8 * exact.abs() + (hidden + 1) * 2**-24 * sizes
    assert ((actual.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("can_pack", [True, False])
def test_products_of_bf16_are_widened_only_where_onednn_does_not_multiply_it(can_pack, monkeypatch):
    called = []
    monkeypatch.setattr(products, "can_pack", lambda _: can_pack)
    monkeypatch.setattr(products, "linear_widened", lambda *_, **__: called.append("widened"))

    for dtype in (torch.float32, torch.bfloat16):
        cpu.linear(rand(2, 3, dtype=dtype), rand(3, 4, dtype=dtype))

    assert called == ([] if can_pack else ["widened"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_packed_product_of_no_rows_has_the_dtype_of_its_input(dtype):
    if not can_pack(dtype):
        pytest.skip("oneDNN does not multiply bf16 on this CPU")
    packed = pack_weight(rand(8, 5, dtype=dtype))

    actual = cpu.linear_packed(torch.empty(0, 8, dtype=dtype), packed)

    assert (actual.shape, actual.dtype) == ((0, 5), dtype)
