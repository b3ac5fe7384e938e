"""The memory of this process, which goes back to the system after its use.

Requests of random sizes leave gaps in the heap of every thread.
"""

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path

# mallopt's parameter: blocks from this size on are mapped, and returned to the system when freed.
_M_MMAP_THRESHOLD = -3
# By default it grows to 32 MiB, and blocks that requests of random sizes free stay in the heap of each thread.
_MAPPED_BYTES = 1 << 20

# Permissions of private mappings that nothing can write to.
_READ = ("--p", "-xp")

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


def drop_library_pages() -> None:
    """Unmap pages of libraries that were only read, such as code that only loads run.

    What runs later maps its pages again, from the system's cache. A page that this process has changed stays. No other
    thread may load a library meanwhile: its data could lie where the system has shown code.
    """
    with suppress(OSError, AttributeError), Path("/proc/self/smaps").open() as lines:
        for line in lines:
            first, *rest = line.split()
            if "-" in first:
                place, permissions, is_library = first, rest[0], ".so" in rest[-1]
            elif (
                first == "Anonymous:" and rest[0] == "0" and is_library and permissions[1:] in _READ
            ):
                begin, end = (int(each, 16) for each in place.split("-"))
                pages = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
                _C_LIBRARY.madvise(*pages, mmap.MADV_DONTNEED)
