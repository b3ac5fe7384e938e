"""Runs a table of compiled functions, on one thread or several.

Each function gets the address of its arguments and the range of units that it works on. Threads go through the same
list. They take parts of a function's units until none is left, and go on when all parts are done. A thread waits only
for parts that another one has begun, so a thread whose core is taken delays the others by one part at most.
Where there is no LLVM, `machine_code` cannot be imported, and ops run their specification. Nothing here imports torch.
"""

import ctypes
import logging
import time
from collections.abc import Sequence
from functools import cache
from math import prod
from threading import get_ident
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen_kernels.cpu.native.target_cpu import named_level
from varlen_kernels.cpu.native.threads import ARGUMENTS, HELP_SECONDS, run_along

_log = logging.getLogger(__name__)

Table: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

# No byte says that threads must leave.
ALWAYS: Bytes = np.empty(0, np.uint8)

# Multiplications of a function below which threads do not share it: a microsecond or two of work.
_LEAST_SHARED_WORK = 1 << 19
# Parts of each core: the last ones are short, so cores end at about the same time.
_PARTS = 4
NO_MEMORY = "too little memory for what an op computes with"


@cache
def has_compiled_ops() -> bool:
    """Return whether ops run as machine code; else plain torch runs them, more slowly.

    Code that is not stored is compiled when an op first needs it, which takes numba seconds.

    Raises:
        ValueError: the environment names a level of CPUs that does not exist.
    """
    named_level()
    try:
        prepare()
    except Exception as error:
        # LLVM or numba is absent or of another version, or no folder can hold compiled code
        _log.warning("ops on CPUs are not compiled, which makes them slower: %r", error)
        return False
    return True


def run_calls(table: Table, cores: int, stay: Bytes = ALWAYS, held: object = None) -> float:
    """Run the functions of a table, one after another.

    Args:
        table: `[functions, ARGUMENTS + arguments]`; a thread may read it after this returns.
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
            raise MemoryError(NO_MEMORY)
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
        raise MemoryError(NO_MEMORY)
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
    loaded_address("run_shared")


def extent_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor: axes after the first count as one."""
    return shape[0], prod(shape[1:])


def parts_of(units: int, multiplications: float, cores: int) -> int:
    """Return the number of parts of a function's units that threads take."""
    is_shared = cores > 1 and multiplications >= _LEAST_SHARED_WORK
    return max(1, min(units, _PARTS * cores)) if is_shared else 1


@cache
def _compiled(name: str, arguments: int) -> Any:
    """Return a compiled function of whole numbers, which runs without the GIL."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)
    return kind(loaded_address(name))


def loaded_address(name: str) -> int:
    """Return `machine_code.address_of`; see there. It is imported here since it needs LLVM."""
    from varlen_kernels.cpu.calls.machine_code import address_of

    return address_of(name)
