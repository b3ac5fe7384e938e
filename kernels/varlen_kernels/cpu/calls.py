"""Runs a list of compiled functions in one call, on one thread or several.

Each function gets the address of its arguments and the range of units that it works on. Threads go through the same
list. They take parts of a function's units until none is left, and go on when all parts are done. A thread waits only
for parts that another one has begun, so a thread whose core is taken delays the others by one part at most.
"""

import time
from pathlib import Path
from threading import get_ident
from typing import Any, TypeAlias

import numba
import numba.extending
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.stored_code import stored
from varlen_kernels.cpu.threads import HELP_SECONDS, run_along

Table: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

# Columns of a table: the address of a function, its number of units, the number of parts that threads take, and its
# arguments.
FUNCTION, UNITS, PARTS, ARGUMENTS = range(4)

# No byte says that threads must leave.
ALWAYS: Bytes = np.empty(0, np.uint8)

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
    """Add to the number at an address in one step; return the number before."""

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


@numba.extending.intrinsic
def _cycles(_context):
    """Return a number that grows with time."""

    def generate(_context: Any, builder: Any, _declared: Any, _values: Any) -> Any:
        kind = ir.FunctionType(_SIZE, [])
        name = "llvm.readcyclecounter"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])

    return types.int64(), generate


@numba.extending.intrinsic
def _byte(_context, _address):
    """Return the byte at an address, which another process may change."""

    def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(8).as_pointer())
        return builder.zext(builder.load_atomic(pointer, "monotonic", 1), _SIZE)

    return types.int64(types.int64), generate


_yield_core = types.ExternalFunction("sched_yield", types.int32())


@stored(_nrt=False)
def _run(
    table,  # [functions, ARGUMENTS + arguments]
    taken,  # [functions, 2]: parts that were begun, and parts that are done; zeros at first
    stay,  # [1] bytes: other threads than the caller leave once it is 0; or [0] for none
    is_caller,
    spent,  # [4] of the caller: cycles of all, cycles that it waited; parts of shared functions, parts that it took
):
    """Run the functions of a table, with other threads that get the same arrays."""
    row_bytes, begin = 8 * table.shape[1], table.ctypes.data
    counts = taken.ctypes.data
    began = _cycles()
    waited = shared = own = 0
    for i in range(len(table)):
        if not is_caller and len(stay) and _byte(stay.ctypes.data) == 0:
            return
        units, parts = table[i, UNITS], table[i, PARTS]
        arguments = begin + i * row_bytes + 8 * ARGUMENTS
        part = _add(counts + 16 * i, 1)
        if parts > 1:
            shared += parts
        while part < parts:
            first, last = units * part // parts, units * (part + 1) // parts
            _call(table[i, FUNCTION], arguments, first, last)
            if parts > 1:
                own += 1
            _add(counts + 16 * i + 8, 1)
            part = _add(counts + 16 * i, 1)
        if _add(counts + 16 * i + 8, 0) < parts:
            turns, before = 0, _cycles()
            while _add(counts + 16 * i + 8, 0) < parts:
                turns += 1
                if turns < _TURNS:
                    _pause()
                else:
                    _yield_core()
            waited += _cycles() - before
    if is_caller:
        spent[0], spent[1], spent[2], spent[3] = _cycles() - began, waited, shared, own


@stored(_nrt=False)
def _run_alone(table):
    row_bytes, begin = 8 * table.shape[1], table.ctypes.data
    for i in range(len(table)):
        arguments = begin + i * row_bytes + 8 * ARGUMENTS
        _call(table[i, FUNCTION], arguments, 0, table[i, UNITS])


def cache_folder() -> Path:
    """Return the folder in which numba stores the compiled code of all ops."""
    return Path(_run.stats.cache_path)


def compile_calls() -> None:
    """Compile what `run_calls` needs."""
    nothing = np.zeros((0, ARGUMENTS), np.int64)
    _run_alone(nothing)
    _run(nothing, np.zeros((0, 2), np.int64), ALWAYS, True, np.zeros(4, np.int64))


def run_calls(table: Table, cores: int, stay: Bytes = ALWAYS) -> float:
    """Run the functions of a table, one after another.

    Args:
        table: `[functions, ARGUMENTS + arguments]`; a thread may read it after this returns.
        cores: number of threads.
        stay: `[1]`, a byte that a thread may read after this returns: once it is 0, other threads take no more parts.

    Returns:
        Seconds that it ended sooner than on one core; negative where other work had a core.
    """
    if cores == 1:
        _run_alone(table)
        return 0.0
    taken, spent = np.zeros((len(table), 2), np.int64), np.zeros(4, np.int64)
    caller, began = get_ident(), time.perf_counter()
    run_along(lambda: _run(table, taken, stay, get_ident() == caller, spent), cores)
    seconds = time.perf_counter() - began
    cycles, waited, shared, own = map(int, spent)
    if not shared or not own:
        return -HELP_SECONDS
    alone: float = seconds * (1 - waited / max(1, cycles)) * (shared / own)
    return alone - seconds - HELP_SECONDS
