"""What tests of the reference share: random inputs, and the comparison with float64 arithmetic in numpy."""

import numpy as np
import pytest
import torch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def rand(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def f64(tensor):
    return tensor.to(torch.float64).numpy()


def bounds_of(lengths):
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def check(actual, expected, dtype=torch.float32):
    assert tuple(actual.shape) == expected.shape
    # sums over thousands of addends are judged by their own size
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(f64(actual), expected, rtol=0, atol=TOLERANCE[dtype] * scale)
