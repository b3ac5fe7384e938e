"""The workers of a model: on a GPU one, on a CPU one per core.

Each runs whole batches, so cores never wait for each other; a batch that runs alone uses all of them. A GPU has the
next batch before it has run the last one. docs/decisions/0025-workers.md and 0029-gpu-executor.md have the reasons.

A process contains faults: a worker that crashes costs one retry of its batch. Where it has keys and values, the
scheduler computes its sequences again.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from threading import Lock
from typing import Protocol

from varlen.config import Device, EngineConfig
from varlen.errors import AdapterFaultError, EngineError
from varlen.execution.executor import (
    Launcher,
    ModelExecutor,
    OverlappingExecutor,
    SkippedStepError,
    WorkerEndedError,
    raising,
    with_timeout,
)
from varlen.execution.model_info import GraphUse, ModelInfo
from varlen.execution.thread_executor import CoreShare, ThreadExecutor
from varlen.execution.workers.messages import Array, batch_message, receive_answers
from varlen.execution.workers.process import ENDED, ModelProcess, excludes_gpu, longest_wait
from varlen.memory.memory_use import AdapterUse, MemoryUse
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import DEFAULT_OPTIONS, SHORTEST_PROMPT
from varlen.scheduling.batch import Batch
from varlen.telemetry.metrics import CountedMetric, Stats

_log = logging.getLogger(__name__)

# A batch that has ended two workers is likely to end the next one too.
_ATTEMPTS = 2
# Bytes that a socket takes even if the worker reads nothing: the engine's thread sends no more.
_MOST_AT_ONCE = 1 << 17
# Ranks of a model wait for each other, so a lost one has to be noticed soon.
_RANK_SECONDS, _RANK_FACTOR = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class HungAfter:
    """When a worker counts as hung: it takes longer than both.

    Attributes:
        seconds: seconds for a batch.
        factor: times what is expected.
    """

    seconds: float = 300.0
    factor: float = 20.0


def hung_after(config: EngineConfig) -> HungAfter:
    """Return when a worker of a model counts as hung."""
    if config.num_processes == 1:
        return HungAfter()
    # a process that waits notices which one is late; this limit is for the leader
    before = max(1, config.pipeline_parallel - 1)
    return HungAfter(longest_wait(config, before) + _RANK_SECONDS, _RANK_FACTOR)


class WorkerConnection:
    """A connection to one worker process at a time.

    Not for two threads at once, except for `use`.
    """

    def __init__(
        self, connection: Connection, pid: int, hung_after: HungAfter, num_adapters: int = 0
    ) -> None:
        """Take a connection to a worker of a model with `num_adapters` adapters."""
        self._hung_after, self.adapters = hung_after, AdapterUse(num_adapters)
        self._take(connection, pid)
        # totals of the workers before it, and what it said last
        self._uses = MemoryUse(), MemoryUse()

    def replace(self, connection: Connection, pid: int) -> None:
        """Connect to the worker that replaces one that has ended; totals go on."""
        self._uses = self.use(), MemoryUse()
        self.adapters.forget()
        self._connection.close()
        self._take(connection, pid)

    def send(self, message: bytes) -> None:
        """Send work, whose answers `receive` returns.

        Raises:
            WorkerEndedError: the process has ended.
        """
        try:
            self._connection.send_bytes(message)
        except OSError:
            # it may have answered work before this, which `receive` still returns
            raise WorkerEndedError from None
        except BaseException:
            # a part of the message may have been sent
            self._connection.close()
            raise

    def wait(self, timeout: float | None) -> bool:
        """Wait for the next answers; return False after this many seconds."""
        try:
            return self._connection.poll(timeout)
        except OSError:
            # it has ended
            return True

    def receive(self, *, seconds: float = 0.0) -> Sequence[Array]:
        """Return the answers to the first work that was sent.

        Raises:
            WorkerEndedError: the process has ended, or hung and was ended.
            MemoryError: the worker has too little memory.
            SkippedStepError: the step before failed.
            AdapterFaultError: an adapter of the work cannot be read.
            EngineError: the work failed.
        """
        reason = ""
        try:
            limit = self._hung_after
            longest = max(limit.seconds, limit.factor * seconds)
            # reads wait for the limit's seconds
            if longest > limit.seconds and not self._connection.poll(longest):
                reason = self._end_hung(longest)
            answers = receive_answers(self._connection)
        except BlockingIOError:
            # it hangs in the midst of an answer
            reason = self._end_hung(limit.seconds)
            self._connection.close()
            raise WorkerEndedError(reason) from None
        except (EOFError, OSError):
            self._connection.close()
            raise WorkerEndedError(reason) from None
        except BaseException:
            # an answer that was not read would be taken for the answer of the next batch
            self._connection.close()
            raise
        self._uses = self._uses[0], answers.use
        if answers.swaps:
            self.adapters.record(answers.swaps)
        if answers.problem == "memory":
            raise MemoryError("too little memory in a worker process")
        if answers.problem == "skipped":
            raise SkippedStepError
        if answers.problem == "adapter":
            raise AdapterFaultError(answers.adapter, answers.trace)
        if answers.problem:
            raise EngineError(f"a worker process failed:\n{answers.trace}")
        return answers.rows

    def use(self) -> MemoryUse:
        """Return the memory use after the last work. From any thread."""
        before, use = self._uses
        return replace(
            use,
            plan_seconds=before.plan_seconds + use.plan_seconds,
            plan_hits=before.plan_hits + use.plan_hits,
            plan_misses=before.plan_misses + use.plan_misses,
        )

    def close(self) -> None:
        self._connection.close()

    def _take(self, connection: Connection, pid: int) -> None:
        """Take the connection of a worker, and let no read of it wait for ever."""
        self._connection, self.pid = connection, pid
        seconds = struct.pack("ll", math.ceil(self._hung_after.seconds), 0)
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)

    def _end_hung(self, seconds: float) -> str:
        """End the process, which did not answer within this time; return why."""
        reason = f"worker process {self.pid} did not answer within {seconds:.0f} s"
        _log.error("%s; it is ended", reason)
        os.kill(self.pid, signal.SIGKILL)
        return reason


@dataclass(slots=True, eq=False)
class _Sent:
    """Work in flight.

    Attributes:
        attempts: workers that have ended while it was the first in flight.
        answer: returns its answers, or raises; None until they are known.
    """

    message: bytes
    seconds: float
    is_sent: bool = False
    attempts: int = 0
    answer: Callable[[], Sequence[Array]] | None = None


class WorkerProcess:
    """Runs batches or steps in one worker process at a time.

    The last stage of a pipeline takes the next batch before it has run the first. One thread may launch work, and
    another one ask for its answers.

    Attributes:
        descriptors: file descriptors that the worker shares.
    """

    def __init__(
        self,
        host: ModelProcess,
        restarted: Callable[[], None],
        slots: int = 1,
        *,
        has_state: bool = False,
    ) -> None:
        """Start the worker.

        Args:
            restarted: called after the worker ended and another one has started.
            has_state: whether work needs what work before it has left in the worker. Then all work in flight fails with
                WorkerEndedError when it ends; other work runs again in the next worker.
        """
        self._host = host
        self._restarted = restarted
        self._has_state = has_state
        self.slots = slots
        connection, pid, self.descriptors = host.connect()
        self._worker = WorkerConnection(
            connection, pid, hung_after(host.config), len(host.info.adapters)
        )
        self._in_flight: deque[_Sent] = deque()
        self._sending = Lock()

    @property
    def pid(self) -> int:
        return self._worker.pid

    def launch_batch(self, batch: Batch) -> Callable[[], Sequence[Array]]:
        return self.launch(batch_message(batch.prompts, batch.options), seconds=batch.seconds)

    def launch(self, message: bytes, *, seconds: float = 0.0) -> Callable[[], Sequence[Array]]:
        """Send work; return a function that waits for its answers.

        The function sends a large message, and raises:
            MemoryError: the worker has too little memory.
            SkippedStepError, WorkerEndedError: a step before it failed, or was lost with the worker.
            EngineError: the work failed, or ended two workers.

        Args:
            seconds: expected run time.
        """
        sent = _Sent(message, seconds)
        with self._sending:
            # after a worker has ended, each batch runs alone until none is left that may have ended it
            if len(message) <= _MOST_AT_ONCE and all(each.is_sent for each in self._in_flight):
                self._send(sent)
            self._in_flight.append(sent)
        return partial(self._answers, sent)

    def wait(self, timeout: float | None) -> bool:
        return self._worker.wait(timeout)

    def _answers(self, sent: _Sent) -> Sequence[Array]:
        """Return the answers to some work, after the answers to work before it."""
        in_flight = self._in_flight
        while sent.answer is None:
            self._answer(in_flight[0])
            with self._sending:
                while in_flight and in_flight[0].answer is not None:
                    in_flight.popleft()
        return sent.answer()

    def _answer(self, first: _Sent) -> None:
        """Wait for the first work in flight, which may have to run again."""
        try:
            with self._sending:
                if not first.is_sent:
                    self._send(first)
            rows = self._worker.receive(seconds=first.seconds)
        except WorkerEndedError as error:
            self._start_next(first, error)
        except Exception as error:
            first.answer = raising(error)
        else:
            first.answer = lambda: rows

    def _start_next(self, first: _Sent, ended: WorkerEndedError) -> None:
        """Start the next worker, which has no work yet; see `_answer`."""
        first.attempts += 1
        with self._sending:
            for each in self._in_flight:
                each.is_sent = False
                if self._has_state:
                    each.answer = raising(ended)
        try:
            connection, pid, self.descriptors = self._host.connect(self.pid, str(ended))
            self._worker.replace(connection, pid)
            self._restarted()
        except Exception as error:
            # a worker that is not set up runs nothing: the next work starts another one
            self._worker.close()
            first.answer = raising(error)
            return
        if first.attempts == _ATTEMPTS:
            lost = f"{_ATTEMPTS} worker processes ended while they ran this batch"
            first.answer = raising(EngineError(lost))

    def _send(self, sent: _Sent) -> None:
        """Send work; whether the worker has ended, `_answer` finds out."""
        with suppress(WorkerEndedError):
            self._worker.send(sent.message)
        sent.is_sent = True

    def check(self) -> None:
        self.launch(batch_message([SHORTEST_PROMPT], [DEFAULT_OPTIONS]))()

    def check_state(self) -> None:
        """Run nothing, with all in flight answered; raise whatever it raises.

        Nothing is raised if the worker has ended and another one may be started, which the next work does.

        Raises:
            EngineError: no other one can be started.
        """
        if self._host.is_lost:
            raise EngineError(ENDED)
        try:
            self._worker.send(b"")
            self._worker.receive()
        except WorkerEndedError:
            _log.warning("worker process %d has ended; the next step starts another one", self.pid)

    def use(self) -> MemoryUse:
        return self._worker.use()

    @property
    def adapter_uses(self) -> Sequence[AdapterUse]:
        return (self._worker.adapters,)

    def close(self) -> None:
        self._worker.close()


class Worker(Launcher, Protocol):
    """A runner whose memory use can be read."""

    @property
    def adapter_uses(self) -> Sequence[AdapterUse]:
        """Adapters in memory, if they are counted."""

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""

    def close(self) -> None:
        """Release what it holds."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of one model.

    Attributes:
        prepare: function to be called first by each thread that uses one.
        host: the process that starts them, if they are processes.
        launcher: the only worker, if it starts a batch while another one runs: a GPU, or the stages of a pipeline.
        device_timeout: longest time of a batch of the launcher, in seconds; 0 is no limit.
        share: tells the workers of a CPU whether their batch runs alone.
    """

    info: ModelInfo
    runners: Sequence[Worker]
    prepare: Callable[[], None] | None = None
    host: ModelProcess | None = None
    launcher: Launcher | None = None
    graphs: GraphUse = field(default_factory=GraphUse)
    device_timeout: float = 0.0
    share: CoreShare | None = None

    def new_executor(self) -> ModelExecutor:
        """Return an executor of these workers; it has started its threads."""
        if self.launcher is not None:
            executor = OverlappingExecutor(self.launcher, is_pipeline=self.host is not None)
            return with_timeout(executor, self.device_timeout)
        are_processes = self.host is not None
        return ThreadExecutor(self.runners, self.prepare, self.share, starts_at_once=are_processes)

    def use_all_cores(self) -> None:
        """Let a batch that runs alone use the cores of all workers from now on.

        With one worker every batch has all cores, and its time is what costs are.
        """
        if self.share is not None and len(self.runners) > 1:
            self.share.is_on = True

    def use(self) -> MemoryUse:
        return MemoryUse.total(each.use() for each in self.runners)

    @property
    def adapter_uses(self) -> Sequence[AdapterUse]:
        return [use for each in self.runners for use in each.adapter_uses]

    def close(self) -> None:
        """Release memory and end processes. Nothing may run."""
        for runner in self.runners:
            runner.close()
        if self.host is not None:
            # and the share with it
            self.host.close()
        elif self.share is not None:
            self.share.close()


def load_workers(
    checkpoint: Checkpoint, config: EngineConfig, stats: Stats, *, gpu: int, isolated: bool
) -> Workers:
    """Return the workers of a model.

    Args:
        stats: counts workers that had to be started again.
        isolated: whether workers on a CPU are processes instead of threads.

    Raises:
        CheckpointError: the checkpoint is incomplete or of a kind that is not served.
        ConfigError: a setting does not fit the checkpoint.
    """
    if isolated and excludes_gpu(config.device):
        return _processes(checkpoint, config, stats)
    # imports torch, which an engine of processes does not need
    from varlen.execution.device import check_ranks, choose_device, usable_cores, use_one_core
    from varlen.execution.runner import Runner
    from varlen.execution.warm_up import check_numbers

    device = choose_device(config.device, gpu)
    check_ranks(config, device, isolated=isolated)
    if device.type == "cuda" and config.num_processes == 1:
        runner = Runner(checkpoint, config, gpu=gpu)
        check_numbers(runner, config.device_timeout_seconds)
        return Workers(
            runner.info,
            [runner],
            launcher=runner,
            graphs=runner.graph_use,
            device_timeout=config.device_timeout_seconds,
        )
    if isolated:
        return _processes(checkpoint, config, stats, "cpu" if device.type == "cpu" else "cuda", gpu)
    count = config.threads or usable_cores()
    runner = Runner(checkpoint, config, workers=count, measures=True)
    runners, share = [runner, *(runner.another() for _ in range(count - 1))], CoreShare()
    for each in runners:
        each.share_cores(share)
    return Workers(runner.info, runners, use_one_core, share=share)


def _processes(
    checkpoint: Checkpoint, config: EngineConfig, stats: Stats, device: Device = "cpu", gpu: int = 0
) -> Workers:
    config = replace(config, device=device)
    host = ModelProcess(checkpoint.folder, config, generates=False, gpu=gpu)

    def count_restart() -> None:
        stats.count(CountedMetric.WORKER_RESTARTS)

    runners: list[WorkerProcess] = []
    workers = Workers(host.info, runners, host=host, share=host.share)
    try:
        stages = config.pipeline_parallel
        runners += (WorkerProcess(host, count_restart, stages) for _ in range(host.info.workers))
    except BaseException:
        workers.close()
        raise
    # its stages run as many batches at the same time
    return replace(workers, launcher=runners[0]) if stages > 1 else workers
