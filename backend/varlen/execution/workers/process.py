"""Workers of a CPU model in processes of their own, of one core each.

A process contains faults: a worker that is killed, or crashes, costs one retry of its batch.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import EngineError
from varlen.execution.core_share import CoreShare
from varlen.execution.executor import WorkerEndedError
from varlen.execution.model_info import ModelInfo
from varlen.execution.workers.connection import WorkerConnection, hung_after
from varlen.execution.workers.messages import send_batch
from varlen.execution.workers.model_process import ENDED, ModelProcess
from varlen.execution.workers.start import BATCHES, HOST
from varlen.memory.memory_use import MemoryUse
from varlen.request.request import (
    DEFAULT_OPTIONS,
    SHORTEST_PROMPT,
    Float32Array,
    Prompt,
    RequestOptions,
)
from varlen.scheduling.batch import Batch

_log = logging.getLogger(__name__)

# A batch that has ended two workers is likely to end the next one too.
_ATTEMPTS = 2


class WorkerHost(ModelProcess[ModelInfo]):
    """The process that loads a model and forks its workers. Any thread may call `fork`.

    Of a model that several ranks hold, it is rank 0, and its own only worker.

    Attributes:
        share: tells workers whether their batch runs alone.
        hung_after: the time after which a worker counts as hung.
    """

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        """Start the process and load the model.

        Raises:
            CheckpointError, ConfigError: see `Runner`.
            EngineError: the process failed.
        """
        self._lock = Lock()
        self.hung_after = hung_after(config)
        module = HOST if config.tensor_parallel == 1 else BATCHES
        super().__init__(module, folder, config, new_info=ModelInfo, limits_of=_limits)
        # after the load, which may be refused
        self.share = CoreShare()

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
                raise EngineError(ENDED) from None

    def close(self) -> None:
        """End the process, once the workers' connections are closed."""
        with self._lock:
            self._end()
            self.share.close()

    def _fork(self, ended: int | None) -> tuple[Connection, int]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            descriptors = [theirs.fileno(), self.share.file]
            answer, _ = self._exchange({"ended": ended}, descriptors)
            if ended is not None:
                _log.warning(
                    "worker process %d ended with code %s; %d replaces it",
                    ended,
                    answer["code"],
                    answer["pid"],
                )
            return Connection(ours.detach()), answer["pid"]


class WorkerProcess:
    """Runs batches in one worker process at a time. Not for two threads at once."""

    def __init__(self, host: WorkerHost, restarted: Callable[[], None]) -> None:
        """Start the worker.

        Args:
            host: host of the model.
            restarted: called after the worker ended and another one has started.
        """
        self._host = host
        self._restarted = restarted
        self._worker = WorkerConnection(*host.fork(), host.hung_after)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._worker.pid

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
        send = partial(send_batch, prompts=prompts, options=options)
        for _ in range(_ATTEMPTS):
            try:
                return self._worker.run(send, seconds=seconds)
            except WorkerEndedError:
                self._worker.replace(*self._host.fork(self.pid))
                self._restarted()
        raise EngineError(f"{_ATTEMPTS} worker processes ended while they ran this batch")

    def padding_tokens(self, shape: BatchShape) -> int:
        """Return the number of padding tokens of a batch of this shape."""
        return self._host.info.padding_tokens(shape)

    def check(self) -> None:
        """Run one sequence of one token; raise whatever it raises."""
        self.run([SHORTEST_PROMPT], [DEFAULT_OPTIONS])

    def use(self) -> MemoryUse:
        """Return the memory use after the last batch. From any thread."""
        return self._worker.use()

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _limits(info: ModelInfo) -> tuple[object, ...]:
    """Return the facts that the engine relies on."""
    return info.dtype, info.max_sequence_tokens, info.max_batch_tokens, info.workers
