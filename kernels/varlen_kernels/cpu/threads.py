"""Runs a compiled function on parts of its work, one part per core."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise

import torch


def run_parts(function: Callable[..., None], bounds: Sequence[int], *arguments: object) -> None:
    """Call `function(first, last, *arguments)` for each pair of neighbouring bounds, at the same time.

    Args:
        function: lets other threads run.
        bounds: bounds of the parts, at least two; the calling thread takes the first part.
        arguments: further arguments of every call.
    """
    if len(bounds) == 2 and bounds[0] < bounds[1]:
        # most calls: there is nothing to share
        function(*bounds, *arguments)
        return
    parts = [part for part in pairwise(bounds) if part[0] < part[1]]
    running = [_threads().submit(function, *part, *arguments) for part in parts[1:]]
    if not parts:
        return
    try:
        function(*parts[0], *arguments)
    finally:
        # they write into memory of the caller
        if running:
            wait(running)
    for each in running:
        each.result()


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    """Return the threads that help the caller's; they live as long as the process."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "varlen-kernels")
