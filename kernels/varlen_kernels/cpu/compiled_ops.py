"""Whether numba compiles ops on CPUs, and the lock while it does."""

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module

from varlen_kernels.cpu.compile_lock import compile_lock
from varlen_kernels.cpu.compiled_files import remove_damaged

_log = logging.getLogger(__name__)


@cache
def has_numba() -> bool:
    """Return whether numba compiles ops; without it they run in plain torch, which is slower.

    It loads in half a second, when the first op runs.
    """
    try:
        module = import_module("varlen_kernels.cpu.calls")
        with compile_lock(module.cache_folder()):
            remove_damaged(module.cache_folder())
            module.compile_calls()
    except Exception as error:
        # numba is absent or of another version, or no folder can hold compiled code
        _log.warning("ops on CPUs are not compiled, which makes them slower: %r", error)
        return False
    return True


def compiling() -> AbstractContextManager[None]:
    """Return the lock to hold while ops run for the first time, which compiles them."""
    if not has_numba():
        return nullcontext()
    from varlen_kernels.cpu.calls import cache_folder

    return compile_lock(cache_folder())
