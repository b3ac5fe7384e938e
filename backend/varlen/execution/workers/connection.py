"""The engine's connection to a worker process: batches there, answers back, and its memory use."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from varlen.config import EngineConfig
from varlen.errors import EngineError
from varlen.execution.executor import SkippedStepError, WorkerEndedError
from varlen.execution.workers.messages import Answers, receive_answers
from varlen.memory.memory_use import MemoryUse
from varlen.request.request import Float32Array

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HungAfter:
    """When a worker counts as hung: it takes longer than both.

    Attributes:
        seconds: seconds for a batch.
        factor: times what is expected.
    """

    seconds: float = 300.0
    factor: float = 20.0


# Ranks of a model wait for each other, so a lost one has to be noticed soon.
_RANK_SECONDS, _RANK_FACTOR = 2.0, 10.0
# Seconds that a stage waits beyond the time of the stages before it: the first that waits in vain reports.
_LATER_SECONDS = 0.5


def hung_after(config: EngineConfig) -> HungAfter:
    """Return when a worker of a model counts as hung."""
    if config.num_processes == 1:
        return HungAfter()
    # a process that waits notices which one is late; this limit is for the leader
    before = max(1, config.pipeline_parallel - 1)
    return HungAfter(longest_wait(config, before) + _RANK_SECONDS, _RANK_FACTOR)


def longest_wait(config: EngineConfig, before: int) -> float:
    """Return the seconds that a stage waits for a batch at most.

    All stages get a batch at once, so it waits for all stages before it.

    Args:
        config: the settings.
        before: number of these stages.
    """
    return before * (config.rank_timeout_seconds + _LATER_SECONDS)


class WorkerConnection:
    """A connection to one worker process at a time.

    Not for two threads at once, except for `use`.

    Attributes:
        pid: id of the process.
    """

    def __init__(self, connection: Connection, pid: int, hung_after: HungAfter) -> None:
        """Take a connection.

        Args:
            connection, pid: connection and id of the process.
            hung_after: the time after which it counts as hung.
        """
        self._hung_after = hung_after
        self._take(connection, pid)
        self._use = MemoryUse()
        # totals of the workers before it
        self._earlier = MemoryUse()

    def replace(self, connection: Connection, pid: int) -> None:
        """Connect to the worker that replaces one that has ended; totals go on."""
        self._earlier = self._use
        self._connection.close()
        self._take(connection, pid)

    def run(
        self, send: Callable[[Connection], None] | bytes, *, seconds: float = 0.0
    ) -> Sequence[Float32Array]:
        """Send a batch and return its answers; see `send` and `receive`."""
        self.send(send)
        return self.receive(seconds=seconds)

    def send(self, send: Callable[[Connection], None] | bytes) -> None:
        """Send a batch, whose answers `receive` returns.

        Args:
            send: sends the batch, or is its message.

        Raises:
            WorkerEndedError: the process has ended.
        """
        try:
            if isinstance(send, bytes):
                self._connection.send_bytes(send)
            else:
                send(self._connection)
        except OSError:
            # it may have answered batches before this one, which `receive` still returns
            raise WorkerEndedError from None
        except BaseException:
            # what was sent is no batch
            self._connection.close()
            raise

    def wait(self, timeout: float) -> bool:
        """Wait for the answers of a batch; return False after this many seconds."""
        try:
            return self._connection.poll(timeout)
        except OSError:
            # it has ended
            return True

    def receive(self, *, seconds: float = 0.0) -> Sequence[Float32Array]:
        """Return the answers of the batch that was sent.

        Args:
            seconds: expected run time.

        Raises:
            WorkerEndedError: the process has ended, or hung and was ended.
            MemoryError: the worker has too little memory.
            SkippedStepError: the step before failed.
            EngineError: the batch failed.
        """
        reason = ""
        try:
            limit = self._hung_after
            longest = max(limit.seconds, limit.factor * seconds)
            if not self._connection.poll(longest):
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
        return self._rows(answers)

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

    def use(self) -> MemoryUse:
        """Return the memory use after the last batch. From any thread."""
        return self._use

    def close(self) -> None:
        """End the worker."""
        self._connection.close()

    def _rows(self, answers: Answers) -> Sequence[Float32Array]:
        before, use = self._earlier, answers.use
        self._use = replace(
            use,
            plan_seconds=before.plan_seconds + use.plan_seconds,
            plan_hits=before.plan_hits + use.plan_hits,
            plan_misses=before.plan_misses + use.plan_misses,
        )
        if answers.problem == "memory":
            raise MemoryError("too little memory in a worker process")
        if answers.problem == "skipped":
            raise SkippedStepError
        if answers.problem:
            raise EngineError(f"a worker process failed:\n{answers.trace}")
        return answers.rows
