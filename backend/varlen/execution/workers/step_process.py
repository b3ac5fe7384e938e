"""The engine's side of a model that generates in a process of its own.

The process computes logits on a CPU, draws the tokens and takes the steps of searches that depend on them alone; the
engine chooses others. A crash, or an end for lack of memory, ends the process, not the engine: sequences are computed
again in the next one, from their tokens.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import EngineError, ModelFaultError
from varlen.execution.cpu.step_runner import map_logits
from varlen.execution.executor import WorkerEndedError
from varlen.execution.model_info import GraphUse, StepInfo
from varlen.execution.step_launcher import StepChoice, StepLauncher
from varlen.execution.step_packing import PackedStep, pack_step, tokens_of_rows
from varlen.execution.workers.connection import WorkerConnection, hung_after
from varlen.execution.workers.model_process import ENDED, ModelProcess
from varlen.execution.workers.restarts import RestartLimit
from varlen.execution.workers.start import STEPS
from varlen.execution.workers.step_messages import chosen_of, step_message
from varlen.memory.memory_use import MemoryUse
from varlen.memory.out_of_memory import memory_errors
from varlen.scheduling.batch import Batch
from varlen.scheduling.choices import BeamStep, DeviceChoice, DeviceChosen, SampledToken
from varlen.scheduling.iteration.step_in_flight import MAX_IN_FLIGHT

_log = logging.getLogger(__name__)

# Bytes of a step that is sent while another one runs: far below what a socket holds, which would have to wait.
_QUEUED_BYTES = 1 << 16
# Restarts that are allowed, and the seconds in which they are counted.
_MAX_RESTARTS, _RESTART_SECONDS = 3, 600.0


class StepProcess(ModelProcess[StepInfo]):
    """Runs steps in one worker process at a time.

    While it runs one, the next one is packed. It is sent as soon as the tokens of the one before are chosen, so the
    process waits neither for the scheduler nor for answers. Not for two threads at once, except for `use`.

    Attributes:
        slots: steps that may be in flight: one in the process, and one that waits for it; of a pipeline, one in each
            stage.
        graph_use: cost of CUDA graphs, which it has none of.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        choice: StepChoice,
        restarted: Callable[[], None],
        restarts: RestartLimit | None = None,
    ) -> None:
        """Start the process and load the model.

        Args:
            folder: folder of the checkpoint.
            config: the settings; the device is a CPU.
            choice: chooses tokens from logits on a CPU, and says what the process chooses.
            restarted: called after the process ended and another one has started.
            restarts: limit of these restarts; None is 3 in 10 minutes.

        Raises:
            CheckpointError, ConfigError: see `StepRunner`.
            EngineError: the process failed.
        """
        super().__init__(STEPS, folder, config, new_info=StepInfo, limits_of=_limits)
        self._choice = choice
        self._restarted = restarted
        self._restarts = restarts or RestartLimit(_MAX_RESTARTS, _RESTART_SECONDS)
        self._is_lost = False
        stages = config.pipeline_parallel
        # whether steps in flight have different sequences, as in a pipeline
        self._runs_apart = stages > 1
        self.slots = stages if self._runs_apart else MAX_IN_FLIGHT
        # places of logits in the process, and the place of the last step
        self._places, self._place = stages, 0
        self._launcher = StepLauncher(self, choice, runs_apart=self._runs_apart)
        # a token for each row of logits of the last step, if the engine took part in the choice
        self._chosen: npt.NDArray[np.int32] | None = None
        self.graph_use = GraphUse()
        try:
            connection = self._connect()
        except (EOFError, OSError):
            self._end()
            raise EngineError(ENDED) from None
        self._worker = WorkerConnection(connection, self.pid, hung_after(config))

    def launch_batch(self, batch: Batch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Send a step to the process; return a function that waits for its outputs.

        If the engine has to choose the tokens before it, it is sent after that. `StepRunner.launch_batch` describes the
        outputs. The functions are called in the order of the steps, and raise:
            MemoryError: too little memory.
            WorkerEndedError: the process ended; another one has started, whose KV caches are empty.
            SkippedStepError: the step before it failed.
            EngineError: the step failed, or the process ended and no other one could be started.
        """
        return self._launcher.launch(batch)

    def wait(self, timeout: float | None) -> bool:
        """Wait until the process has run the first step in flight; see `WaitingLauncher.wait`."""
        # without a limit, the outputs wait, and find out whether the process hangs
        if timeout is None or not self._launcher.awaits_device:
            return True
        return self._worker.wait(max(0.0, timeout))

    def pack(self, step: Batch, choice: DeviceChoice) -> PackedStep:
        """Return a step as the process takes it; see `StepDevice`."""
        return pack_step(step, self.info.block_size, choice)

    def may_queue(self, packed: PackedStep) -> bool:
        """Return whether a step can be sent while the process runs another one."""
        if self._runs_apart:
            return True
        groups = (packed.sources, packed.inputs, packed.edits, packed.beams, packed.searches)
        arrays = (each for group in groups for each in group.values())
        return sum(each.nbytes for each in arrays) <= _QUEUED_BYTES

    def start(self, step: Batch, packed: PackedStep) -> Callable[[], DeviceChosen]:
        """Send a step to the process; return a function that waits for what it chooses.

        What the process has not chosen it does not know.
        """
        if packed.beams:
            packed.beams["given"][:] = self._choice.given(step)
        if self._chosen is not None:
            packed.take_tokens(self._chosen)
            packed = replace(packed, follows=np.empty((2, 0), np.int32))
        self._chosen = None
        self._place = (self._place + 1) % self._places
        packed.keep_logits(self._place)
        message = step_message(packed)
        # the wait finds out that the process has ended, and starts another one
        with suppress(WorkerEndedError):
            self._worker.send(message)
        return partial(self._await, self.pid, step.seconds)

    def choose(
        self, step: Batch, packed: PackedStep, choice: DeviceChoice, chosen: DeviceChosen
    ) -> Sequence[SampledToken | BeamStep]:
        """Return the outputs of a step, with what the engine chooses from its logits."""
        with memory_errors(), torch.inference_mode():
            logits = self._logits[packed.place, : step.num_logit_rows]
            outputs = self._choice.outputs(step, choice, chosen, logits)
        self._chosen = tokens_of_rows(step, outputs)
        return outputs

    def _await(self, pid: int, seconds: float) -> DeviceChosen:
        """Wait until the process has run a step; return what it has chosen.

        Args:
            pid: the process that has got it.
            seconds: its expected run time.
        """
        if pid != self.pid:
            raise WorkerEndedError
        try:
            answers = self._worker.receive(seconds=seconds)
        except WorkerEndedError as error:
            self._restart(str(error))
            raise
        return chosen_of(answers)

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
        # their answers come before the one to this
        self._launcher.settle()
        try:
            self._worker.run(step_message(None))
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
            self._logits = map_logits(
                descriptor, self._places, self.info.max_logit_rows, self.info.vocab_size
            )
        finally:
            os.close(descriptor)
        return connection

    def _restart(self, reason: str) -> None:
        """Start the next process.

        Args:
            reason: reason of the end of this one, if it is known.

        Raises:
            EngineError: there were too many, or it cannot be started.
        """
        # of a model that several ranks hold, it is the end of one of them
        ended, reason = self.pid, self._process.last_words() or reason
        self._end()
        why = reason or f"worker process {ended} ended with code {self._process.code}"
        # until the next one runs
        self._is_lost = True
        if not self._restarts.allow():
            raise ModelFaultError(
                f"{why}, after {_MAX_RESTARTS} others within {_RESTART_SECONDS:.0f} s"
            )
        _log.warning("%s; the model is loaded again", why)
        self._load_again()
        try:
            self._worker.replace(self._connect(), self.pid)
        except (EOFError, OSError):
            self._end()
            raise EngineError(ENDED) from None
        self._is_lost = False
        self._choice.forget()
        _log.warning("worker process %d replaces %d", self.pid, ended)
        self._restarted()


def _limits(info: StepInfo) -> tuple[object, ...]:
    """Return the facts that the engine relies on."""
    # the others depend on measured choices, and the name is for the log
    return astuple(replace(info, device_name="", weight_bytes=0, arena_bytes=0))
