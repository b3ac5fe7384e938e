"""Calls of every launcher on CPU tensors, to be compiled for a GPU that is not here and not run.

What is listed here is what the compile tests hold to their limits and `inspect_kernels` prints.
Each file lists the calls of some ops as `CALLS`; `call.py` says what a call is.
"""

from importlib import import_module
from pkgutil import iter_modules

from varlen_bench.ops.call import Call as Call


def all_calls() -> list[Call]:
    """Return the calls that the files of this package list, in the order of the files' names."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return [call for module in modules for call in getattr(module, "CALLS", ())]
