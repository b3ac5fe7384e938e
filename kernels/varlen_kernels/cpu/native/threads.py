"""Runs parts of a kernel's work at the same time, one on each core.

A process that runs nothing but compiled code has no torch.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

# Columns of the table of functions that threads run: the address of a function, its number of units, the number of
# parts that threads take, and its arguments.
FUNCTION, UNITS, PARTS, ARGUMENTS = range(4)
# What it costs the caller to have another thread help, in seconds.
HELP_SECONDS = 1e-4


@dataclass(slots=True)
class Cores:
    """The cores that the kernels of a thread use.

    Attributes:
        gained: seconds that calls ended sooner than they would have on one core; negative where other work had a core.
    """

    count: int
    gained: float = 0.0


class _Thread(threading.local):
    cores: Cores | None = None


_thread = _Thread()


def usable_cores() -> int:
    """Return the number of cores that a kernel may use, called in this thread."""
    if _thread.cores is not None:
        return _thread.cores.count
    torch = _torch()
    return torch.get_num_threads() if torch else 1


@contextmanager
def using_cores(count: int) -> Iterator[Cores]:
    """Let kernels that this thread calls use this number of cores, whatever torch uses."""
    before, _thread.cores = _thread.cores, Cores(count)
    try:
        yield _thread.cores
    finally:
        _thread.cores = before


def run_parts(function: Callable[..., None], bounds: Sequence[int], *arguments: object) -> None:
    """Call `function(first, last, *arguments)` for each pair of neighbouring bounds, at the same time.

    The calling thread takes part after part, and other threads help as soon as they get a core. So it waits only for
    parts that another thread has begun, never for a thread whose core is taken.

    Args:
        function: lets other threads run.
        bounds: bounds of the parts, at least two.
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


def add_gain(seconds: float) -> None:
    """Count seconds that a call of this thread gained by other cores."""
    if _thread.cores is not None:
        _thread.cores.gained += seconds


def run_along(function: Callable[[], None], cores: int) -> None:
    """Call a function in this thread, and in others once they get a core.

    It returns when the call of this thread does: a call that begins later must find nothing left to do.

    Args:
        function: lets other threads run.
        cores: number of threads, at least one.
    """
    with using_cores(cores):
        for _ in range(cores - 1):
            _help(_Along(function))
    function()


@dataclass(frozen=True, slots=True)
class _Along:
    """A function that other threads call too."""

    take_parts: Callable[[], None]


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
        """Run parts, then wait for the parts of other threads; raise their first error."""
        began = time.perf_counter()
        taken = self.take_parts()
        own = time.perf_counter() - began
        # all of them write into memory of the caller
        errors = [self._ended.get() for _ in range(self._count)]
        if _thread.cores is not None and taken:
            alone = self._count / taken * own
            add_gain(alone - (time.perf_counter() - began) - HELP_SECONDS)
        for error in errors:
            if error is not None:
                raise error


_waiting: SimpleQueue[_Work | _Along] = SimpleQueue()
_helpers: list[threading.Thread] = []
# threads do not live on in a child
os.register_at_fork(after_in_child=_helpers.clear)


def _help(work: _Work | _Along) -> None:
    """Have another thread help with some work."""
    if len(_helpers) < usable_cores() - 1:
        thread = threading.Thread(target=_serve, name="varlen-kernels", daemon=True)
        thread.start()
        _helpers.append(thread)
    _waiting.put(work)


def _serve() -> None:
    torch = _torch()
    # the mode is of a thread
    with torch.inference_mode() if torch else nullcontext():
        # torch applies its number of threads to a thread that asks; oneDNN, which does not ask, takes all cores before
        usable_cores()
        while True:
            # no name here: it would keep the arrays of the last work until the next one comes
            _waiting.get().take_parts()


def _torch() -> Any:
    """Return torch if this process has imported it."""
    return sys.modules.get("torch")
