"""Runs the engine's batches: one in each thread, or one after another, launched ahead.

`ThreadExecutor` has a runner in each thread. `InlineExecutor` and `OverlappingExecutor` launch batches: `start`
launches one, and the result of the first in flight is read in the engine's thread or in one of their own.

`StepLauncher` launches steps of generation before the device has run the ones before them. A step whose tokens and
beams are chosen from its logits alone is launched as a whole, and the next one behind it: the device gives it the
tokens. Where the host takes part in the choice, for a grammar or log probabilities, it needs the tokens before, so the
next step starts after that. docs/decisions/0059-steps-ahead.md has the reasons.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from varlen.errors import EngineError, ModelFaultError
from varlen.execution.model_info import GraphUse, ModelInfo
from varlen.memory.memory_use import MemoryUse
from varlen.request.request import Float32Array
from varlen.scheduling.batch import Batch, BatchResult, Cores, Failure
from varlen.scheduling.device_plan import BeamStep, Chosen, DevicePlan, SampledToken
from varlen.scheduling.engine import Executor

if TYPE_CHECKING:
    from varlen.execution.token_state import Chooser

_T = TypeVar("_T")


def outcome_of(call: Callable[[], _T]) -> Callable[[], _T]:
    """Call a function now; return one that returns its result, or raises its error."""
    try:
        result = call()
    except Exception as error:
        return raising(error)
    return lambda: result


def raising(error: BaseException) -> Callable[[], NoReturn]:
    """Return a function that raises an error."""
    return partial(_raise, error)


def _raise(error: BaseException) -> NoReturn:
    raise error


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
        """Whether a batch may use all cores."""
        return bool(self.byte[0])

    def set_alone(self, alone: bool) -> None:
        """Say whether one batch runs alone."""
        self.byte[0] = alone and self.is_on

    def close(self) -> None:
        """Release the memory of this process once no thread reads it; once is enough."""
        if self._is_open:
            self._is_open = False
            # a thread that comes late may still read it
            del self.byte
            os.close(self.file)


_log = logging.getLogger(__name__)

Completed: TypeAlias = Callable[[Batch, BatchResult], None]
Outputs: TypeAlias = Sequence[Float32Array] | Sequence[SampledToken | BeamStep]


class WorkerEndedError(Exception):
    """The worker process of a batch ended before it answered; says why, if known."""


class SkippedStepError(Exception):
    """The step before a step of generation, which it needs, has failed."""


class CheckedRunner(Protocol):
    """Runs batches, and can be checked after one has failed."""

    def check(self) -> None:
        """Run the smallest batch; raise whatever it raises."""


class BatchRunner(CheckedRunner, Protocol):
    """Runs one batch at a time."""

    def run_batch(self, batch: Batch) -> Outputs:
        """Return the outputs of a batch, see `BatchResult`."""


class Launcher(CheckedRunner, Protocol):
    """Starts batches that run one after another.

    Attributes:
        slots: batches that may be in flight.
    """

    slots: int

    def launch_batch(self, batch: Batch) -> Callable[[], Outputs]:
        """Start a batch and return a function that waits for its outputs."""


class WaitingLauncher(Launcher, Protocol):
    """Starts batches, and tells whether the first one has ended."""

    @property
    def wait(self) -> Callable[[float | None], bool] | None:
        """Waits until the first batch in flight has ended, or nothing is known of it.

        It gets the longest time in seconds, or None for no limit, and returns False after it. None if nothing is known
        of a batch before its outputs are asked for.
        """


class StepModel(WaitingLauncher, Protocol):
    """A loaded model that generates.

    Attributes:
        graph_use: cost of its CUDA graphs.
    """

    graph_use: GraphUse

    @property
    def info(self) -> ModelInfo:
        """Model facts for the engine."""

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""

    def close(self) -> None:
        """Release memory and end processes. Nothing may run."""


class ModelExecutor(Executor, Protocol):
    """Runs the batches of one model."""

    def close(self) -> bool:
        """Run what was started and stop the threads; return whether the device is idle."""


@dataclass(slots=True, eq=False)
class _Started:
    """A batch in flight, and what it has used so far."""

    batch: Batch
    completed: Completed
    cores: Cores = "one"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that was launched.

    Attributes:
        batch, completed: see `Executor.start`.
        at: start time.
        outputs: waits for them.
    """

    batch: Batch
    completed: Completed
    at: float
    outputs: Callable[[], Outputs]


class _LaunchingExecutor:
    """Launches batches early, which run one after another, and keeps their times.

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
        """Start without a batch.

        Args:
            launcher: starts the batches.
            clock: clock of the engine, in seconds.
            is_pipeline: whether a batch begins to run while those before it run in later stages.
        """
        self.slots = launcher.slots
        self._is_pipeline = is_pipeline
        self._launcher = launcher
        self._clock = clock
        self._lock = Lock()
        # expected seconds of the batches in flight, and when the first of them began to run
        self._expected: deque[float] = deque()
        self._runs_since = 0.0

    def free_at(self) -> float:
        """Return when a batch that is started now is expected to run."""
        if self._is_pipeline:
            return -math.inf
        with self._lock:
            return self._runs_since + sum(self._expected)

    def _launch(self, batch: Batch, completed: Completed) -> _Launched:
        """Launch a batch; what it raises is raised by its outputs."""
        began = self._clock()
        try:
            outputs = self._launcher.launch_batch(batch)
        except BaseException as error:
            outputs = raising(error)
        with self._lock:
            if not self._expected:
                # the batch before may have ended while this one was packed
                self._runs_since = max(self._runs_since, began)
            self._expected.append(batch.seconds)
        return _Launched(batch, completed, began, outputs)

    def _complete(self, launched: _Launched) -> None:
        """Wait for the first batch in flight, and call `completed` with its result."""
        result = result_of(self._launcher, launched.batch, launched.outputs)
        now = self._clock()
        with self._lock:
            # the time since it was the only one to run, which teaches the scheduler what such a batch costs
            seconds = now - max(self._runs_since, launched.at)
            self._expected.popleft()
            self._runs_since = now
        launched.completed(launched.batch, replace(result, seconds=seconds))


class InlineExecutor(_LaunchingExecutor):
    """Launches batches and waits for them in the engine's thread, so none wakes up.

    It is for batches that are short, since that thread does nothing else while it waits.
    """

    _launcher: WaitingLauncher

    def __init__(
        self,
        launcher: WaitingLauncher,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_pipeline: bool = False,
    ) -> None:
        """Start without a batch; arguments as in `_LaunchingExecutor`."""
        super().__init__(launcher, clock, is_pipeline=is_pipeline)
        self._in_flight: deque[_Launched] = deque()

    def start(self, batch: Batch, completed: Completed) -> None:
        """Start a batch; `collect` calls `completed` with the result."""
        self._in_flight.append(self._launch(batch, completed))

    def collect(self, timeout: float | None) -> bool:
        """Complete the first batch in flight unless it takes longer; return False without one."""
        if not self._in_flight:
            return False
        wait = self._launcher.wait
        if wait is None or wait(timeout):
            self._complete(self._in_flight.popleft())
        return True

    def close(self) -> bool:
        """Return True: no batch runs."""
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
        """Start the thread; arguments as in `_LaunchingExecutor`."""
        super().__init__(launcher, clock, is_pipeline=is_pipeline)
        self._queue: SimpleQueue[_Launched | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name="varlen-executor", daemon=True)
        self._thread.start()

    def start(self, batch: Batch, completed: Completed) -> None:
        """Start a batch; this executor's thread calls `completed` once with the result."""
        self._queue.put(self._launch(batch, completed))

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
            self._complete(launched)
            # this frame must not keep a batch alive until the next one comes
            del launched


class ThreadExecutor:
    """Runs batches in threads of its own.

    Attributes:
        slots: batches that may be in flight: one thread and one runner each.
    """

    def __init__(
        self,
        runners: Sequence[BatchRunner],
        prepare: Callable[[], None] | None = None,
        share: CoreShare | None = None,
    ) -> None:
        """Start the threads.

        Args:
            runners: one per thread.
            prepare: each thread calls it first.
            share: tells the runners whether a batch runs alone.
        """
        self.slots = len(runners)
        self._prepare = prepare
        self._share = share
        self._in_flight: list[_Started] = []
        self._counting = Lock()
        self._queue: SimpleQueue[_Started | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._loop, args=(runner,), name=f"varlen-executor-{slot}", daemon=True)
            for slot, runner in enumerate(runners)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, batch: Batch, completed: Completed) -> None:
        """Start a batch. A thread of this executor calls `completed` once with the result."""
        work = _Started(batch, completed)
        with self._counting:
            for other in self._in_flight:
                other.cores = "both" if other.cores == "all" else other.cores
            self._in_flight.append(work)
            if self._share_cores():
                work.cores = "all"
        self._queue.put(work)

    def free_at(self) -> float:
        """Return minus infinity: where a slot is free, its runner is."""
        return -math.inf

    def collect(self, timeout: float | None) -> bool:  # noqa: ARG002  # of every executor
        """Return False: threads of this executor complete its batches."""
        return False

    def close(self) -> bool:
        """Run what was started and stop the threads; return True."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        return True

    def _loop(self, runner: BatchRunner) -> None:
        if self._prepare is not None:
            self._prepare()
        while (work := self._queue.get()) is not None:
            result = result_of(runner, work.batch, partial(runner.run_batch, work.batch))
            self._end(work)
            work.completed(work.batch, replace(result, cores=work.cores))
            # this frame must not keep a batch alive until the next one comes
            del work, result

    def _end(self, work: _Started) -> None:
        with self._counting:
            self._in_flight.remove(work)
            if self._share_cores():
                self._in_flight[0].cores = "both"

    def _share_cores(self) -> bool:
        """Tell the runners whether one batch is in flight; return whether it has all cores."""
        if self._share is None:
            return False
        self._share.set_alone(len(self._in_flight) == 1)
        return self._share.is_alone


def result_of(runner: CheckedRunner, batch: Batch, run: Callable[[], Outputs]) -> BatchResult:
    """Return the result of a batch. Never raises: tracebacks would keep its memory.

    Args:
        runner: runs the batch.
        batch: see above.
        run: returns the outputs of the batch; what it takes is the run time.
    """
    began = time.perf_counter()
    outputs: Outputs = []
    failure: Failure | None = None
    reason = ""
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
    except ModelFaultError as error:
        failure, reason = "model", str(error)
    except BaseException:
        _log.exception("a batch of %d sequences failed", len(batch.sequences))
        failure = "batch" if _still_runs(runner) else "model"
    seconds = time.perf_counter() - began
    return BatchResult([] if failure else outputs, seconds, failure, reason=reason)


def _still_runs(runner: CheckedRunner) -> bool:
    """Return whether the smallest batch runs after another one has failed."""
    try:
        runner.check()
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
        """Return a step as the device takes it.

        Args:
            step: the step.
            plan: the plan of the device.
        """

    def may_queue(self, packed: _Packed) -> bool:
        """Return whether a step can start while another one runs, without waiting for it."""

    def start(self, step: Batch, packed: _Packed) -> Callable[[], Chosen]:
        """Start a step; return a function that waits for what the device chooses.

        Args:
            step, packed: the step, and what `pack` has made of it.
        """

    def choose(
        self, step: Batch, packed: _Packed, plan: DevicePlan, chosen: Chosen
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step, completed by the host.

        It is the step that was started last, unless steps in flight have different sequences.

        Args:
            step, packed: the step, and what `pack` has made of it.
            plan, chosen: the plan of the device, and its choices.
        """


@dataclass(slots=True, eq=False)
class _LaunchedStep(Generic[_Packed]):
    """A step in flight.

    Attributes:
        step, packed: the step, as it is and as the device takes it.
        plan: the plan of the device.
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
    """Launches steps from one thread.

    Their outputs are asked for in order, in the same thread or another one.
    """

    def __init__(
        self, device: StepDevice[_Packed], chooser: Chooser, *, runs_apart: bool = False
    ) -> None:
        """Start without a step.

        Args:
            device: runs them.
            chooser: says what the device chooses.
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
        """Start a step; return a function that waits for its outputs.

        If the host has to choose the tokens before it, it starts after that. `Runner.launch_batch` says what the
        function raises.
        """
        launched = _LaunchedStep[_Packed](step)
        try:
            plan = self._chooser.plan(step)
            launched.packed = self._device.pack(step, plan)
            launched.plan = plan
        except BaseException as error:
            launched.error = error
        with self._lock:
            self._in_flight.append(launched)
            self._start_all()
        return partial(self._outputs, launched)

    @property
    def awaits_device(self) -> bool:
        """Whether the outputs of the first step in flight depend on the device."""
        if not self._in_flight:
            return False
        launched = self._in_flight[0]
        return launched.chosen is not None and not self._order.is_skipped(launched.step.after)

    def drain(self) -> None:
        """Wait for steps that were started and do not count: one before them has failed."""
        waits = []
        with self._lock:
            for launched in self._in_flight:
                if launched.chosen is not None and self._order.is_skipped(launched.step.after):
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

    def _outputs(self, launched: _LaunchedStep[_Packed]) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of the first step in flight."""
        step = launched.step
        try:
            # until then the device uses the inputs of a step that is skipped
            self.drain()
            with self._order.running(step.number, step.after):
                if launched.error is not None:
                    raise launched.error
                assert launched.chosen is not None
                waits, launched.chosen = launched.chosen, None
                plan, chosen = launched.plan, waits()
                if plan.is_whole:
                    return self._whole(step, plan, chosen)
                return self._device.choose(step, cast(_Packed, launched.packed), plan, chosen)
        finally:
            with self._lock:
                self._in_flight.popleft()
                # its frames hold the step
                launched.error = None
                self._start_all()

    def _whole(
        self, step: Batch, plan: DevicePlan, chosen: Chosen
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step that the device has chosen.

        Raises:
            EngineError: the host has too little memory for them. The next step may have run, so this one cannot run
                again, as one that runs out of memory does.
        """
        try:
            return self._chooser.outputs(step, plan, chosen, None)
        except MemoryError:
            raise EngineError(
                "the server had too little memory to read what a step chose"
            ) from None

    def _start_all(self) -> None:
        """Start the steps in flight, up to one that the next has to wait for."""
        for place, launched in enumerate(self._in_flight):
            if not launched.is_started and launched.error is None:
                packed = cast(_Packed, launched.packed)
                if place and not self._device.may_queue(packed):
                    return
                self._start(launched, packed)
            # the host chooses its tokens, which the next one takes, or it does not run
            if not self._runs_apart and not (launched.plan.is_whole and launched.error is None):
                return

    def _start(self, launched: _LaunchedStep[_Packed], packed: _Packed) -> None:
        """Start a step unless it must not run; an error is kept."""
        launched.is_started = True
        if self._order.is_skipped(launched.step.after):
            return
        try:
            launched.chosen = self._device.start(launched.step, packed)
        except BaseException as error:
            launched.error = error
