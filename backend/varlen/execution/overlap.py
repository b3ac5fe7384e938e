"""Runs batches on a GPU that gets each before it has run the last one.

The caller's thread packs a batch and starts it; a thread of the executor waits for the batches in their order and
delivers their outputs. So a GPU with work waits neither for a scheduler nor for packing, copies or answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from varlen.execution.executor import Completed, Launched, Launcher, Turns
from varlen.scheduling.batch import Batch


class OverlappingExecutor:
    """Runs batches one after another, and starts each before the one before it has ended.

    Attributes:
        slots: batches that may be in flight.
    """

    def __init__(
        self,
        launcher: Launcher,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_pipeline: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            launcher: starts the batches.
            clock: clock of the engine, in seconds.
            is_pipeline: see `Turns`.
        """
        self.slots = launcher.slots
        self._turns = Turns(launcher, clock, is_pipeline=is_pipeline)
        self._queue: SimpleQueue[Launched | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name="varlen-executor", daemon=True)
        self._thread.start()

    def start(self, batch: Batch, completed: Completed) -> None:
        """Start a batch; this executor's thread calls `completed` once with the result."""
        self._queue.put(self._turns.launch(batch, completed))

    def free_at(self) -> float:
        """Return when a batch that is started now is expected to run."""
        return self._turns.free_at()

    def collect(self, timeout: float | None) -> bool:  # noqa: ARG002  # of every executor
        """Return False: the thread of this executor completes its batches."""
        return False

    def close(self) -> bool:
        """Wait for what was started and stop the thread; return True."""
        self._queue.put(None)
        self._thread.join()
        return True

    def _loop(self) -> None:
        while (launched := self._queue.get()) is not None:
            result = self._turns.finish(launched)
            launched.completed(launched.batch, result)
            # this frame must not keep a batch alive until the next one comes
            del launched, result
