"""Kernels on a CUDA GPU, or in Triton's interpreter on a machine without: one set of tests, two ways to run it."""

import numpy as np
import pytest
import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)

if INTERPRETED:
    from .bfloat16 import install

    install()
    # a GPU overflows, and makes NaN, in silence
    np.seterr(all="ignore")


@pytest.fixture
def device():
    # tests/conftest.py skips these tests where they can run on neither
    return torch.device("cpu" if INTERPRETED else "cuda")
