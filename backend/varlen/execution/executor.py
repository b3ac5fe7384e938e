"""Runs the engine's batches: one thread and one runner per slot."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol

from varlen.costs.batch_shape import BatchShape
from varlen.errors import ModelFaultError
from varlen.request import Float32Array, Prompt, RequestOptions
from varlen.sequence import Batch, BatchResult

_log = logging.getLogger(__name__)

Completed = Callable[[Batch, BatchResult], None]


class BatchRunner(Protocol):
    """Runs one batch at a time."""

    def run(
        self, prompts: AnySequence[Prompt], options: AnySequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the output of each prompt; see `Runner.run`."""

    def padding_tokens(self, shape: BatchShape) -> int:
        """Return the tokens that a batch of this shape is filled up with."""

    def check(self) -> None:
        """Run the smallest batch; raise whatever it raises."""


class ThreadExecutor:
    """Runs batches in threads of its own.

    Attributes:
        slots: batches that may be in flight, one per runner.
    """

    def __init__(self, runners: AnySequence[BatchRunner]) -> None:
        self.slots = len(runners)
        self._free: SimpleQueue[BatchRunner] = SimpleQueue()
        for runner in runners:
            self._free.put(runner)
        self._threads = ThreadPoolExecutor(self.slots, "varlen-executor")

    def start(self, batch: Batch, completed: Completed) -> None:
        """Begin to run a batch; `completed` is called once with its result, from a thread of this executor."""
        self._threads.submit(self._run, batch, completed)

    def close(self) -> None:
        """Wait for batches in flight and stop the threads."""
        self._threads.shutdown()

    def _run(self, batch: Batch, completed: Completed) -> None:
        runner = self._free.get()
        began = time.perf_counter()
        outputs: list[Float32Array] = []
        error: Exception | None = None
        try:
            outputs = runner.run(
                [sequence.prompt for sequence in batch.sequences],
                [sequence.options for sequence in batch.sequences],
            )
            if len(outputs) != len(batch.sequences):
                raise RuntimeError(f"{len(outputs)} outputs of {len(batch.sequences)} sequences")
        except MemoryError as raised:
            error = raised
        except Exception as raised:
            _log.exception("a batch of %d sequences failed", len(batch.sequences))
            error = _diagnose(runner, raised)
        seconds = time.perf_counter() - began
        self._free.put(runner)
        padding = runner.padding_tokens(batch.shape)
        completed(batch, BatchResult(outputs if error is None else [], seconds, padding, error))


def _diagnose(runner: BatchRunner, error: Exception) -> Exception:
    """Return what a batch failed of: a fault that lasts if the smallest batch fails too."""
    try:
        runner.check()
    except MemoryError:
        return error
    except Exception:
        _log.exception("the smallest batch failed too; the model stops")
        return ModelFaultError("the smallest batch failed too")
    return error
