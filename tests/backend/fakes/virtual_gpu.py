"""A GPU on a virtual clock, which runs everything as late as it may."""

import math
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Event, current_thread, main_thread

from tests.repeated_work import RepeatedWork

SECONDS = 10.0


@dataclass
class Op:
    """Work on the GPU, with the times of its begin and end."""

    begin: float
    end: float
    work: object
    is_end: bool


class VirtualGpu(RepeatedWork):
    """Stand-in for CUDA graphs that runs work at the end of its time.

    Attributes:
        ran: begin and end of everything that has run.
        faults: errors that coming batches raise: `(while, error)`, where `while` is "starting" or "running", or None.
        lost: the error that everything raises; None of a GPU that works.
        hung: whether what is started from now on never ends.
    """

    def __init__(self, clock, *, run_seconds=2e-3, copy_seconds=1e-4):
        super().__init__()
        self.clock = clock
        self.run_seconds = run_seconds
        self.copy_seconds = copy_seconds
        self.ran = []
        self.faults = deque()
        self.lost = None
        self.hung = False
        self._fault = None
        self._queue = deque()
        self._free_at = -math.inf

    def stream(self):
        return nullcontext()

    def capture(self, work):
        work()
        return lambda: self._replay(work)

    def copy(self, into, source):
        self._check()
        self._start(self.copy_seconds, lambda: into.copy_(source))

    def record(self):
        self._check()
        event, fault = Event(), self._fault
        self._fault = None
        self._start(0.0, event.set, is_end=True)

        def wait():
            if current_thread() is main_thread():
                # nothing else advances the clock
                while not event.is_set():
                    self.clock.now = max(self.clock.now, self._queue[0].end)
                    self.run_next()
            assert event.wait(SECONDS), "nothing runs this batch"
            self._check()
            if fault:
                raise fault

        return wait

    @property
    def ends(self):
        """When each batch that was started ends, in order."""
        return [op.end for op in self._queue if op.is_end]

    def run_until(self, now):
        """Run what ends by now."""
        while self._queue and self._queue[0].end <= now:
            self.run_next()

    def run_next(self):
        """Run the next piece of work; return whether there was any."""
        if not self._queue:
            return False
        op = self._queue.popleft()
        if not op.is_end:
            self.ran.append((op.begin, op.end))
        op.work()
        return True

    def _replay(self, work):
        when, error = self.faults.popleft() or ("", None) if self.faults else ("", None)
        if when == "starting":
            raise error
        if when == "running":
            self._fault = error
        self._start(self.run_seconds, work)

    def _start(self, seconds, work, is_end=False):
        begin = max(self.clock.now, self._free_at)
        self._free_at = math.inf if self.hung else begin + seconds
        self._queue.append(Op(begin, self._free_at, work, is_end))

    def _check(self):
        if self.lost is not None:
            raise self.lost
