"""How fast the machine is just now, whatever it serves: others may use it too, and then nothing else is comparable."""

from __future__ import annotations

import time

import numpy as np

_SECONDS = 0.2
# A product of square matrices of this side takes milliseconds: long enough for a core to be taken away meanwhile.
_SIDE = 512


def gflops() -> float:
    """Return the speed of fp32 matrix products on all cores, in GFLOP/s, measured for a moment."""
    matrix = np.full((_SIDE, _SIDE), 0.5, dtype=np.float32)
    product = np.empty_like(matrix)
    np.matmul(matrix, matrix, out=product)
    began = time.perf_counter()
    count = 0
    while (passed := time.perf_counter() - began) < _SECONDS:
        np.matmul(matrix, matrix, out=product)
        count += 1
    return count * 2 * _SIDE**3 / passed / 1e9
