"""Runs parts of a kernel's work at the same time, one on each core."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue

import torch

_thread = threading.local()


def usable_cores() -> int:
    """Return the number of cores that a kernel may use, called in this thread."""
    cores: int = getattr(_thread, "cores", 0) or torch.get_num_threads()
    return cores


@contextmanager
def using_cores(count: int) -> Iterator[None]:
    """Let kernels that this thread calls use this number of cores, whatever torch uses."""
    before = getattr(_thread, "cores", 0)
    _thread.cores = count
    try:
        yield
    finally:
        _thread.cores = before


def run_parts(function: Callable[..., None], bounds: Sequence[int], *arguments: object) -> None:
    """Call `function(first, last, *arguments)` for each pair of neighbouring bounds, at the same time.

    The calling thread takes part after part, and other threads help as soon as they get a core. So it waits only for
    parts that another thread has begun, never for a thread whose core is taken.

    Args:
        function: lets other threads run.
        bounds: bounds of the parts, at least two.
        arguments: further arguments of every call.
    """
    if len(bounds) == 2 and bounds[0] < bounds[1]:
        # most calls: there is nothing to share
        function(*bounds, *arguments)
        return
    parts = [part for part in pairwise(bounds) if part[0] < part[1]]
    work = _Work(lambda part: function(*part, *arguments), parts)
    for _ in parts[1:]:
        _help(work)
    work.finish()


class _Work:
    """Parts that threads take until none is left."""

    def __init__(
        self, run: Callable[[tuple[int, int]], None], parts: list[tuple[int, int]]
    ) -> None:
        self._run = run
        # taking one needs no lock
        self._left = deque(parts)
        self._count = len(parts)
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def take_parts(self) -> int:
        """Run parts until none is left; return how many."""
        taken = 0
        while True:
            try:
                part = self._left.popleft()
            except IndexError:
                return taken
            taken += 1
            error: BaseException | None = None
            try:
                self._run(part)
            except BaseException as caught:
                error = caught
            self._ended.put(error)
            del error

    def finish(self) -> None:
        """Run parts, then wait for those of other threads; raise their first error."""
        self.take_parts()
        # all of them write into memory of the caller
        errors = [self._ended.get() for _ in range(self._count)]
        for error in errors:
            if error is not None:
                raise error


_waiting: SimpleQueue[_Work] = SimpleQueue()
_helpers: list[threading.Thread] = []
# threads do not live on in a child
os.register_at_fork(after_in_child=_helpers.clear)


def _help(work: _Work) -> None:
    """Have another thread help with some work."""
    if len(_helpers) < usable_cores() - 1:
        _helpers.append(threading.Thread(target=_serve, name="varlen-kernels", daemon=True))
        _helpers[-1].start()
    _waiting.put(work)


# the mode is of a thread
@torch.inference_mode()
def _serve() -> None:
    while True:
        # no name here: it would keep the arrays of the last work until the next one comes
        _waiting.get().take_parts()
