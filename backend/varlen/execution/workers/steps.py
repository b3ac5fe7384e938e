"""A model that generates, in this process or in one of its own.

On a server's CPU it has its own, which computes logits, draws the tokens and takes the steps of searches that depend on
them alone; the engine chooses others. A crash ends that process, not the engine: the next one computes the sequences
again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.execution.cpu.runner import map_logits
from varlen.execution.device import check_ranks, choose_device
from varlen.execution.executor import Launcher, StepLauncher
from varlen.execution.model_info import GraphUse, ModelInfo
from varlen.execution.packing import PackedStep, pack_step, tokens_of_rows
from varlen.execution.runner import Runner
from varlen.execution.token_state import Chooser
from varlen.execution.warm_up import warm_up, warm_up_chooser
from varlen.execution.workers.messages import Array, step_message
from varlen.execution.workers.process import ModelProcess, RestartLimit
from varlen.execution.workers.worker import WorkerProcess
from varlen.memory.memory_use import AdapterUse, MemoryUse
from varlen.memory.planner import memory_errors
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Bytes, Int32Array
from varlen.scheduling.batch import MAX_STEPS, Batch
from varlen.scheduling.device_plan import (
    BeamStep,
    Chosen,
    ChosenBeams,
    DevicePlan,
    SampledToken,
)
from varlen.telemetry.metrics import CountedMetric, Stats

# Bytes of a step that is sent while another one runs: far below what a socket holds, which would have to wait.
_QUEUED_BYTES = 1 << 16
_MAX_RESTARTS, _RESTART_SECONDS = 3, 600.0


class StepModel(Launcher, Protocol):
    """A loaded model that generates.

    Attributes:
        arrived: `[1]`, which any thread sets when a launch should end with the step that runs; None if each step is a
            launch.
    """

    graph_use: GraphUse
    arrived: Bytes | None

    @property
    def info(self) -> ModelInfo:
        """Model facts for the engine."""

    @property
    def adapter_uses(self) -> Sequence[AdapterUse]:
        """Adapters in memory, if they are counted."""

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""

    def close(self) -> None:
        """Release memory and end processes. Nothing may run."""


def load_step_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    chooser: Chooser,
    stats: Stats,
    *,
    gpu: int,
    isolated: bool,
) -> StepModel:
    """Return a model that generates, warmed up.

    Args:
        chooser: chooses tokens from logits on the device of the settings, or of ranks on a CPU.
        stats: counts processes that had to be started again.
        isolated: whether a model on a CPU, and each rank, has a process of its own.

    Raises:
        CheckpointError: the checkpoint is incomplete or of a kind that is not served.
        ConfigError: a setting does not fit the checkpoint.
    """
    device = choose_device(config.device, gpu)
    check_ranks(config, device, isolated=isolated)
    if isolated and (device.type == "cpu" or config.num_processes > 1):
        limit = RestartLimit(_MAX_RESTARTS, _RESTART_SECONDS)
        config = replace(config, device="cpu" if device.type == "cpu" else "cuda")
        host = ModelProcess(checkpoint.folder, config, generates=True, restarts=limit, gpu=gpu)
        model = ProcessSteps(host, chooser, stats)
        try:
            warm_up_chooser(chooser, host.info)
        except BaseException:
            model.close()
            raise
        return model
    runner = Runner(checkpoint, config, chooser, gpu=gpu)
    warm_up(runner, config.device_timeout_seconds)
    # sequences of the warm-up, which never end
    chooser.forget()
    return runner


class ProcessSteps:
    """Steps of a model in a process of its own: a `StepModel`, and a `StepDevice`.

    While it runs one, the next one is packed, which is sent as soon as the tokens of the one before are chosen. Not for
    two threads at once, except for `use`.

    Attributes:
        slots: steps that may be in flight: one in the process, and one that waits for it; of a pipeline, one in each
            stage.
    """

    def __init__(self, host: ModelProcess, chooser: Chooser, stats: Stats) -> None:
        """Connect to the process.

        Args:
            chooser: chooses tokens from logits on a CPU, and says what the process chooses.
            stats: counts the processes that replace it.

        Raises:
            EngineError: the process failed.
        """
        self.host = host
        self._chooser = chooser
        self._stats = stats
        stages = host.config.pipeline_parallel
        # whether steps in flight have different sequences, as in a pipeline
        self._runs_apart = stages > 1
        self.slots = stages if self._runs_apart else MAX_STEPS
        self._adapters = {name: number for number, (name, _) in enumerate(host.info.adapters)}
        # slots of logits in the process, and the slot of the last step
        self._slots, self._slot = stages, 0
        self._launcher = StepLauncher(self, chooser, runs_apart=self._runs_apart)
        # a token for each row of logits of the last step, if the engine took part in the choice
        self._chosen: Int32Array | None = None
        self.graph_use = GraphUse()
        self.arrived = host.share.byte if host.config.num_processes == 1 else None
        try:
            self._worker = WorkerProcess(host, self._restarted, self.slots, has_state=True)
        except BaseException:
            host.close()
            raise
        self._map_logits()

    @property
    def info(self) -> ModelInfo:
        return self.host.info

    @property
    def pid(self) -> int:
        return self.host.pid

    def launch_batch(self, batch: Batch) -> Callable[[], Sequence[SampledToken | BeamStep]]:
        """Send a step to the process; return a function that waits for its outputs.

        If the engine has to choose the tokens before it, it is sent after that. `Runner.launch_batch` describes the
        outputs. The functions are called in the order of the steps, and raise:
            MemoryError: too little memory.
            WorkerEndedError: the process ended; another one has started, whose KV caches are empty.
            SkippedStepError: the step before it failed.
            EngineError: the step failed, or the process ended and no other one could be started.
        """
        return self._launcher.launch(batch)

    def wait(self, timeout: float | None) -> bool:
        # without a limit, the outputs wait, and find out whether the process hangs
        if timeout is None or not self._launcher.awaits_device:
            return True
        return self._worker.wait(max(0.0, timeout))

    def pack(self, step: Batch, plan: DevicePlan) -> PackedStep:
        return pack_step(step, self.info.block_size, plan, self._adapters)

    def may_queue(self, packed: PackedStep) -> bool:
        """Return whether a step can be sent while the process runs another one."""
        if self._runs_apart:
            return True
        groups = (packed.sources, packed.inputs, packed.edits, packed.beams, packed.searches)
        arrays = (each for group in groups for each in group.values())
        return sum(each.nbytes for each in arrays) <= _QUEUED_BYTES

    def start(self, step: Batch, packed: PackedStep) -> Callable[[], Chosen]:
        """Send a step to the process; return a function that waits for what it chooses.

        What the process has not chosen it does not know.
        """
        if packed.beams:
            packed.beams["given"][:] = self._chooser.given(step)
        if self._chosen is not None:
            packed.take_tokens(self._chosen)
            packed = replace(packed, follows=np.empty((2, 0), np.int32))
        self._chosen = None
        self._slot = (self._slot + 1) % self._slots
        packed.keep_logits(self._slot)
        answers = self._worker.launch(step_message(packed), seconds=step.seconds)
        return lambda: _chosen_of(*answers())

    def choose(
        self, step: Batch, packed: PackedStep, plan: DevicePlan, chosen: Chosen
    ) -> Sequence[SampledToken | BeamStep]:
        with memory_errors(), torch.inference_mode():
            logits = self._logits[packed.slot, : step.num_logit_rows]
            outputs = self._chooser.outputs(step, plan, chosen, logits)
        self._chosen = tokens_of_rows(step, outputs)
        return outputs

    def check(self) -> None:
        """Run one op in the process; see `WorkerProcess.check_state`."""
        # the answers to steps in flight come before the one to this
        self._launcher.settle()
        self._worker.check_state()

    def use(self) -> MemoryUse:
        return self._worker.use()

    @property
    def adapter_uses(self) -> Sequence[AdapterUse]:
        return self._worker.adapter_uses

    def close(self) -> None:
        self._worker.close()
        self.host.close()

    def _restarted(self) -> None:
        """Go on with the next process, whose KV caches are empty."""
        self._map_logits()
        self._chooser.forget()
        self._stats.count(CountedMetric.WORKER_RESTARTS)

    def _map_logits(self) -> None:
        (descriptor,) = self._worker.descriptors
        try:
            info = self.info
            self._logits = map_logits(descriptor, self._slots, info.max_logit_rows, info.vocab_size)
        finally:
            os.close(descriptor)


def _chosen_of(token_ids: Array, guesses: Array, *searches: Array) -> Chosen:
    beams = ChosenBeams(*searches) if searches else None
    return Chosen(token_ids.tolist(), beams, guesses.tolist())
