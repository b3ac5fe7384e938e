"""Runs compiled functions, one after another, in one call, on one thread or several.

Each function gets the address of its arguments and the range of units that it works on. Threads go through the same
list. They take parts of a function's units until none is left, and go on when all parts are done. A thread waits only
for parts that another one has begun, so a thread whose core is taken delays the others by one part at most.
"""

import ctypes
import time
from collections.abc import Sequence
from functools import cache
from math import prod
from struct import Struct
from threading import get_ident
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from varlen_kernels.cpu.calls.machine_code import address_of
from varlen_kernels.cpu.native.table import ARGUMENTS
from varlen_kernels.cpu.native.threads import HELP_SECONDS, add_gain, run_along, usable_cores
from varlen_kernels.op import Function
from varlen_kernels.op_table import OPS

Table: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

# No byte says that threads must leave.
ALWAYS: Bytes = np.empty(0, np.uint8)

# Multiplications of a function below which threads do not share it: a microsecond or two of work.
_LEAST_SHARED_WORK = 1 << 19
# The same for a function that runs by itself: another thread must wake for it.
_LEAST_SHARED_CALL = 1 << 22
# Parts of each core: the last ones are short, so cores end at about the same time.
_PARTS = 4
_DOUBLE, _BITS = Struct("d"), Struct("q")
_NO_MEMORY = "too little memory for what an op computes with"


def run_calls(table: Table, cores: int, stay: Bytes = ALWAYS, held: object = None) -> float:
    """Run the functions of a table, one after another.

    Args:
        table: `[functions, ARGUMENTS + arguments]`; a thread may read it after this returns.
        cores: number of threads.
        stay: `[1]`, a byte that a thread may read after this returns: once it is 0, other threads take no more parts.
        held: holds memory that the functions use, for as long as a thread may run them.

    Returns:
        Seconds that it ended sooner than on one core; negative where other work had a core.

    Raises:
        MemoryError: a function had too little memory for what it computes with.
    """
    rows, columns = table.shape
    if cores == 1:
        if _compiled("run_alone", 3)(table.ctypes.data, rows, columns):
            raise MemoryError(_NO_MEMORY)
        return 0.0
    run = _compiled("run_shared", 6)
    counts, spent = np.zeros((rows + 1, 2), np.int64), np.zeros(4, np.int64)
    caller, began = get_ident(), time.perf_counter()

    def take_parts(_held: object = held) -> None:
        # it holds the memory: another thread may begin after the caller's has ended
        is_caller = get_ident() == caller
        leave = 0 if is_caller or not len(stay) else stay.ctypes.data
        result = spent.ctypes.data if is_caller else 0
        run(table.ctypes.data, rows, columns, counts.ctypes.data, leave, result)

    run_along(take_parts, cores)
    if counts[rows, 0]:
        raise MemoryError(_NO_MEMORY)
    seconds = time.perf_counter() - began
    cycles, waited, shared, parts = map(int, spent)
    if not shared or not parts:
        return -HELP_SECONDS
    alone: float = seconds * (1 - waited / max(1, cycles)) * (shared / parts)
    return alone - seconds - HELP_SECONDS


def prepare() -> None:
    """Load what `run_calls` needs, or compile it.

    Raises:
        ImportError, RuntimeError, OSError: see `address_of`.
    """
    run_calls(np.zeros((0, ARGUMENTS), np.int64), 1)
    address_of("run_shared")


def run_function(
    function: Function,
    tensors: Sequence[Tensor | None],
    constants: Sequence[float] = (),
    entry: str | None = None,
) -> None:
    """Run one compiled function.

    Args:
        function: its declaration.
        tensors, constants: its arguments in this order; None for a tensor that is left out.
        entry: name of its code for tensors of these dtypes, if it is known.

    Raises:
        TypeError: it has no code for tensors of these dtypes.
        MemoryError: see `run_calls`.
    """
    entry = entry or function.entry_for(tensors)
    if entry is None:
        raise TypeError(f"{function.name} has no code for {_dtypes_of(function, tensors)}")
    held = [None if each is None else each.contiguous() for each in tensors]
    extents = [(0, 0) if each is None else extent_of(each.shape) for each in held]
    units, multiplications = function.work(extents, constants)
    cores = usable_cores() if multiplications >= _LEAST_SHARED_CALL else 1
    parts = parts_of(units, multiplications, cores)
    row = [address_of(entry), units, parts]
    for tensor, (count, columns) in zip(held, extents, strict=True):
        row += (0 if tensor is None else tensor.data_ptr(), count, columns)
    row += map(bits, constants)
    # with one part there is nothing to share
    cores = cores if parts > 1 else 1
    gained = run_calls(np.array([row], np.int64), cores, held=held)
    if cores > 1:
        add_gain(gained)
    for i in function.written:
        result, copy = tensors[i], held[i]
        if result is not copy and result is not None and copy is not None:
            result.copy_(copy)


def _dtypes_of(function: Function, tensors: Sequence[Tensor | None]) -> str:
    """Return the dtypes of tensors, as text."""
    pairs = zip(function.tensors, tensors, strict=True)
    return ", ".join(f"{name} in {each.dtype}" for name, each in pairs if each is not None)


def extent_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor: axes after the first count as one."""
    return shape[0], prod(shape[1:])


def parts_of(units: int, multiplications: float, cores: int) -> int:
    """Return the number of parts of a function's units that threads take."""
    is_shared = cores > 1 and multiplications >= _LEAST_SHARED_WORK
    return max(1, min(units, _PARTS * cores)) if is_shared else 1


def bits(number: float) -> int:
    """Return a whole number, or the bits of another one."""
    if isinstance(number, int):
        return number
    as_bits: int = _BITS.unpack(_DOUBLE.pack(number))[0]
    return as_bits


@cache
def _compiled(name: str, arguments: int) -> Any:
    """Return a compiled function of whole numbers, which runs without the GIL."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)
    return kind(address_of(name))


def run_op(
    name: str, operands: Sequence[Any], results: Sequence[Tensor], **attributes: Any
) -> None:
    """Write the results of an op by its compiled functions.

    Args:
        name: its name.
        operands: its operands.
        results: tensors that it writes.
        attributes: its attributes.

    Raises:
        TypeError, MemoryError: see `run_function`.
    """
    op = OPS[name]
    arguments = op.named(operands, attributes) | dict(zip(op.results, results, strict=True))
    for function, tensors, constants in op.bound(arguments):
        run_function(function, tensors, constants)
