"""Guarded outputs detect writes outside the output, and elements that are not written."""

import pytest
import torch
import triton
import triton.language as tl

from .guards import Guarded, write_guarded

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32]


@triton.jit
def _fill_kernel(out_ptr, first, count, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Write ones into elements `first` to `count` of a row."""
    at = tl.arange(0, BLOCK)
    row_ptr = out_ptr + tl.program_id(0) * STRIDE + first
    tl.store(row_ptr + at, tl.full((BLOCK,), 1, tl.float32), mask=at < count)


def fill(out: torch.Tensor, first: int = 0, past: int = 0) -> torch.Tensor:
    """Write ones from element `first` of each row to `past` elements after its end."""
    count = out.shape[-1] - first + past
    rows = out.numel() // out.shape[-1]
    stride = out.stride(-2) if out.dim() > 1 else 0
    _fill_kernel[(rows,)](out, first, count, STRIDE=stride, BLOCK=64)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, gap", [((5,), 0), ((3, 5), 0), ((2, 3, 5), 0), ((3, 5), 3)])
def test_elements_written_inside_are_returned(shape, gap, dtype, device):
    out = write_guarded(fill, shape, dtype, device, gap)

    assert out.shape == shape
    assert (out == 1).all()


def test_an_empty_output_is_allowed(device):
    out = write_guarded(lambda out: out, (0, 5), torch.float32, device)

    assert out.shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first, past", [(-1, 0), (0, 1)], ids=["before", "after"])
def test_one_element_outside_is_detected(first, past, dtype, device):
    with pytest.raises(AssertionError, match="wrote outside its output"):
        write_guarded(lambda out: fill(out, first, past), (5,), dtype, device)


def test_one_element_between_rows_is_detected(device):
    with pytest.raises(AssertionError, match="wrote outside its output"):
        write_guarded(lambda out: fill(out, past=1), (3, 5), torch.float32, device, gap=2)


def test_a_result_that_is_not_in_out_is_detected(device):
    with pytest.raises(AssertionError):
        write_guarded(torch.clone, (5,), torch.float32, device)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_an_element_that_is_not_written_is_nan(dtype, device):
    out = write_guarded(lambda out: fill(out, first=1), (3, 5), dtype, device)

    assert out[:, 0].isnan().all()
    assert (out[:, 1:] == 1).all()


def test_an_integer_that_is_not_written_is_minus_one(device):
    guarded = Guarded((3, 5), torch.int32, device)

    guarded.check()
    assert (guarded.tensor == -1).all()
