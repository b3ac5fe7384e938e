"""Setup of the kernel tests, on a CUDA GPU or in Triton's interpreter."""

import numpy as np
import pytest
import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)

# a GPU runs other tests of the executors
collect_ignore = [] if INTERPRETED else ["test_fake_cuda.py", "test_fake_steps.py"]

if INTERPRETED:
    from .bfloat16 import install
    from .language import patch_once

    install()
    patch_once()
    # a GPU does not warn about overflow or NaN
    np.seterr(all="ignore")


def pytest_configure(config: pytest.Config) -> None:
    """Ignore the same in other threads: numpy has settings for each."""
    if INTERPRETED:
        # sums warn in numpy itself
        for module in ("triton.runtime", "numpy"):
            config.addinivalue_line("filterwarnings", f"ignore::RuntimeWarning:{module}")


@pytest.fixture
def device():
    # tests/conftest.py skips these tests where neither is available
    return torch.device("cpu" if INTERPRETED else "cuda")
