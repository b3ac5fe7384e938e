"""Workers of a CPU model in processes of their own, of one core each.

A process contains faults: a worker that is killed, or crashes, costs one retry of its batch.
"""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

from varlen import errors
from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import EngineError, VarlenError
from varlen.execution.model_info import ModelInfo, WorkerUse
from varlen.execution.worker_host import MAX_MESSAGE
from varlen.execution.worker_messages import Answers, receive_answers, send_batch
from varlen.request import (
    DEFAULT_OPTIONS,
    SHORTEST_PROMPT,
    Float32Array,
    Prompt,
    RequestOptions,
)
from varlen.sequence import Batch

_log = logging.getLogger(__name__)

_HOST = "varlen.execution.worker_host"
# A batch that has ended two workers is likely to end the next one too.
_ATTEMPTS = 2
# Seconds for the workers to finish a batch, and then to end.
_END_SECONDS = 10.0


class WorkerHost:
    """The process that loads a model and forks its workers. Any thread may call `fork`.

    Attributes:
        info: what the engine knows of the model.
    """

    info: ModelInfo

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        """Start the process and load the model.

        Raises:
            CheckpointError, ConfigError: see `Runner`.
            EngineError: the process failed.
        """
        self._setup = {
            "folder": str(folder),
            "config": asdict(config),
            "log_level": config.log_level.upper(),
        }
        self._lock = Lock()
        self._load()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def fork(self, ended: int | None = None) -> tuple[Connection, int]:
        """Return the connection and the process id of a new worker.

        Args:
            ended: process id of the worker that it replaces.

        Raises:
            EngineError: the host ended and cannot be started again.
        """
        with self._lock:
            try:
                return self._fork(ended)
            except (EOFError, OSError):
                _log.warning("the process that starts workers has ended; it loads the model again")
                self._end()
                self._load()
                return self._fork(None)

    def close(self) -> None:
        """End the process, once the workers' connections are closed."""
        with self._lock:
            self._end()

    def _load(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _HOST, str(theirs.fileno())],
                # a signal for the server's group is not for workers: they end with their connections
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            self._control.send(json.dumps(self._setup).encode())
            model = self._receive()["model"]
        except (EOFError, OSError):
            self._end()
            raise EngineError(
                "the process that loads the model ended; the server's log says why"
            ) from None
        except VarlenError:
            self._end()
            raise
        self.info = ModelInfo(**model)

    def _fork(self, ended: int | None) -> tuple[Connection, int]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            order = json.dumps({"ended": ended}).encode()
            socket.send_fds(self._control, [order], [theirs.fileno()])
            answer = self._receive()
            if ended is not None:
                _log.warning(
                    "worker process %d ended with code %d while it ran a batch; %d replaces it",
                    ended,
                    answer["code"],
                    answer["pid"],
                )
            return Connection(ours.detach()), answer["pid"]

    def _receive(self) -> dict[str, Any]:
        """Return the next message that is not a log line.

        Raises:
            EOFError, OSError: the process has ended.
            VarlenError: it could not load the model.
        """
        while data := self._control.recv(MAX_MESSAGE):
            message: dict[str, Any] = json.loads(data)
            if "log" in message:
                _log.log(*message["log"])
            elif "error" in message:
                name, text = message["error"]
                raise getattr(errors, name)(text)
            else:
                return message
        raise EOFError

    def _end(self) -> None:
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class WorkerProcess:
    """Runs batches in one worker process at a time. Not for two threads at once.

    Attributes:
        pid: id of the process.
    """

    def __init__(self, host: WorkerHost, restarted: Callable[[], None]) -> None:
        """Start the worker.

        Args:
            host: of the model.
            restarted: called after the worker ended and another one has started.
        """
        self._host = host
        self._restarted = restarted
        self._use = WorkerUse()
        # totals of the workers before it
        self._earlier = WorkerUse()
        self._connection, self.pid = host.fork()

    def run_batch(self, batch: Batch) -> Sequence[Float32Array]:
        """Return the answer of each sequence of a batch; see `Runner.run`."""
        sequences = batch.sequences
        return self.run([each.prompt for each in sequences], [each.options for each in sequences])

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> Sequence[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`.

        Raises:
            MemoryError: the worker has too little memory.
            EngineError: the batch failed, or ended two workers.
        """
        for _ in range(_ATTEMPTS):
            try:
                send_batch(self._connection, prompts, options)
                answers = receive_answers(self._connection)
            except (EOFError, OSError):
                self._restart()
            else:
                return self._rows(answers)
        raise EngineError(f"{_ATTEMPTS} worker processes ended while they ran this batch")

    def padding_tokens(self, shape: BatchShape) -> int:
        """Return the number of padding tokens of a batch of this shape."""
        return self._host.info.padding_tokens(shape)

    def check(self) -> None:
        """Run one sequence of one token; raise whatever it raises."""
        self.run([SHORTEST_PROMPT], [DEFAULT_OPTIONS])

    def use(self) -> WorkerUse:
        """Return the memory use after the last batch. From any thread."""
        return self._use

    def close(self) -> None:
        """End the worker."""
        self._connection.close()

    def _rows(self, answers: Answers) -> Sequence[Float32Array]:
        self._count(answers.use)
        if answers.problem == "memory":
            raise MemoryError("too little memory in a worker process")
        if answers.problem:
            raise EngineError(f"a worker process failed:\n{answers.trace}")
        return answers.rows

    def _restart(self) -> None:
        self._connection.close()
        self._earlier = self._use
        self._connection, self.pid = self._host.fork(self.pid)
        self._restarted()

    def _count(self, use: WorkerUse) -> None:
        """Set the memory use; totals go on where the worker before ended."""
        before = self._earlier
        self._use = replace(
            use,
            plan_seconds=before.plan_seconds + use.plan_seconds,
            plan_hits=before.plan_hits + use.plan_hits,
            plan_misses=before.plan_misses + use.plan_misses,
        )
