"""The heap of this process: memory that is freed goes back to the system.

Requests of random sizes leave gaps in the heap of every thread.
"""

import ctypes

# mallopt's parameter: blocks from this size on are mapped, and returned to the system when freed.
_M_MMAP_THRESHOLD = -3
# By default it grows to 32 MiB, and blocks that requests of random sizes free stay in the heap of each thread.
_MAPPED_BYTES = 1 << 20

_C_LIBRARY = ctypes.CDLL(None)


def return_large_memory() -> None:
    """Have the C library return large freed blocks to the system at once."""
    mallopt = getattr(_C_LIBRARY, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim_heap() -> None:
    """Return free pages to the system, which takes a millisecond or two."""
    trim = getattr(_C_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)
