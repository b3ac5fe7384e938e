"""Workers of a CPU model in processes of their own, of one core each.

A process contains faults: a worker that is killed, or crashes, costs one retry of its batch.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import time
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
from varlen.execution.model_info import ModelInfo
from varlen.execution.workers.host import MAX_MESSAGE
from varlen.execution.workers.messages import Answers, receive_answers, send_batch
from varlen.memory.memory_use import MemoryUse
from varlen.processes import start_module
from varlen.request.request import (
    DEFAULT_OPTIONS,
    SHORTEST_PROMPT,
    Float32Array,
    Prompt,
    RequestOptions,
)
from varlen.scheduling.sequence import Batch

_log = logging.getLogger(__name__)

_HOST = "varlen.execution.workers.host"
# A batch that has ended two workers is likely to end the next one too.
_ATTEMPTS = 2
# Seconds for the workers to finish a batch, and then to end.
_END_SECONDS = 10.0
# A worker that takes longer than this, and than twenty times what is expected, hangs.
_HUNG_SECONDS, _HUNG_FACTOR = 300.0, 20
# Seconds after each attempt to load the model again.
_PAUSES = (1.0, 5.0, 0.0)
# Nothing in the host may start threads, since they would not be forked: neither numpy nor the tokenizer.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_HOST_ENDED = "the process that loads the model ended; the server's log says why"


class WorkerHost:
    """The process that loads a model and forks its workers. Any thread may call `fork`.

    Attributes:
        info: model facts for the engine.
    """

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
        self._files = _files(folder)
        self._folder = folder
        self._lock = Lock()
        self.info = self._load()

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
            self._load_again()
            try:
                return self._fork(None)
            except (EOFError, OSError):
                raise EngineError(_HOST_ENDED) from None

    def close(self) -> None:
        """End the process, once the workers' connections are closed."""
        with self._lock:
            self._end()

    def _load(self) -> ModelInfo:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_module(_HOST, theirs, _ENVIRONMENT, stdin=subprocess.DEVNULL)
        try:
            self._control.send(json.dumps(self._setup).encode())
            return ModelInfo(**self._receive()["model"])
        except (EOFError, OSError):
            self._end()
            raise EngineError(_HOST_ENDED) from None
        except BaseException:
            self._end()
            raise

    def _load_again(self) -> None:
        """Load the model that was loaded before, and no other.

        Raises:
            EngineError: it cannot be loaded, or has changed.
        """
        for pause in _PAUSES:
            if _files(self._folder) != self._files:
                raise EngineError("the files of the checkpoint have changed; reload the model")
            try:
                info = self._load()
            except VarlenError as error:
                _log.error("the model could not be loaded again: %s", error)
                time.sleep(pause)
                continue
            if _limits(info) == _limits(self.info):
                return
            self._end()
            raise EngineError("the cores or the memory have changed; reload the model")
        raise EngineError(_HOST_ENDED)

    def _fork(self, ended: int | None) -> tuple[Connection, int]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            order = json.dumps({"ended": ended}).encode()
            socket.send_fds(self._control, [order], [theirs.fileno()])
            answer = self._receive()
            if ended is not None:
                _log.warning(
                    "worker process %d ended with code %s; %d replaces it",
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
            host: host of the model.
            restarted: called after the worker ended and another one has started.
        """
        self._host = host
        self._restarted = restarted
        self._use = MemoryUse()
        # totals of the workers before it
        self._earlier = MemoryUse()
        self._connection, self.pid = host.fork()

    def run_batch(self, batch: Batch) -> Sequence[Float32Array]:
        """Return the answer of each sequence of a batch; see `Runner.run`."""
        return self.run(batch.prompts, batch.options, seconds=batch.seconds)

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions], *, seconds: float = 0.0
    ) -> Sequence[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`.

        Args:
            prompts, options: prompts and options of the batch.
            seconds: expected run time.

        Raises:
            MemoryError: the worker has too little memory.
            EngineError: the batch failed, or ended two workers.
        """
        for _ in range(_ATTEMPTS):
            try:
                send_batch(self._connection, prompts, options)
                if not self._connection.poll(max(_HUNG_SECONDS, _HUNG_FACTOR * seconds)):
                    _log.error("worker process %d hangs; it is ended", self.pid)
                    os.kill(self.pid, signal.SIGKILL)
                answers = receive_answers(self._connection)
            except (EOFError, OSError):
                self._restart()
            except BaseException:
                # an answer that was not read would be taken for the answer of the next batch
                self._connection.close()
                raise
            else:
                return self._rows(answers)
        raise EngineError(f"{_ATTEMPTS} worker processes ended while they ran this batch")

    def padding_tokens(self, shape: BatchShape) -> int:
        """Return the number of padding tokens of a batch of this shape."""
        return self._host.info.padding_tokens(shape)

    def check(self) -> None:
        """Run one sequence of one token; raise whatever it raises."""
        self.run([SHORTEST_PROMPT], [DEFAULT_OPTIONS])

    def use(self) -> MemoryUse:
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

    def _count(self, use: MemoryUse) -> None:
        """Set the memory use; totals go on where the worker before ended."""
        before = self._earlier
        self._use = replace(
            use,
            plan_seconds=before.plan_seconds + use.plan_seconds,
            plan_hits=before.plan_hits + use.plan_hits,
            plan_misses=before.plan_misses + use.plan_misses,
        )


def _limits(info: ModelInfo) -> tuple[object, ...]:
    """Return what the engine relies on; measured choices may differ from load to load."""
    return info.dtype, info.max_sequence_tokens, info.max_batch_tokens, info.workers


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of the files in a checkpoint's folder."""
    found = sorted(path for path in folder.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]
