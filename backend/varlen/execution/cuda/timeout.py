"""A limit on the time in which a GPU has to end a batch.

A kernel that never ends cannot be stopped, and the thread that waits for it waits forever. So the batches in flight
fail as on a lost GPU, which stops the model. Only a fresh process can use the GPU again, which a reload starts.
docs/decisions/0037-hung-gpu.md has the reasons.
"""

import logging
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar, cast

from varlen.errors import ModelFaultError
from varlen.execution.executor import Completed, ModelExecutor
from varlen.scheduling.batch import Batch, BatchResult

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Checks in the time limit. They count instead of a clock: the time in which the process was stopped does not.
CHECKS = 8


def call_within(seconds: float, function: Callable[[], _T], *, compile_seconds: float = 0.0) -> _T:
    """Return the result of a function that waits for the device.

    Args:
        seconds: time limit; 0 is no limit.
        function: called in another thread, which waits on after the limit.
        compile_seconds: time that is allowed beside the limit, because the function compiles kernels first.

    Raises:
        ModelFaultError: the limit has passed.
    """
    if not seconds:
        return function()
    results: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def call() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=call, name="varlen-device-wait", daemon=True).start()
    try:
        result, error = results.get(timeout=seconds + compile_seconds)
    except Empty:
        compiling = f" and {compile_seconds:g} s to compile" if compile_seconds else ""
        raise ModelFaultError(
            f"the GPU has not ended its first work in {seconds:g} s (device_timeout_seconds){compiling}: it hangs"
        ) from None
    if error is not None:
        raise error
    return cast(_T, result)


def with_timeout(executor: ModelExecutor, seconds: float) -> ModelExecutor:
    """Return the executor with a time limit in seconds; 0 is no limit."""
    return TimedExecutor(executor, seconds) if seconds else executor


class TimedExecutor:
    """Fails the batches in flight if none of them ends in time."""

    def __init__(self, executor: ModelExecutor, seconds: float) -> None:
        """Start the thread that checks.

        Args:
            executor: runs the batches on one device.
            seconds: longest time between the ends of two successive batches.
        """
        self.slots = executor.slots
        self._executor = executor
        self._seconds = seconds
        self._lock = Lock()
        # what fails each batch in flight
        self._in_flight: dict[object, Callable[[], None]] = {}
        # checks since a batch ended, or since the first one was started
        self._checks = 0
        self._has_hung = False
        self._closed = Event()
        self._thread = Thread(target=self._loop, name="varlen-device-timeout", daemon=True)
        self._thread.start()

    def start(self, batch: Batch, completed: Completed) -> None:
        """Start a batch. `completed` is called once with the result, from any thread."""
        entry = object()
        fail = partial(completed, batch, BatchResult([], self._seconds, "model"))
        with self._lock:
            has_hung = self._has_hung
            if not has_hung:
                if not self._in_flight:
                    self._checks = 0
                self._in_flight[entry] = fail
        if has_hung:
            fail()
        else:
            self._executor.start(batch, partial(self._complete, entry, completed))

    def free_at(self) -> float:
        """Return when a batch that is started now is expected to run."""
        return self._executor.free_at()

    def collect(self, timeout: float | None) -> bool:
        """Return False: threads complete the batches."""
        return self._executor.collect(timeout)

    def close(self) -> bool:
        """Run what was started and stop the threads.

        Returns:
            Whether the device is idle. After a hang it is not: nothing may be released that its work uses.
        """
        self._closed.set()
        self._thread.join()
        # a thread of the other executor still waits
        return not self._has_hung and self._executor.close()

    def check(self) -> None:
        """Fail the batches in flight if none has ended since many calls.

        The thread of this executor calls it CHECKS times in the time limit.
        """
        with self._lock:
            if not self._in_flight:
                return
            self._checks += 1
            if self._checks <= CHECKS:
                return
            self._has_hung = True
            failing, self._in_flight = list(self._in_flight.values()), {}
        _log.error(
            "no batch has ended on the device for %g s (device_timeout_seconds); it has hung, and %d batches fail",
            self._seconds,
            len(failing),
        )
        for fail in failing:
            fail()

    def _complete(
        self, entry: object, completed: Completed, batch: Batch, result: BatchResult
    ) -> None:
        with self._lock:
            is_open = self._in_flight.pop(entry, None) is not None
            self._checks = 0
        if is_open:
            completed(batch, result)

    def _loop(self) -> None:
        while not self._has_hung and not self._closed.wait(self._seconds / CHECKS):
            self.check()
