"""Helpers of the reference tests: random inputs, and comparison with float64 in numpy."""

import numpy as np
import pytest
import torch

from tests.closeness import assert_close

# Roundings of the longest sum in these tests; in bfloat16, of the intermediate results of an op.
ROUNDINGS = {torch.float32: 4096, torch.bfloat16: 16}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def rand(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def f64(tensor):
    return tensor.to(torch.float64).numpy()


def bounds_of(lengths):
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def check(actual, expected, dtype=torch.float32):
    assert_close(actual, expected, roundings=ROUNDINGS[dtype], dtype=dtype)
