"""Whether ops on CPUs run as compiled code."""

import logging
from functools import cache
from importlib import import_module

from varlen_kernels.cpu.native.target_cpu import named_level

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
        import_module("varlen_kernels.cpu.calls.calls").prepare()
    except Exception as error:
        # LLVM or numba is absent or of another version, or no folder can hold compiled code
        _log.warning("ops on CPUs are not compiled, which makes them slower: %r", error)
        return False
    return True
