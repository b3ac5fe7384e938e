"""Runs compiled functions on the threads that torch itself uses.

Waking a thread of Python takes longer than a small op of a step of generation. torch has a team of OpenMP threads for
each thread that calls it; between its ops they spin for a while. `GOMP_parallel` is the function of that library by
which torch starts them. Each thread takes part after part by an atomic counter, so none waits for a core that is taken
before it begins.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numpy.typing import NDArray

# C signature of a function for `run_team`: it gets the address of the arguments.
PART = types.void(types.voidptr)


def run_team(part: int, arguments: Sequence[int], threads: int) -> bool:
    """Call a compiled function in several threads; return False if torch has none.

    Args:
        part: address of a C function of the signature `PART`.
        arguments: numbers and addresses of arrays, behind a counter of parts, which begins at 0.
        threads: number of threads.
    """
    start = _library()
    if start is None:
        return False
    memory: NDArray[np.int64] = np.array([0, *arguments], np.int64)
    start(part, memory.ctypes.data, threads, 0)
    return True


@cache
def _library() -> Any:
    """Return `GOMP_parallel` of the library that torch has loaded, None without it."""
    try:
        with Path("/proc/self/maps").open(encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps if "/libgomp" in line}
        folder = str(Path(torch.__file__).parent)
        # other packages may have brought one of their own
        (path,) = {path for path in paths if path.startswith(folder)} or paths
        start = ctypes.CDLL(path).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start


@numba.extending.intrinsic
def take_part(_context, _arguments):
    """Return the number of the next part, from 0, and count it.

    Args:
        _arguments: address of the arguments, as a function of `run_team` gets it.
    """

    def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        number = ir.IntType(64)
        counter = builder.bitcast(values[0], number.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(number, 1), "monotonic")

    return types.int64(types.voidptr), generate


@numba.extending.intrinsic
def pointer_of(_context, _address):
    """Return an address as a pointer, for `numba.carray`."""

    def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate
