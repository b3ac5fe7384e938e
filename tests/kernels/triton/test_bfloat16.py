"""bfloat16 in the interpreter computes as torch does; a GPU passes the same tests."""

import pytest
import torch
import triton
import triton.language as tl

from tests.closeness import assert_close

N = 4096


@triton.jit
def _cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def _store_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def _binary_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    if OP == "+":
        tl.store(out_ptr + at, x + y)
    elif OP == "-":
        tl.store(out_ptr + at, x - y)
    elif OP == "*":
        tl.store(out_ptr + at, x * y)
    elif OP == "maximum":
        tl.store(out_ptr + at, tl.maximum(x, y))
    elif OP == "minimum":
        tl.store(out_ptr + at, tl.minimum(x, y))
    elif OP == "where":
        tl.store(out_ptr + at, tl.where(x < y, x, y))
    elif OP == "negate":
        tl.store(out_ptr + at, -x)
    elif OP == "abs":
        tl.store(out_ptr + at, tl.abs(x))
    elif OP == "scalar":
        tl.store(out_ptr + at, x * 0.3)
    else:
        tl.static_assert(False)


@triton.jit
def _compare_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(out_ptr + at, ((x < y) & (x != -y)).to(tl.int32))


@triton.jit
def _reduce_kernel(x_ptr, sum_ptr, max_ptr, where_ptr, ROWS: tl.constexpr, N: tl.constexpr):
    row = tl.arange(0, ROWS)
    x = tl.load(x_ptr + row[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(sum_ptr + row, tl.sum(x, axis=1))
    largest, where = tl.max(x, axis=1, return_indices=True)
    tl.store(max_ptr + row, largest)
    tl.store(where_ptr + row, where)


@triton.jit
def _whole_sum_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, product)


@pytest.fixture
def numbers(device):
    """Return fp32 values that include ties between two bfloat16, zeros, infinities and NaN."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (N,), dtype=torch.int64).to(torch.int32)
    # halfway between two neighbours, one of them even
    bits[:1024] = bits[:1024] & ~0xFFFF | 0x8000
    values = bits.view(torch.float32)
    values[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3895e38])
    return values.to(device)


@pytest.mark.parametrize("kernel", [_cast_kernel, _store_kernel], ids=["to", "store"])
def test_fp32_becomes_the_bfloat16_that_torch_makes_of_it(kernel, numbers):
    out = torch.empty(N, dtype=torch.bfloat16, device=numbers.device)

    kernel[(1,)](numbers, out, N=N)

    assert_same(out, numbers.bfloat16())
    assert out[1].signbit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
def test_bfloat16_becomes_what_torch_makes_of_it(dtype, device):
    x = torch.linspace(-300, 300, N, device=device).bfloat16()
    out = torch.empty(N, dtype=dtype, device=device)

    _cast_kernel[(1,)](x, out, N=N)

    assert_same(out, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32], ids=str)
def test_other_types_become_the_bfloat16_that_torch_makes_of_them(dtype, device):
    x = torch.linspace(-300, 300, N, device=device).to(dtype)
    out = torch.empty(N, dtype=torch.bfloat16, device=device)

    _cast_kernel[(1,)](x, out, N=N)

    assert_same(out, x.bfloat16())


OPS = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "where": lambda x, y: torch.where(x < y, x, y),
    "negate": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "scalar": lambda x, y: x * torch.tensor(0.3, dtype=x.dtype, device=x.device),
}


@pytest.mark.parametrize("op", OPS)
def test_arithmetic_is_that_of_torch(op, numbers):
    x, y = numbers.bfloat16(), numbers.roll(1).bfloat16()
    out = torch.empty_like(x)

    _binary_kernel[(1,)](x, y, out, OP=op, N=N)

    assert_same(out, OPS[op](x, y))


def test_comparisons_are_of_values_and_give_truth_values(numbers):
    x, y = numbers.bfloat16(), numbers.roll(1).bfloat16()
    out = torch.empty(N, dtype=torch.int32, device=numbers.device)

    _compare_kernel[(1,)](x, y, out, N=N)

    assert torch.equal(out, ((x < y) & (x != -y)).int())


def test_reductions_are_of_values(device):
    torch.manual_seed(0)
    x = torch.randn(4, 64, device=device).bfloat16()
    total, largest = torch.empty(2, 4, dtype=torch.bfloat16, device=device)
    where = torch.empty(4, dtype=torch.int32, device=device)

    _reduce_kernel[(1,)](x, total, largest, where, ROWS=4, N=64)

    # a GPU rounds partial sums too
    torch.testing.assert_close(total, x.float().sum(1).bfloat16(), rtol=2e-2, atol=0.1)
    assert torch.equal(largest, x.max(1).values)
    assert torch.equal(where.long(), x.max(1).indices)


def test_a_sum_over_all_elements_is_a_scalar(device):
    x = torch.full((64,), 0.5, dtype=torch.bfloat16, device=device)
    out = torch.empty(1, dtype=torch.bfloat16, device=device)

    _whole_sum_kernel[(1,)](x, out, N=64)

    assert out.item() == 32


def test_a_dot_product_multiplies_values(device):
    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32, device=device).bfloat16()
    out = torch.empty(32, 32, device=device)

    _dot_kernel[(1,)](a, b, out, SIZE=32)

    assert_close(out, a.double() @ b.double(), roundings=32)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless all values are equal; NaN equals NaN, and -0 equals 0."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
