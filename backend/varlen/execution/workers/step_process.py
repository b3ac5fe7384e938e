"""The engine's side of a model that generates in a process of its own.

The process computes logits on a CPU; the engine chooses tokens from them. A crash, or an end for lack of memory, ends
the process, not the engine: sequences are computed again in the next one, from their tokens.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import EngineError
from varlen.execution.cpu.step_runner import map_logits
from varlen.execution.executor import WorkerEndedError
from varlen.execution.model_info import GraphUse, StepInfo
from varlen.execution.step_model import Choose
from varlen.execution.step_order import StepOrder
from varlen.execution.step_packing import PackedStep, pack_step
from varlen.execution.workers.connection import WorkerConnection
from varlen.execution.workers.model_process import ENDED, ModelProcess
from varlen.execution.workers.restarts import RestartLimit
from varlen.execution.workers.start import STEPS
from varlen.execution.workers.step_messages import send_step
from varlen.memory.memory_use import MemoryUse
from varlen.memory.out_of_memory import memory_errors
from varlen.scheduling.sequence import Batch, BeamStep, SampledToken, StepBatch

_log = logging.getLogger(__name__)

# Restarts that are allowed, and the seconds in which they are counted.
_MAX_RESTARTS, _RESTART_SECONDS = 3, 600.0


@dataclass(slots=True, eq=False)
class _Launched:
    """A step in flight.

    Attributes:
        step, packed: the step, and its arrays, perhaps without tokens that the step before it chooses.
        error: reason why it could not be sent to the process.
    """

    step: StepBatch
    packed: PackedStep
    error: BaseException | None = None


class StepProcess(ModelProcess[StepInfo]):
    """Runs steps in one worker process at a time.

    While it runs one, the next one is packed. It is sent as soon as the tokens of the one before are chosen, so the
    process waits neither for the scheduler nor for answers. Not for two threads at once, except for `use`.

    Attributes:
        slots: steps that may be in flight: one in the process, and one that waits for it.
        graph_use: cost of CUDA graphs, which it has none of.
    """

    slots = 2

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        choose: Choose,
        restarted: Callable[[], None],
        restarts: RestartLimit | None = None,
    ) -> None:
        """Start the process and load the model.

        Args:
            folder: folder of the checkpoint.
            config: the settings; the device is a CPU.
            choose: chooses tokens from logits on a CPU.
            restarted: called after the process ended and another one has started.
            restarts: limit of these restarts; None is 3 in 10 minutes.

        Raises:
            CheckpointError, ConfigError: see `StepRunner`.
            EngineError: the process failed.
        """
        super().__init__(STEPS, folder, config, new_info=StepInfo, limits_of=_limits)
        self._choose = choose
        self._restarted = restarted
        self._restarts = restarts or RestartLimit(_MAX_RESTARTS, _RESTART_SECONDS)
        self._is_lost = False
        self._launched: deque[_Launched] = deque()
        self._order = StepOrder()
        self.graph_use = GraphUse()
        try:
            connection = self._connect()
        except (EOFError, OSError):
            self._end()
            raise EngineError(ENDED) from None
        self._worker = WorkerConnection(connection, self.pid)

    def launch_batch(self, batch: Batch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Send a step to the process, now or once the one before has run; return a function that waits for its outputs.

        The outputs are those of `StepRunner.run_batch`. The functions are called in the order of the steps. They raise:
            MemoryError: too little memory.
            WorkerEndedError: the process ended; another one has started, whose KV caches are empty.
            SkippedStepError: the step before it failed.
            EngineError: the step failed, or the process ended and no other one could be started.
        """
        step = cast(StepBatch, batch)
        launched = _Launched(step, pack_step(step, self.info.block_size))
        self._launched.append(launched)
        if len(self._launched) == 1:
            self._send(launched)
        return partial(self._outputs, launched)

    def wait(self, timeout: float | None) -> bool:
        """Wait until the process has run the first step in flight; see `WaitingLauncher.wait`."""
        launched = self._launched[0]
        # without a limit, `outputs` waits, and finds out whether the process hangs
        if timeout is None or launched.error or self._order.is_skipped(launched.step):
            return True
        return self._worker.wait(max(0.0, timeout))

    def _outputs(self, launched: _Launched) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of the first step in flight, and send the one after it."""
        step = launched.step
        try:
            with self._order.running(step):
                self._await(launched)
                sequences, lengths = step.sampled
                with memory_errors(), torch.inference_mode():
                    outputs = self._choose(self._logits[: len(sequences)], sequences, lengths)
                self._order.chose(outputs)
        finally:
            self._launched.popleft()
            if self._launched and not self._order.is_skipped(self._launched[0].step):
                self._send(self._launched[0])
        return outputs

    def _send(self, launched: _Launched) -> None:
        """Send a step to the process, which waits for it; an error is kept."""
        packed = launched.packed
        try:
            self._order.set_tokens(packed.inputs, launched.step.chunks)
            self._worker.send(partial(send_step, step=packed))
        except BaseException as error:
            launched.error = error

    def _await(self, launched: _Launched) -> None:
        """Wait until the process has run a step, whose logits are in its memory then."""
        try:
            if launched.error is not None:
                raise launched.error
            self._worker.receive(seconds=launched.step.seconds)
        except WorkerEndedError:
            self._restart()
            raise

    def padding_tokens(self, shape: BatchShape) -> int:  # noqa: ARG002  # of every runner
        """Return 0: a step has no padding."""
        return 0

    def check(self) -> None:
        """Run one op in the process; raise whatever it raises.

        Nothing is raised if the process has ended and another one may be started, which the next step does.

        Raises:
            EngineError: no other one can be started.
        """
        if self._is_lost:
            raise EngineError(ENDED)
        try:
            self._worker.run(partial(send_step, step=None))
        except WorkerEndedError:
            _log.warning("worker process %d has ended; the next step starts another one", self.pid)

    def use(self) -> MemoryUse:
        """Return the memory use after the last step. From any thread."""
        return self._worker.use()

    def close(self) -> None:
        """End the process."""
        self._worker.close()
        self._end()

    def _connect(self) -> Connection:
        """Return the connection for steps, and map the logits."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            _, (descriptor,) = self._exchange({}, [theirs.fileno()])
            connection = Connection(ours.detach())
        try:
            self._logits = map_logits(descriptor, self.info.max_logit_rows, self.info.vocab_size)
        finally:
            os.close(descriptor)
        return connection

    def _restart(self) -> None:
        """Start the next process.

        Raises:
            EngineError: there were too many, or it cannot be started.
        """
        ended = self.pid
        self._end()
        code = self._process.returncode
        # until the next one runs
        self._is_lost = True
        if not self._restarts.allow():
            raise EngineError(
                f"worker process {ended} ended with code {code}, after {_MAX_RESTARTS} others within"
                f" {_RESTART_SECONDS:.0f} s"
            )
        _log.warning("worker process %d ended with code %s; the model is loaded again", ended, code)
        self._load_again()
        try:
            self._worker.replace(self._connect(), self.pid)
        except (EOFError, OSError):
            self._end()
            raise EngineError(ENDED) from None
        self._is_lost = False
        _log.warning("worker process %d replaces %d", self.pid, ended)
        self._restarted()


def _limits(info: StepInfo) -> tuple[object, ...]:
    """Return the facts that the engine relies on."""
    # the others depend on measured choices, and the name is for the log
    return astuple(replace(info, device_name="", weight_bytes=0, arena_bytes=0))
