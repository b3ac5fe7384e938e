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
    is_specified = op.specification.__name__ == op.name

    @wraps(op.specification)
    def run(*operands: Any, out: Any = None, **attributes: Any) -> Any:
        arguments = op.named(operands, attributes)
        if has_compiled_ops() and op.runs_compiled(arguments):
            op.check_arguments(arguments, out)
            wanted = op.result(arguments) if op.result else ()
            results: Sequence[Tensor]
            if out is None:
                results = [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]
            else:
                results = out if isinstance(out, tuple) else [out][: len(wanted)]
            arguments.update(zip(op.results, results, strict=False))
            bound = op.bound(arguments)
            entries = [each.entry for each in bound]
            if not is_specified or None not in entries:
                from varlen_kernels.cpu.calls.calls import run_function

                for (function, tensors, constants), entry in zip(bound, entries, strict=True):
                    run_function(function, tensors, constants, entry)
                if op.result is None:
                    return None
                # without a result there is nothing to return but what it got
                return results[0] if len(results) == 1 else out or tuple(results) or operands[0]
        given = {} if out is None else {"out": out}
        return op.specification(*operands, **attributes, **given)

    return run
