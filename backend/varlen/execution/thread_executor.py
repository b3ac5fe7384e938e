"""Runs batches in threads, each with a runner of its own.

A batch that runs alone may use the cores of all.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np

from varlen.execution.executor import Completed, Launcher, Outputs, raising, result_of
from varlen.scheduling.batch import Batch, Cores

# Once ops have taken this many seconds more than on one core, no op uses others for a pause; pauses become longer until
# ops have gained as much.
_MOST_SECONDS = 3e-3
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.25, 16.0


class CoreShare:
    """One byte that the executor writes and every worker reads.

    Attributes:
        file: descriptor of the memory, for another process.
        byte: `[1]`, 0 while a batch may use one core.
        is_on: whether `set_alone` has an effect; off while costs are measured, which are costs of one core.
    """

    def __init__(self, file: int | None = None) -> None:
        """Map the memory of a descriptor, which is then its own; without one, new memory."""
        self.file = os.memfd_create("varlen-cores") if file is None else file
        os.ftruncate(self.file, 1)
        self.byte = np.frombuffer(mmap.mmap(self.file, 1), np.uint8)
        self.is_on = False
        self._is_open = True

    @property
    def is_alone(self) -> bool:
        return bool(self.byte[0])

    def set_alone(self, alone: bool) -> None:
        self.byte[0] = alone and self.is_on

    def close(self) -> None:
        """Release the memory of this process once no thread reads it; once is enough."""
        if self._is_open:
            self._is_open = False
            # a thread that comes late may still read it
            del self.byte
            os.close(self.file)


class LoneCores:
    """How many cores a batch may use, now.

    Attributes:
        share: says whether a batch runs alone.
    """

    def __init__(self, share: CoreShare, cores: int) -> None:
        """Allow this number of cores while `share` says that a batch runs alone, else one."""
        self.share = share
        self._cores = cores
        self._gained = 0.0
        self._pause = _SHORTEST_PAUSE
        self._not_before = 0.0

    @property
    def count(self) -> int:
        is_paused = not self.share.byte[0] or time.monotonic() < self._not_before
        return 1 if is_paused else self._cores

    def add_gain(self, seconds: float) -> None:
        """Count seconds gained by other cores; after losses allow one core for a while."""
        self._gained = min(self._gained + seconds, _MOST_SECONDS)
        if self._gained == _MOST_SECONDS:
            self._pause = _SHORTEST_PAUSE
        elif self._gained < -_MOST_SECONDS:
            self._gained = 0.0
            self._not_before = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


@dataclass(slots=True, eq=False)
class _Started:
    """A batch in flight, and the cores that it has used.

    Attributes:
        slot: number of its thread and runner.
        at: time of its start, in seconds.
        outputs: function that waits for its outputs; None if its thread is to launch it.
    """

    batch: Batch
    completed: Completed
    slot: int
    at: float
    outputs: Callable[[], Outputs] | None = None
    cores: Cores = "one"


class ThreadExecutor:
    """Runs batches in threads of its own.

    Attributes:
        slots: batches that may be in flight: one thread and one runner each.
    """

    def __init__(
        self,
        runners: Sequence[Launcher],
        prepare: Callable[[], None] | None = None,
        share: CoreShare | None = None,
        *,
        starts_at_once: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            prepare: each thread calls it first.
            share: tells the runners whether a batch runs alone.
            starts_at_once: whether `launch_batch` of a runner returns before the batch has run, so that `start` calls
                it: a thread then wakes up while the batch runs.
        """
        self.slots = len(runners)
        self._runners, self._starts_at_once = runners, starts_at_once
        # the slot that was used last comes first
        self._free = [*range(self.slots)]
        self._prepare = prepare
        self._share = share
        self._in_flight: list[_Started] = []
        self._counting = Lock()
        self._queues: list[SimpleQueue[_Started | None]] = [SimpleQueue() for _ in runners]
        self._threads = [
            Thread(target=self._loop, args=each, name=f"varlen-executor-{slot}", daemon=True)
            for slot, each in enumerate(zip(runners, self._queues, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, batch: Batch, completed: Completed) -> None:
        with self._counting:
            work = _Started(batch, completed, self._free.pop(), time.perf_counter())
            for other in self._in_flight:
                other.cores = "both" if other.cores == "all" else other.cores
            self._in_flight.append(work)
            if self._share_cores():
                work.cores = "all"
        if self._starts_at_once:
            try:
                work.outputs = self._runners[work.slot].launch_batch(batch)
            except BaseException as error:
                work.outputs = raising(error)
        self._queues[work.slot].put(work)

    def free_at(self) -> float:
        """Return minus infinity: where a slot is free, its runner is."""
        return -math.inf

    def collect(self, timeout: float | None) -> bool:  # noqa: ARG002  # of every executor
        return False

    def close(self) -> bool:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()
        return True

    def _loop(self, runner: Launcher, queue: SimpleQueue[_Started | None]) -> None:
        if self._prepare is not None:
            self._prepare()
        while (work := queue.get()) is not None:
            run = work.outputs or partial(_run, runner, work.batch)
            result = result_of(runner.check, work.batch, run)
            result.seconds = time.perf_counter() - work.at
            self._end(work)
            result.cores = work.cores
            work.completed(work.batch, result)
            # this frame must not keep a batch alive until the next one comes
            del work, result, run

    def _end(self, work: _Started) -> None:
        with self._counting:
            self._in_flight.remove(work)
            self._free.append(work.slot)
            if self._share_cores():
                self._in_flight[0].cores = "both"

    def _share_cores(self) -> bool:
        """Tell the runners whether one batch is in flight; return whether it has all cores."""
        if self._share is None:
            return False
        self._share.set_alone(len(self._in_flight) == 1)
        return self._share.is_alone


def _run(runner: Launcher, batch: Batch) -> Outputs:
    return runner.launch_batch(batch)()
