"""What compiled code does while it waits for another thread or process."""

from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import cgutils, types

from varlen_kernels.cpu.native.native import inlined, int64_vector

# Looks of a waiting thread before it offers its core to others.
SPINS = 2000
_SIZE, _VOID = ir.IntType(64), ir.VoidType()
# Clock of clock_gettime that no program can set.
_MONOTONIC = 1


@numba.extending.intrinsic
def pause(_context):
    """Tell the core that a loop waits."""

    def generate(context: Any, builder: Any, _declared: Any, _values: Any) -> Any:
        kind = ir.FunctionType(_VOID, [])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
        builder.call(instruction, [])
        return context.get_dummy_value()

    return types.none(), generate


@numba.extending.intrinsic
def shared_number(_context, _address):
    """Return a number that another process may change, and everything that it wrote before it."""

    def generate(_context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _SIZE.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@numba.extending.intrinsic
def share_number(_context, _address, _number):
    """Write a number for another process, and everything that was written before it."""

    def generate(context: Any, builder: Any, _declared: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _SIZE.as_pointer())
        builder.store_atomic(values[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


yield_core: Any = types.ExternalFunction("sched_yield", types.int32())
_usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@inlined
def sleep(microseconds):
    """Give the core away for some time."""
    _usleep(microseconds)


@inlined
def nanoseconds(memory):
    """Return the time, given the address of 16 bytes to use."""
    _clock_gettime(_MONOTONIC, memory)
    parts = int64_vector(memory, 2)
    return parts[0] * 1_000_000_000 + parts[1]
