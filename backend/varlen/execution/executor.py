"""Runs the engine's batches one after another, launched ahead of the device.

`start` launches a batch. The result of the first in flight is read in the engine's thread (`InlineExecutor`), or in one
of its own (`OverlappingExecutor`). `thread_executor` has batches that run at the same time.

`StepLauncher` launches steps of generation before the device has run the ones before them. A step whose tokens and
beams are chosen from its logits alone is launched as a whole, and the next one behind it: the device gives it the
tokens. Where the host takes part in the choice, for a grammar or log probabilities, the next step starts after that.
docs/decisions/0059-steps-ahead.md has the reasons.

A kernel that never ends cannot be stopped. Beyond a limit (`with_timeout`) the batches in flight fail as on a lost GPU;
docs/decisions/0037-hung-gpu.md.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeAlias, TypeVar, cast

from varlen.errors import AdapterFaultError, EngineError, ModelFaultError
from varlen.request.request import Float32Array
from varlen.scheduling.batch import Batch, BatchResult, Failure
from varlen.scheduling.device_plan import BeamStep, Chosen, DevicePlan, SampledToken
from varlen.scheduling.engine import Executor

if TYPE_CHECKING:
    from varlen.execution.token_state import Chooser

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Checks in the time limit. They count instead of a clock: the time in which the process was stopped does not.
CHECKS = 8


def outcome_of(call: Callable[[], _T]) -> Callable[[], _T]:
    """Call a function now; return one that returns its result, or raises its error."""
    try:
        result = call()
    except Exception as error:
        return raising(error)
    return lambda: result


def raising(error: BaseException) -> Callable[[], NoReturn]:
    """Return a function that raises an error."""

    def failed() -> NoReturn:
        raise error

    return failed


Completed: TypeAlias = Callable[[Batch, BatchResult], None]
Outputs: TypeAlias = Sequence[Float32Array] | Sequence[SampledToken | BeamStep]


class WorkerEndedError(Exception):
    """The worker process of a batch ended before it answered; says why, if known."""


class SkippedStepError(Exception):
    """The step before a step of generation, which it needs, has failed."""


class Launcher(Protocol):
    """Starts batches, which run one after another.

    Attributes:
        slots: batches that may be in flight.
    """

    slots: int

    def launch_batch(self, batch: Batch) -> Callable[[], Outputs]:
        """Start a batch and return a function that waits for its outputs, see `BatchResult`."""

    @property
    def wait(self) -> Callable[[float | None], bool] | None:
        """Waits until the first batch in flight has ended, or nothing is known of it.

        It gets the longest time in seconds, or None for no limit, and returns False after it. None if nothing is known
        of a batch before its outputs are asked for.
        """

    def check(self) -> None:
        """Run the smallest batch, after another one has failed; raise whatever it raises."""


class ModelExecutor(Executor, Protocol):
    """Runs the batches of one model."""

    def close(self) -> bool:
        """Run what was started and stop the threads; return whether the device is idle."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that was launched at this time, after idle seconds; `outputs` waits for them."""

    batch: Batch
    completed: Completed
    at: float
    idle: float
    outputs: Callable[[], Outputs]


class _LaunchingExecutor:
    """Launches batches early, which run one after another, and keeps their times."""

    def __init__(
        self,
        launcher: Launcher,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_pipeline: bool = False,
    ) -> None:
        """Start without a batch.

        Args:
            is_pipeline: whether a batch begins to run while those before it run in later stages.
        """
        self.slots = launcher.slots
        self._is_pipeline = is_pipeline
        self._launcher = launcher
        self._clock = clock
        # in the order in which they run; None ends the thread that waits for them
        self._launched: SimpleQueue[_Launched | None] = SimpleQueue()
        self._lock = Lock()
        # expected seconds of the batches in flight, and when the first of them began to run
        self._expected: deque[float] = deque()
        self._runs_since = 0.0

    def start(self, batch: Batch, completed: Completed) -> None:
        """Launch a batch; `completed` is called once with its result.

        The result says what the launch has raised, too.
        """
        began = self._clock()
        try:
            outputs = self._launcher.launch_batch(batch)
        except BaseException as error:
            outputs = raising(error)
        idle = 0.0
        with self._lock:
            if not self._expected:
                # the batch before may have ended while this one was packed
                idle = max(0.0, began - self._runs_since)
                self._runs_since = max(self._runs_since, began)
            self._expected.append(batch.seconds)
        self._launched.put(_Launched(batch, completed, began, idle, outputs))

    def free_at(self) -> float:
        if self._is_pipeline:
            return -math.inf
        with self._lock:
            return self._runs_since + sum(self._expected)

    def _complete(self, launched: _Launched) -> None:
        """Wait for the first batch in flight, and call `completed` with its result."""
        result = result_of(self._launcher.check, launched.batch, launched.outputs)
        now = self._clock()
        with self._lock:
            # the time since it was the only one to run, which teaches the scheduler what such a batch costs
            seconds = now - max(self._runs_since, launched.at)
            self._expected.popleft()
            self._runs_since = now
        result.seconds, result.idle = seconds, launched.idle
        launched.completed(launched.batch, result)


class InlineExecutor(_LaunchingExecutor):
    """Launches batches and waits for them in the engine's thread, so none wakes up.

    It is for batches that are short, since that thread does nothing else while it waits.
    """

    def collect(self, timeout: float | None) -> bool:
        if self._launched.empty():
            return False
        wait = self._launcher.wait
        if (wait is None or wait(timeout)) and (launched := self._launched.get()):
            self._complete(launched)
        return True

    def close(self) -> bool:
        return True


class OverlappingExecutor(_LaunchingExecutor):
    """Launches batches, and waits for them in a thread of its own."""

    def __init__(
        self,
        launcher: Launcher,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_pipeline: bool = False,
    ) -> None:
        super().__init__(launcher, clock, is_pipeline=is_pipeline)
        self._thread = Thread(target=self._loop, name="varlen-executor", daemon=True)
        self._thread.start()

    def collect(self, timeout: float | None) -> bool:  # noqa: ARG002  # of every executor
        return False

    def close(self) -> bool:
        self._launched.put(None)
        self._thread.join()
        return True

    def _loop(self) -> None:
        while (launched := self._launched.get()) is not None:
            self._complete(launched)
            # this frame must not keep a batch alive until the next one comes
            del launched


def result_of(check: Callable[[], None], batch: Batch, run: Callable[[], Outputs]) -> BatchResult:
    """Return the result of a batch. Never raises: tracebacks would keep its memory.

    Args:
        check: runs the smallest batch, if this one fails.
        run: returns its outputs; what it takes is the run time.
    """
    began = time.perf_counter()
    outputs: Outputs = []
    failure: Failure | None = None
    reason = adapter = ""
    try:
        outputs = run()
        if len(outputs) != batch.num_outputs:
            raise RuntimeError(f"{len(outputs)} outputs; {batch.num_outputs} were expected")
    except MemoryError:
        failure = "memory"
    except WorkerEndedError:
        failure = "worker"
    except SkippedStepError:
        failure = "skipped"
    except AdapterFaultError as error:
        failure, reason, adapter = "adapter", str(error), error.adapter
    except ModelFaultError as error:
        failure, reason = "model", str(error)
    except BaseException:
        _log.exception("a batch of %d sequences failed", len(batch.sequences))
        failure = "batch" if _still_runs(check) else "model"
    seconds = time.perf_counter() - began
    return BatchResult([] if failure else outputs, seconds, failure, reason, adapter)


def _still_runs(check: Callable[[], None]) -> bool:
    """Return whether the smallest batch runs after another one has failed."""
    try:
        check()
    except MemoryError:
        return True
    except BaseException:
        _log.exception("the smallest batch failed too; the model stops")
        return False
    return True


class StepOrder:
    """Which step failed last. Steps run in their order."""

    def __init__(self) -> None:
        self._failed: int | None = None

    def is_skipped(self, after: int | None) -> bool:
        """Return whether a step must not run that needs the step of this number."""
        return after is not None and after == self._failed

    @contextmanager
    def running(self, number: int, after: int | None) -> Iterator[None]:
        """Return the context in which a step runs.

        Args:
            number, after: see `Batch`.

        Raises:
            SkippedStepError: it must not run.
        """
        try:
            if self.is_skipped(after):
                raise SkippedStepError
            yield
        except BaseException:
            self._failed = number
            raise


_Packed = TypeVar("_Packed")


class StepDevice(Protocol[_Packed]):
    """What runs steps, in the order in which they start."""

    def pack(self, step: Batch, plan: DevicePlan) -> _Packed:
        """Return a step as the device takes it, with what the device chooses."""

    def may_queue(self, packed: _Packed) -> bool:
        """Return whether a step can start while another one runs, without waiting for it."""

    def start(self, step: Batch, packed: _Packed) -> Callable[[], Chosen]:
        """Start a step; return a function that waits for what the device chooses."""

    def choose(
        self, step: Batch, packed: _Packed, plan: DevicePlan, chosen: Chosen
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step, completed by the host.

        It is the step that was started last, unless steps in flight have different sequences.
        """


@dataclass(slots=True, eq=False)
class _LaunchedStep(Generic[_Packed]):
    """A step in flight.

    Attributes:
        is_started: whether it is on the device's queue, or never will be.
        chosen: waits for what the device chooses, once.
        error: reason why it could not be packed or started.
    """

    step: Batch
    packed: _Packed | None = None
    plan: DevicePlan = field(default_factory=DevicePlan)
    is_started: bool = False
    chosen: Callable[[], Chosen] | None = None
    error: BaseException | None = None


class StepLauncher(Generic[_Packed]):
    """Launches steps before the device has run the ones before them, see `_start_ahead`.

    Their outputs are asked for in order, in the thread that launches or another one.
    """

    def __init__(
        self, device: StepDevice[_Packed], chooser: Chooser, *, runs_apart: bool = False
    ) -> None:
        """Start without a step.

        Args:
            runs_apart: whether steps in flight have different sequences, so that none waits for what is chosen in
                another one, and the device keeps the logits of each.
        """
        self._device = device
        self._runs_apart = runs_apart
        self._chooser = chooser
        self._order = StepOrder()
        self._in_flight: deque[_LaunchedStep[_Packed]] = deque()
        self._lock = Lock()

    def launch(self, step: Batch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Plan and pack a step, and start it once it may.

        Returns a function that waits for its outputs; `Runner.launch_batch` says what it raises.
        """
        launched: _LaunchedStep[_Packed] = _LaunchedStep(step)
        try:
            launched.plan = self._chooser.plan(step)
            launched.packed = self._device.pack(step, launched.plan)
        except BaseException as error:
            launched.error = error
        with self._lock:
            self._in_flight.append(launched)
            self._start_ahead()
        return partial(self._outputs, launched)

    def _start_ahead(self) -> None:
        """Start steps in their order.

        The one after a step whose tokens the host has to choose starts when they are known.
        """
        for place, launched in enumerate(self._in_flight):
            if not launched.is_started and launched.error is None:
                packed = cast(_Packed, launched.packed)
                if place and not self._device.may_queue(packed):
                    return
                launched.is_started = True
                if not self._order.is_skipped(launched.step.after):
                    try:
                        launched.chosen = self._device.start(launched.step, packed)
                    except BaseException as error:
                        launched.error = error
            if not self._runs_apart and not (launched.plan.is_whole and launched.error is None):
                return

    def _outputs(self, launched: _LaunchedStep[_Packed]) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of the first step in flight; start steps that waited for it."""
        step, plan = launched.step, launched.plan
        try:
            # until then the device uses the inputs of a step that is skipped
            self.drain()
            with self._order.running(step.number, step.after):
                if launched.error is not None:
                    raise launched.error
                assert launched.chosen is not None
                waits, launched.chosen = launched.chosen, None
                chosen = waits()
                if not plan.is_whole:
                    return self._device.choose(step, cast(_Packed, launched.packed), plan, chosen)
                try:
                    return self._chooser.outputs(step, plan, chosen, None)
                except MemoryError:
                    # the next step may have run, so this one cannot run again, as one that lacks memory does
                    raise EngineError(
                        "the server had too little memory to read what a step chose"
                    ) from None
        finally:
            with self._lock:
                self._in_flight.popleft()
                # its frames hold the step
                launched.error = None
                self._start_ahead()

    @property
    def awaits_device(self) -> bool:
        """Whether the outputs of the first step in flight depend on the device."""
        return bool(self._in_flight) and self._is_awaited(self._in_flight[0])

    def _is_awaited(self, launched: _LaunchedStep[_Packed]) -> bool:
        return launched.chosen is not None and not self._order.is_skipped(launched.step.after)

    def drain(self) -> None:
        """Wait for steps that were started and do not count: one before them has failed."""
        waits = []
        with self._lock:
            for launched in self._in_flight:
                if launched.chosen is not None and not self._is_awaited(launched):
                    waits.append(launched.chosen)
                    launched.chosen = None
        for wait in waits:
            with suppress(Exception):
                wait()

    def settle(self) -> None:
        """Wait for all steps that were started, whose outputs are asked for later."""
        self.drain()
        with self._lock:
            started = [each for each in self._in_flight if each.chosen is not None]
        for launched in started:
            assert launched.chosen is not None
            launched.chosen = outcome_of(launched.chosen)


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
