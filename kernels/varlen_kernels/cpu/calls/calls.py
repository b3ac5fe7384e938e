"""Runs the compiled functions of an op or a table, on one thread or several.

Each function gets the address of its arguments and the range of units that it works on. Threads go through the same
list. They take parts of a function's units until none is left, and go on when all parts are done. A thread waits only
for parts that another one has begun, so a thread whose core is taken delays the others by one part at most.
Where there is no LLVM, `machine_code` cannot be imported, and ops run their specification.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, wraps
from math import prod
from struct import Struct
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen_kernels.cpu.native.target_cpu import named_level
from varlen_kernels.cpu.native.threads import (
    ARGUMENTS,
    HELP_SECONDS,
    add_gain,
    run_along,
    usable_cores,
)
from varlen_kernels.op import Bound, Extent, Function, Op
from varlen_kernels.op_table import OPS

_log = logging.getLogger(__name__)

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
# The columns of a table before the arguments of a function.
_HEAD = Struct("q" * ARGUMENTS)
_NO_MEMORY = "too little memory for what an op computes with"


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


def compiled_form(op: Op) -> Callable[..., Any]:
    """Return an op that runs compiled code, or its specification where no code is faster.

    It raises TypeError where neither can run: only compiled code reads a weight in panels.
    """
    specification, runs = op.specification, op.runs
    is_specified = specification.__name__ == op.name

    @wraps(specification)
    def run(*operands: Any, out: Any = None, **attributes: Any) -> Any:
        if (runs is None or runs(operands, attributes)) and has_compiled_ops():
            arguments = op.named(operands, attributes)
            op.check_arguments(arguments, out)
            results = _results_of(op, arguments, operands, out) if op.result else ()
            arguments.update(zip(op.results, results, strict=False))
            if run_functions(op.bound(arguments), is_needed=not is_specified):
                if op.result is None:
                    return None
                if not results:
                    # there is nothing to return but what it got
                    return arguments[op.operands[0]]
                return results[0] if len(results) == 1 else out or tuple(results)
        if out is None:
            return specification(*operands, **attributes)
        return specification(*operands, **attributes, out=out)

    return run


def _results_of(
    op: Op, arguments: dict[str, Any], operands: Sequence[Any], out: Any
) -> Sequence[Tensor]:
    if isinstance(out, tuple):
        return out
    wanted = op.result(arguments) if op.result else ()
    if out is not None:
        return [out][: len(wanted)]
    # torch makes a tensor like another one in a third of the time
    like = operands[0] if operands else None
    return [
        torch.empty_like(like)
        if isinstance(like, Tensor) and like.dtype == dtype and like.shape == shape
        else torch.empty(shape, dtype=dtype)
        for shape, dtype in wanted
    ]


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
    _address_of("run_shared")


class _Code(NamedTuple):
    """The code of a function for tensors of some dtypes.

    Attributes:
        run: calls it with its arguments as bytes, its first unit, and the one after its last.
        widened: numbers of the tensors that become fp32 before.
    """

    address: int
    run: Callable[[bytes, int, int], int]
    widened: Sequence[int]


@cache
def _code_for(function: Function, dtypes: tuple[torch.dtype | None, ...]) -> _Code | None:
    """Return the code of a function for these dtypes; None if there is none."""
    widened = function.widened(dtypes)
    entry = function.entry_for(
        [torch.float32 if i in widened else dtype for i, dtype in enumerate(dtypes)]
    )
    if entry is None:
        return None
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    address = _address_of(entry)
    return _Code(address, kind(address), widened)


def run_functions(bound: Sequence[Bound], *, is_needed: bool = True) -> bool:
    """Run compiled functions, one after another; return whether each has code.

    If one has none for its dtypes, none runs. Tensors of 16 bits that a function only reads, as fp32, are converted.

    Args:
        is_needed: whether it is an error if one has no code.

    Raises:
        TypeError: it has no code for tensors of these dtypes.
        MemoryError: see `run_calls`.
    """
    codes = [_code_for(function, dtypes_of(tensors)) for function, tensors, _ in bound]
    if None in codes:
        if is_needed:
            function, tensors, _ = bound[codes.index(None)]
            raise TypeError(_no_code(function, tensors))
        return False
    for code, (function, tensors, constants) in zip(codes, bound, strict=True):
        if code is not None:
            _run(code, function, tensors, constants)
    return True


def run_function(
    function: Function, tensors: Sequence[Tensor | None], constants: Sequence[float] = ()
) -> None:
    """Run one compiled function on tensors of the dtypes that it reads.

    Args:
        tensors, constants: its arguments in this order; None for a tensor that is left out.

    Raises:
        TypeError: it has no code for tensors of these dtypes.
        MemoryError: see `run_calls`.
    """
    code = _code_for(function, dtypes_of(tensors))
    if code is None or code.widened:
        raise TypeError(_no_code(function, tensors))
    _run(code, function, tensors, constants)


def _run(
    code: _Code,
    function: Function,
    tensors: Sequence[Tensor | None],
    constants: Sequence[float],
) -> None:
    held: list[Tensor | None] = []
    extents: list[Extent] = []
    numbers: list[float] = []
    for i, given in enumerate(tensors):
        x = given
        if x is None:
            rows = columns = address = 0
        else:
            x = (x.float() if i in code.widened else x).contiguous()
            rows, columns = extent_of(x.shape)
            address = x.data_ptr()
        held.append(x)
        extents.append((rows, columns))
        numbers += (address, rows, columns)
    units, multiplications = function.work(extents, constants)
    arguments = function.pack(*numbers, *constants)
    cores = usable_cores() if multiplications >= _LEAST_SHARED_CALL else 1
    parts = parts_of(units, multiplications, cores)
    if parts > 1:
        row = np.frombuffer(_HEAD.pack(code.address, units, parts) + arguments, np.int64)
        add_gain(run_calls(row[None], cores, held=held))
    # with one part there is nothing to share
    elif code.run(arguments, 0, units):
        raise MemoryError(_NO_MEMORY)
    for i in function.written:
        result, copy = tensors[i], held[i]
        if result is not copy and result is not None and copy is not None:
            result.copy_(copy)


def _no_code(function: Function, tensors: Sequence[Tensor | None]) -> str:
    """Return that a function has no code for tensors of these dtypes."""
    pairs = zip(function.tensors, dtypes_of(tensors), strict=True)
    dtypes = ", ".join(f"{name} in {dtype}" for name, dtype in pairs if dtype is not None)
    return f"{function.name} has no code for {dtypes}"


def dtypes_of(tensors: Sequence[Any]) -> tuple[torch.dtype | None, ...]:
    """Return the dtype of each tensor, None for none."""
    return tuple([None if each is None else each.dtype for each in tensors])


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
    return kind(_address_of(name))


def _address_of(name: str) -> int:
    from varlen_kernels.cpu.calls.machine_code import address_of

    return address_of(name)


def run_op(
    name: str, operands: Sequence[Any], results: Sequence[Tensor], **attributes: Any
) -> None:
    """Write the results of an op by its compiled functions.

    Args:
        results: tensors that it writes.

    Raises:
        TypeError, MemoryError: see `run_functions`.
    """
    op = OPS[name]
    arguments = op.named(operands, attributes) | dict(zip(op.results, results, strict=True))
    run_functions(op.bound(arguments))
