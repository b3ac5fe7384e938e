"""The ops of CPUs that run as compiled code."""

import logging
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from varlen_kernels.cpu.native.target_cpu import named_level
from varlen_kernels.op import Op

_log = logging.getLogger(__name__)


@cache
def has_compiled_ops() -> bool:
    """Return whether ops run as machine code; else plain torch runs them, more slowly.

    Code that is not stored is compiled when an op first needs it, which takes numba seconds.

    Raises:
        ValueError: the environment names a level of CPUs that does not exist.
    """
    named_level()
    try:
        from varlen_kernels.cpu.calls.calls import prepare

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
            if _runner()(op.bound(arguments), is_needed=not is_specified):
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
    """Return `out` as tensors, or new ones."""
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


@cache
def _runner() -> Callable[..., bool]:
    # where there is no LLVM it cannot be imported
    from varlen_kernels.cpu.calls.calls import run_functions

    return run_functions
