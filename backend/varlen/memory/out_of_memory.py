"""Converts errors of torch about too little memory to MemoryError."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Messages of torch's host allocator and of oneDNN; neither has an exception of its own.
_ON_THE_HOST = ("DefaultCPUAllocator", "could not create a primitive")
# Message of the driver, which allocates graphs and pinned memory without torch's allocator.
_ON_THE_GPU = "CUDA error: out of memory"


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError instead of torch's errors about too little memory, on any device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError("too little memory on the GPU") from error
    except RuntimeError as error:
        if _ON_THE_GPU in str(error):
            raise MemoryError("too little memory on the GPU") from error
        if not any(said in str(error) for said in _ON_THE_HOST):
            raise
        raise MemoryError("too little memory on the host") from error
