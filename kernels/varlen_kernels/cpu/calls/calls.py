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

from varlen_kernels.cpu.calls.call_rules import flat, rules_of, shape_of
from varlen_kernels.cpu.calls.machine_code import address_of
from varlen_kernels.cpu.native.table import ARGUMENTS, DTYPES
from varlen_kernels.cpu.native.threads import HELP_SECONDS, add_gain, run_along, usable_cores

Table: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

# No byte says that threads must leave.
ALWAYS: Bytes = np.empty(0, np.uint8)

# Multiplications of a function below which threads do not share it: a microsecond or two of work.
_LEAST_SHARED_WORK = 1 << 19
# Of a function that runs by itself: another thread must wake for it.
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


def call(
    entry: str,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    constants: Sequence[float] = (),
    *,
    dtypes: str,
    units: int,
    multiplications: float = 0,
) -> None:
    """Run one compiled function.

    Args:
        entry: its name in `entries`.
        operands, results: its tensors: those that it reads, then those that it writes.
        constants: its constants.
        dtypes: the dtype of each tensor, a letter of `DTYPES`.
        units: number of its units.
        multiplications: multiplications of all units, or as many as take the same time.

    Raises:
        TypeError: a tensor has another dtype.
        MemoryError: see `run_calls`.
    """
    for tensor, letter in zip((*operands, *results), dtypes, strict=True):
        if tensor.dtype != DTYPES[letter]:
            raise TypeError(f"{entry} needs {DTYPES[letter]}, and got {tensor.dtype}")
    written = [each.contiguous() for each in results]
    group = (*operands, *written)
    call_each(entry, [group], constants, units=units, multiplications=multiplications)
    copy_back(written, results)


def copy_back(written: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copy what was written into results that are not contiguous."""
    for result, copy in zip(results, written, strict=True):
        if copy is not result:
            result.copy_(copy)


def call_each(
    entry: str,
    groups: Sequence[Sequence[Tensor]],
    constants: Sequence[float] = (),
    *,
    units: int,
    multiplications: float = 0,
) -> None:
    """Run one compiled function once for each of several groups of tensors.

    Args:
        entry: its name in `entries`.
        groups: tensors of the dtypes that it reads, and of one shape at each place; it writes only contiguous ones.
        constants, units, multiplications: see `call`; each group has as many.
    """
    extents = [extent_of(each.shape) for each in groups[0]]
    run_function(address_of(entry), groups, extents, constants, units, multiplications)


def run_function(
    address: int,
    groups: Sequence[Sequence[Tensor | None]],
    extents: Sequence[tuple[int, int]],
    constants: Sequence[float],
    units: int,
    multiplications: float,
) -> None:
    """Run the function at an address; see `call_each`.

    Args:
        address: its address.
        groups, constants, units, multiplications: see there.
        extents: rows and columns of each tensor of a group, 0 for none.
    """
    held = [[each if each is None else each.contiguous() for each in group] for group in groups]
    cores = usable_cores() if multiplications >= _LEAST_SHARED_CALL else 1
    parts = parts_of(units, multiplications, cores)
    rows = []
    for group in held:
        row = [address, units, parts]
        for tensor, (count, columns) in zip(group, extents, strict=True):
            row += (0 if tensor is None else tensor.data_ptr(), count, columns)
        row += map(bits, constants)
        rows.append(row)
    # with one part there is nothing to share
    cores = cores if parts > 1 else 1
    gained = run_calls(np.array(rows, np.int64), cores, held=held)
    if cores > 1:
        add_gain(gained)


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
    kernel: str, operands: Sequence[Any], results: Sequence[Tensor], **attributes: Any
) -> None:
    """Write the results of an op.

    Args:
        kernel: its name.
        operands: all of its operands, None for those that are left out.
        results: tensors that it writes.
        attributes: its attributes.

    Raises:
        TypeError: it has no compiled function for tensors of these dtypes.
    """
    written = [each.contiguous() for each in results]
    tensors = [*flat(operands), *written]
    shapes = [shape_of(each) for each in tensors]
    for rule in rules_of(kernel, operands):
        given = rule.of_operands(tensors)
        entry = rule.entry_for([each if each is None else each.dtype for each in given])
        if entry is None:
            raise TypeError(f"{kernel} has no compiled function for these dtypes")
        constants = rule.constants(attributes, shapes)
        extents = [(0, 0) if each is None else extent_of(each.shape) for each in given]
        units, multiplications = rule.work(extents, constants)
        run_function(address_of(entry), [given], extents, constants, units, multiplications)
    copy_back(written, results)
