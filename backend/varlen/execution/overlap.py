"""Runs batches on a GPU that gets each before it has run the last one.

The caller's thread packs a batch and starts it; a thread of the executor waits for the batches in their order and
delivers their outputs. So a GPU with work waits neither for a scheduler nor for packing, copies or answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from varlen.execution.executor import CheckedRunner, Completed, Outputs, result_of
from varlen.scheduling.sequence import Batch


class Launcher(CheckedRunner, Protocol):
    """Starts batches on a device that runs them one after another.

    Attributes:
        slots: batches that may be in flight.
    """

    slots: int

    def launch_batch(self, batch: Batch) -> Callable[[], Outputs]:
        """Start a batch and return a function that waits for its outputs."""


@dataclass(frozen=True, slots=True)
class _Started:
    """A batch in flight.

    Attributes:
        batch, completed: see `OverlappingExecutor.start`.
        at: start time.
        outputs: waits for them.
    """

    batch: Batch
    completed: Completed
    at: float
    outputs: Callable[[], Outputs]


class OverlappingExecutor:
    """Runs batches one after another, and starts each before the one before it has ended.

    Attributes:
        slots: batches that may be in flight.
    """

    def __init__(self, launcher: Launcher, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the thread.

        Args:
            launcher: starts the batches.
            clock: clock of the engine, in seconds.
        """
        self.slots = launcher.slots
        self._launcher = launcher
        self._clock = clock
        self._lock = Lock()
        # expected seconds of the batches in flight, and when the first of them began to run
        self._expected: deque[float] = deque()
        self._runs_since = 0.0
        self._queue: SimpleQueue[_Started | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name="varlen-executor", daemon=True)
        self._thread.start()

    def start(self, batch: Batch, completed: Completed) -> None:
        """Start a batch; this executor's thread calls `completed` once with the result."""
        began = self._clock()
        try:
            outputs = self._launcher.launch_batch(batch)
        except BaseException as error:
            outputs = partial(_raise, error)
        with self._lock:
            if not self._expected:
                # the batch before may have ended while this one was packed
                self._runs_since = max(self._runs_since, began)
            self._expected.append(batch.seconds)
        self._queue.put(_Started(batch, completed, began, outputs))

    def free_at(self) -> float:
        """Return when a batch that is started now is expected to run."""
        with self._lock:
            return self._runs_since + sum(self._expected)

    def close(self) -> bool:
        """Wait for what was started and stop the thread; return True."""
        self._queue.put(None)
        self._thread.join()
        return True

    def _loop(self) -> None:
        while (started := self._queue.get()) is not None:
            result = result_of(self._launcher, started.batch, started.outputs)
            now = self._clock()
            with self._lock:
                # the time since it was the only one to run, which teaches the scheduler what such a batch costs
                seconds = now - max(self._runs_since, started.at)
                self._expected.popleft()
                self._runs_since = now
            started.completed(started.batch, replace(result, seconds=seconds))
            # this frame must not keep a batch alive until the next one comes
            del started, result


def _raise(error: BaseException) -> Outputs:
    raise error
