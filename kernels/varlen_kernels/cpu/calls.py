"""Runs a list of compiled functions in one call, on one thread or several.

Each function gets the address of its arguments and the range of units that it works on. Threads go through the same
list. They take parts of a function's units until none is left, and go on when all parts are done. A thread waits only
for parts that another one has begun, so a thread whose core is taken delays the others by one part at most.

numba caches a compiled function under the time of its own file; see `lanes`.
"""

from typing import Any

import numba
import numba.extending
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.threads import run_along

Table = npt.NDArray[np.int64]

# Columns of a table: the address of a function, its number of units, the number of parts that threads take, and its
# arguments.
FUNCTION, UNITS, PARTS, ARGUMENTS = range(4)

# Turns of a loop that waits before it offers the core to other threads.
_TURNS = 2000
_SIZE, _VOID = ir.IntType(64), ir.VoidType()


@numba.extending.intrinsic
def _call(_context, _function, _arguments, _first, _last):
    """Call the function at an address."""

    def generate(context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        address, *arguments = values
        kind = ir.FunctionType(_VOID, [_SIZE] * 3)
        builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), generate


@numba.extending.intrinsic
def _add(_context, _address, _number):
    """Add to the number at an address, at once for all threads; return the number before."""

    def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        address, number = values
        pointer = builder.inttoptr(address, _SIZE.as_pointer())
        return builder.atomic_rmw("add", pointer, number, "seq_cst")

    return types.int64(types.int64, types.int64), generate


@numba.extending.intrinsic
def _pause(_context):
    """Tell the core that a loop waits."""

    def generate(context: Any, builder: Any, _declared: Any, _values: Any) -> Any:
        kind = ir.FunctionType(_VOID, [])
        pause = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
        builder.call(pause, [])
        return context.get_dummy_value()

    return types.none(), generate


_yield_core = types.ExternalFunction("sched_yield", types.int32())


@numba.njit(nogil=True, cache=True, _nrt=False)
def _run(
    table,  # [functions, ARGUMENTS + arguments]
    taken,  # [functions, 2]: parts that were begun, and parts that are done; zeros at first
):
    """Run the functions of a table, together with other threads that call this with the same arrays."""
    row_bytes, begin = 8 * table.shape[1], table.ctypes.data
    counts = taken.ctypes.data
    for i in range(len(table)):
        units, parts = table[i, UNITS], table[i, PARTS]
        arguments = begin + i * row_bytes + 8 * ARGUMENTS
        if parts == 1:
            if _add(counts + 16 * i, 1) == 0:
                _call(table[i, FUNCTION], arguments, 0, units)
                _add(counts + 16 * i + 8, 1)
        else:
            part = _add(counts + 16 * i, 1)
            while part < parts:
                first, last = units * part // parts, units * (part + 1) // parts
                _call(table[i, FUNCTION], arguments, first, last)
                _add(counts + 16 * i + 8, 1)
                part = _add(counts + 16 * i, 1)
        turns = 0
        while _add(counts + 16 * i + 8, 0) < parts:
            turns += 1
            if turns < _TURNS:
                _pause()
            else:
                _yield_core()


@numba.njit(nogil=True, cache=True, _nrt=False)
def _run_alone(table):
    row_bytes, begin = 8 * table.shape[1], table.ctypes.data
    for i in range(len(table)):
        arguments = begin + i * row_bytes + 8 * ARGUMENTS
        _call(table[i, FUNCTION], arguments, 0, table[i, UNITS])


def compile_calls() -> None:
    """Compile what `run_calls` needs."""
    nothing = np.zeros((0, ARGUMENTS), np.int64)
    _run_alone(nothing)
    _run(nothing, np.zeros((0, 2), np.int64))


def run_calls(table: Table, cores: int) -> None:
    """Run the functions of a table, one after another.

    Args:
        table: `[functions, ARGUMENTS + arguments]`; a thread may read it after this returns.
        cores: number of threads.
    """
    if cores == 1:
        _run_alone(table)
        return
    taken = np.zeros((len(table), 2), np.int64)
    run_along(lambda: _run(table, taken), cores)
