"""Memory that ran out, told apart from every other fault."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What torch's allocator for the host says; it has no exception of its own.
_HOST_ALLOCATOR = "DefaultCPUAllocator"


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError in place of whatever torch raises when it finds no memory, on any device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError("too little memory on the GPU") from error
    except RuntimeError as error:
        if _HOST_ALLOCATOR not in str(error):
            raise
        raise MemoryError("too little memory on the host") from error
