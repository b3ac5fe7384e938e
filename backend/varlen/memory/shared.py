"""Memory that processes share by a file descriptor.

It has no name, so nothing is left of it after its last process.
"""

import mmap
import os


def new_shared(num_bytes: int) -> int:
    """Return the file descriptor of new memory of zeros."""
    descriptor = os.memfd_create("varlen")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def map_shared(descriptor: int) -> mmap.mmap:
    """Return the memory of a file descriptor, which may be closed then."""
    return mmap.mmap(descriptor, 0)
