"""Ops on tensors by their compiled functions, or by their specification where nothing is compiled."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, wraps
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from varlen_kernels.cpu.calls.run_calls import (
    NO_MEMORY,
    extent_of,
    has_compiled_ops,
    loaded_address,
    parts_of,
    run_calls,
)
from varlen_kernels.cpu.native.threads import ARGUMENTS, add_gain, usable_cores
from varlen_kernels.op import Bound, Extent, Function, Op
from varlen_kernels.op_table import OPS

# Multiplications of a function that runs by itself, below which threads do not share it: another one must wake for it.
_LEAST_SHARED_CALL = 1 << 22
# The columns of a table before the arguments of a function.
_HEAD = Struct("q" * ARGUMENTS)


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
                shown = tuple(results[: len(results) - op.scratch])
                return shown[0] if len(shown) == 1 else out or shown
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
    given = [out][: len(wanted)] if out is not None else []
    # torch makes a tensor like another one in a third of the time
    like = operands[0] if operands else None
    made = (
        torch.empty_like(like)
        if isinstance(like, Tensor) and like.dtype == dtype and like.shape == shape
        else torch.empty(shape, dtype=dtype)
        for shape, dtype in wanted[len(given) :]
    )
    return [*given, *made]


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
    address = loaded_address(entry)
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
        raise MemoryError(NO_MEMORY)
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
