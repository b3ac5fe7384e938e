"""The code that runs a table of functions (`calls`)."""

from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.native.native import inlined, int64_vector
from varlen_kernels.cpu.native.threads import ARGUMENTS, FUNCTION, PARTS, UNITS
from varlen_kernels.cpu.native.waits import SPINS, pause, yield_core

_SIZE = ir.IntType(64)


@numba.extending.intrinsic
def _call(_context, _function, _arguments, _first, _last):
    """Return the result of the function at an address."""

    def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        address, *arguments = values
        kind = ir.FunctionType(_SIZE, [_SIZE] * 3)
        return builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)

    return types.int64(*[types.int64] * 4), generate


@numba.extending.intrinsic
def _add(_context, _address, _number):
    """Add to the number at an address in one step; return the number before."""

    def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        address, number = values
        pointer = builder.inttoptr(address, _SIZE.as_pointer())
        return builder.atomic_rmw("add", pointer, number, "seq_cst")

    return types.int64(types.int64, types.int64), generate


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


@inlined
def run_shared(table, rows, columns, counts, stay, spent):
    """Run the functions of a table, with other threads that get the same table.

    Args:
        table: address of `[rows, columns]`, functions as `calls` describes them.
        counts: address of `[rows + 1, 2]`, of each function the parts that were begun, and the parts that are done;
            then the number of functions that failed. All are 0 at first.
        stay: address of a byte: the thread leaves once it is 0; or 0 for none.
        spent: address of four numbers that the caller's thread writes: cycles of all, cycles that it waited; parts of
            shared functions, parts that it took; or 0 for other threads.
    """
    numbers = int64_vector(table, rows * columns)
    began = _cycles()
    waited = shared = own = 0
    for i in range(rows):
        if stay != 0 and _byte(stay) == 0:
            return 0
        row = i * columns
        units, parts = numbers[row + UNITS], numbers[row + PARTS]
        arguments = table + 8 * (row + ARGUMENTS)
        begun, done = counts + 16 * i, counts + 16 * i + 8
        part = _add(begun, 1)
        if parts > 1:
            shared += parts
        while part < parts:
            first, last = units * part // parts, units * (part + 1) // parts
            if _call(numbers[row + FUNCTION], arguments, first, last) != 0:
                _add(counts + 16 * rows, 1)
            if parts > 1:
                own += 1
            _add(done, 1)
            part = _add(begun, 1)
        if _add(done, 0) < parts:
            turns, before = 0, _cycles()
            while _add(done, 0) < parts:
                turns += 1
                if turns < SPINS:
                    pause()
                else:
                    yield_core()
            waited += _cycles() - before
    if spent != 0:
        totals = int64_vector(spent, 4)
        totals[0], totals[1], totals[2], totals[3] = _cycles() - began, waited, shared, own
    return 0


@inlined
def run_alone(table, rows, columns):
    """Run the functions of a table; return how many failed."""
    numbers = int64_vector(table, rows * columns)
    failed = 0
    for i in range(rows):
        row = i * columns
        units, arguments = numbers[row + UNITS], table + 8 * (row + ARGUMENTS)
        if _call(numbers[row + FUNCTION], arguments, 0, units) != 0:
            failed += 1
    return failed
