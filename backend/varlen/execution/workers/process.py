"""Workers of a CPU model in processes of their own, of one core each.

A process contains faults: a worker that is killed, or crashes, costs one retry of its batch.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import EngineError
from varlen.execution.executor import CoreShare, WorkerEndedError, raising
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

    If several processes hold a model, it is the leader, and its own only worker.

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
        module = HOST if config.num_processes == 1 else BATCHES
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


@dataclass(slots=True, eq=False)
class _Sent:
    """A batch in flight.

    Attributes:
        send: sends it.
        seconds: expected run time.
        is_sent: whether the worker has it.
        attempts: workers that have ended while it was the first of their batches.
        answer: returns its answers, or raises; None until they are known.
    """

    send: Callable[[Connection], None]
    seconds: float
    is_sent: bool = False
    attempts: int = 0
    answer: Callable[[], Sequence[Float32Array]] | None = None


class WorkerProcess:
    """Runs batches in one worker process at a time.

    The last stage of a pipeline takes the next batch before it has run the first.

    One thread may launch batches, and another one ask for their answers, in their order.

    Attributes:
        slots: batches that may be in flight.
    """

    def __init__(self, host: WorkerHost, restarted: Callable[[], None], slots: int = 1) -> None:
        """Start the worker.

        Args:
            host: host of the model.
            restarted: called after the worker ended and another one has started.
            slots: batches that may be in flight.
        """
        self._host = host
        self._restarted = restarted
        self.slots = slots
        self._worker = WorkerConnection(*host.fork(), host.hung_after)
        self._in_flight: deque[_Sent] = deque()
        self._sending = Lock()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._worker.pid

    def run_batch(self, batch: Batch) -> Sequence[Float32Array]:
        """Return the answer of each sequence of a batch; see `Runner.run`."""
        return self.launch_batch(batch)()

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions], *, seconds: float = 0.0
    ) -> Sequence[Float32Array]:
        """Return the answer of each sequence; see `launch`."""
        return self.launch(prompts, options, seconds=seconds)()

    def launch_batch(self, batch: Batch) -> Callable[[], Sequence[Float32Array]]:
        """Send a batch; return a function that waits for its answers; see `launch`."""
        return self.launch(batch.prompts, batch.options, seconds=batch.seconds)

    def launch(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions], *, seconds: float = 0.0
    ) -> Callable[[], Sequence[Float32Array]]:
        """Send a batch; return a function that waits for the answer of each sequence.

        See `Runner.run` for the answers. The function raises:
            MemoryError: the worker has too little memory.
            EngineError: the batch failed, or ended two workers.

        Args:
            prompts, options: prompts and options of the batch.
            seconds: expected run time.
        """
        sent = _Sent(partial(send_batch, prompts=prompts, options=options), seconds)
        with self._sending:
            # after a worker has ended, each batch runs alone until none is left that may have ended it
            if all(each.is_sent for each in self._in_flight):
                self._send(sent)
            self._in_flight.append(sent)
        return partial(self._answers, sent)

    def _answers(self, sent: _Sent) -> Sequence[Float32Array]:
        """Return the answers of a batch, after the answers of the batches before it."""
        while sent.answer is None:
            first = self._in_flight[0]
            first.answer = self._answer(first)
            if first.answer is not None:
                with self._sending:
                    self._in_flight.popleft()
        return sent.answer()

    def _answer(self, first: _Sent) -> Callable[[], Sequence[Float32Array]] | None:
        """Wait for the first batch in flight; return None if it has to run again."""
        try:
            with self._sending:
                if not first.is_sent:
                    self._send(first)
            rows = self._worker.receive(seconds=first.seconds)
        except WorkerEndedError:
            return self._start_next(first)
        except Exception as error:
            return raising(error)
        return lambda: rows

    def _start_next(self, first: _Sent) -> Callable[[], Sequence[Float32Array]] | None:
        """Start the next worker, which has no batch yet; see `_answer`."""
        first.attempts += 1
        with self._sending:
            for each in self._in_flight:
                each.is_sent = False
        try:
            self._worker.replace(*self._host.fork(self.pid))
        except Exception as error:
            return raising(error)
        self._restarted()
        if first.attempts < _ATTEMPTS:
            return None
        return raising(EngineError(f"{_ATTEMPTS} worker processes ended while they ran this batch"))

    def _send(self, sent: _Sent) -> None:
        """Send a batch; whether the worker has ended, `_answer` finds out."""
        with suppress(WorkerEndedError):
            self._worker.send(sent.send)
        sent.is_sent = True

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
    return (
        info.dtype,
        info.max_sequence_tokens,
        info.max_batch_tokens,
        info.max_arena_tokens,
        info.workers,
    )
