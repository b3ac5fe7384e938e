"""Random inputs, and the tolerance of a kernel against the reference."""

from itertools import accumulate

import pytest
import torch

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# the interpreter computes with the bits of bfloat16, which takes long
_BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.full)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, _BFLOAT16], ids=["fp32", "fp16", "bf16"]
)
_FULL_SIZES = [(65, 768), (3, 1000), (4, 1024), (1, 4096)]
# tokens and features of a row-wise op
SIZES = pytest.mark.parametrize(
    "tokens, width",
    [
        *[(1, 1), (9, 5), (5, 63), (63, 64), (3, 65), (10, 384), (7, 500), (2, 501)],
        *(pytest.param(*size, marks=pytest.mark.full) for size in _FULL_SIZES),
    ],
    ids=str,
)


def rand(*shape, dtype=torch.float32, device="cpu", seed=0):
    """Return normal random numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def cu_seqlens_of(lengths, device):
    """Return where packed sequences of these lengths begin and end, `[batch + 1]` int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def spread(x, gap=8):
    """Return a view equal to `x`, with `gap` elements of NaN between its rows."""
    *rows, width = x.shape
    wide = torch.full((*rows, width + gap), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., :width] = x
    return wide[..., :width]


def assert_close(actual, expected, dtype, factor=1.0):
    """Fail if the Euclidean norm of the error exceeds the tolerance of `dtype`.

    Args:
        expected: result in fp32 or fp64, computed from inputs that were rounded to `dtype`.
        factor: multiplies the tolerance, for long sums.
    """
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    error = torch.linalg.vector_norm(actual.double() - expected.double())
    assert error <= factor * TOLERANCE[dtype] * torch.linalg.vector_norm(expected.double())
