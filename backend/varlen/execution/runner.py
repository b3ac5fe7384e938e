"""A loaded model on one device: batches in, their outputs out.

A batch is some sequences, each with a number of tokens: all of its tokens in a model that runs whole sequences, or the
tokens of one step in a model that generates. `model_state` has the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution.arenas import batch_arena, step_arenas
from varlen.execution.cpu.runner import CpuRunner
from varlen.execution.cuda.graphs import CudaGraphs
from varlen.execution.cuda.runner import CudaRunner, CudaSteps
from varlen.execution.device import choose_device, device_memory, name_of
from varlen.execution.executor import Outputs, StepLauncher
from varlen.execution.fingerprint import device_name
from varlen.execution.model_info import (
    GraphUse,
    ModelInfo,
    edit_limits,
    generation_limit,
    sequence_limit,
    step_limit,
)
from varlen.execution.model_state import Decoder, EncoderDecoder, OneShot, ProgramRunner
from varlen.execution.packing import PackedStep
from varlen.execution.programs import (
    LoadedPrograms,
    Steps,
    WholeSequences,
    load_programs,
)
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.execution.thread_executor import CoreShare
from varlen.execution.token_state import Chooser
from varlen.memory.arena import Arena
from varlen.memory.memory_use import MemoryUse
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Program
from varlen.request.request import (
    DEFAULT_OPTIONS,
    SHORTEST_PROMPT,
    Float32Array,
    Prompt,
    RequestOptions,
)
from varlen.scheduling.batch import MAX_STEPS, Batch
from varlen.tasks import TASKS, Task
from varlen_kernels.ops import kernels_for

# What several processes of a model run together: prompts and options, or the part of a step.
Work: TypeAlias = tuple[Sequence[Prompt], Sequence[RequestOptions]] | PackedStep


class Runner:
    """Runs batches of one model on one device. Not for two threads at once.

    Whole sequences use the cores that torch gives the thread of a CPU; workers give it one. Steps use all of them.

    Attributes:
        info: model facts for the engine.
        link: link to the other processes that hold the model.
        device: device of weights, caches and batches.
        programs: the recorded forward passes.
        arenas: memory of their intermediates.
        state: memory of the model on the device, which decides how batches run.
        slots: batches that may be in flight; more than one if `launch_batch` starts them.
        launch_batch: starts a batch and returns a function that waits for its outputs. On a CPU the batch has run then,
            and a step runs in that function. The outputs are the answer of each sequence, or the token of each sample
            and the step of each search, chunk by chunk. The function raises MemoryError if there is too little memory
            for what the batch needs beside the arena, and SkippedStepError if the step before failed.
        graph_use: cost of the CUDA graphs, if there are any.
    """

    state: OneShot | Decoder
    launch_batch: Callable[[Batch], Callable[[], Outputs]]
    # nothing is known of a batch before its outputs are asked for
    wait = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        chooser: Chooser | None = None,
        *,
        gpu: int = 0,
        kernels: object | None = None,
        workers: int = 1,
        measures: bool = False,
        link: RankLink[Any] = NO_OTHERS,
    ) -> None:
        """Load the weights and record the forward passes; on a GPU, capture their graphs.

        Args:
            checkpoint: the checkpoint to load.
            config: the settings.
            chooser: chooses tokens from logits on the device; None if the model runs whole sequences.
            gpu: number of the GPU, if the model runs on one.
            kernels: a module with the functions that ops name; None selects the device's own.
            workers: number of runners of the model, which share `arena_bytes`.
            measures: whether to measure the fastest way to run linear layers of whole sequences, unless
                `warmup_seconds` is 0. Layers of steps are measured in any case.
            link: link to the other ranks or stages, if this process holds a part of the model.

        Raises:
            CheckpointError: the checkpoint is incomplete, or lacks the head of the task.
            ConfigError: a limit does not fit the checkpoint, or the device is absent.
        """
        self.link = link
        self.device = choose_device(config.device, gpu)
        self._config, self._workers = config, workers
        self._kernels: Any = kernels or kernels_for(self.device)
        self.slots, self.graph_use = 1, GraphUse()
        if chooser is None:
            self._load_whole_sequences(checkpoint, measures * config.warmup_seconds)
        else:
            self._load_steps(checkpoint, chooser)

    def _load(
        self,
        kind: type[WholeSequences | Steps],
        checkpoint: Checkpoint,
        task: Task,
        *,
        longest: int,
        seconds: float,
    ) -> LoadedPrograms:
        """Load the programs of a kind of model; see `load_programs`."""
        self._loaded = load_programs(
            kind,
            checkpoint,
            self._config,
            task,
            self.device,
            self._kernels,
            longest=longest,
            seconds=seconds,
            link=self.link,
        )
        self.programs = self._loaded.programs
        return self._loaded

    def _load_whole_sequences(self, checkpoint: Checkpoint, seconds: float) -> None:
        """Load a model that runs whole sequences."""
        config = self._config
        task = _task_of_sequences(checkpoint, config)
        longest = sequence_limit(checkpoint, config)
        self._load(WholeSequences, checkpoint, task, longest=longest, seconds=seconds)
        self.arenas: Sequence[Arena] = [self._batch_arena(longest)]
        self._map_handoffs()
        device = self._new_program_runner()
        self._run_whole(device, task)
        self.info = self._info(
            task,
            longest,
            device_name(self.device),
            max_batch_tokens=min(config.max_batch_tokens, self.arena.max_tokens),
            is_padded=config.execution == "padded",
            workers=self._workers,
        )
        if isinstance(device, CudaRunner):
            self.slots, self.graph_use = device.slots, device.graph_use

    def _load_steps(self, checkpoint: Checkpoint, chooser: Chooser) -> None:
        """Load a model that generates."""
        config = self._config
        is_translation = checkpoint.translate is not None
        task: Task = "translate" if is_translation else "generate"
        checkpoint.check_task(task)
        longest = generation_limit(checkpoint, config)
        max_step_tokens = step_limit(checkpoint, config)
        loaded = self._load(Steps, checkpoint, task, longest=longest, seconds=config.warmup_seconds)
        assert loaded.kv is not None
        self.arenas = step_arenas(
            self.programs, config, self.device, max_step_tokens=max_step_tokens
        )
        self._map_handoffs()
        self.state = (EncoderDecoder if is_translation else Decoder)(
            loaded,
            self.arenas,
            config,
            chooser,
            self._kernels,
            longest=longest,
            limits=edit_limits(checkpoint, config),
            link=self.link,
        )
        self.launch_batch = self.state.launch_batch
        if isinstance(self.state.steps, CudaSteps):
            self.launch_batch, self.slots = StepLauncher(self.state, chooser).launch, MAX_STEPS
            self.graph_use = self.state.steps.graph_use
        self.info = self._info(
            task,
            longest,
            name_of(self.device),
            max_batch_tokens=max_step_tokens,
            max_logit_rows=self.arena.largest["logit_rows"],
            num_blocks=loaded.kv.num_blocks,
            block_size=loaded.kv.block_size,
            block_bytes=loaded.kv.block_bytes,
        )

    def _info(self, task: Task, longest: int, device: str, **own: Any) -> ModelInfo:
        """Return model facts for the engine, with the facts of one kind of model."""
        loaded = self._loaded
        return ModelInfo(
            task=task,
            device=self.device.type,
            device_name=device,
            dtype=loaded.dtype,
            vocab_size=loaded.vocab_size,
            type_vocab_size=loaded.type_vocab_size,
            max_sequence_tokens=longest,
            max_arena_tokens=self.arena.max_tokens,
            weight_bytes=loaded.weight_bytes,
            arena_bytes=sum(arena.capacity for arena in self.arenas),
            cost_fields=loaded.cost_fields,
            **own,
        )

    def another(self) -> Runner:
        """Return a runner of the same whole sequences on its CPU, with another arena."""
        other = copy(self)
        other.arenas = [self._batch_arena(self.info.max_sequence_tokens)]
        other._run_whole(other._new_program_runner(), self.info.task)
        return other

    def _run_whole(self, device: ProgramRunner, task: Task) -> None:
        """Run whole sequences on a device."""
        is_padded = self._config.execution == "padded"
        self.state = OneShot(device, task, is_padded=is_padded, link=self.link)
        self.launch_batch = self.state.launch_batch

    def share_cores(self, share: CoreShare) -> None:
        """Run batches on all cores of its CPU while `share` says that they run alone."""
        self._cpu_runner.share_cores(share, self._workers)

    def run_batch(self, batch: Batch) -> Outputs:
        """Return the outputs of a batch; see `launch_batch`."""
        return self.launch_batch(batch)()

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each of some whole sequences, in the order given.

        Args:
            prompts: checked, at least one; together at most `max_batch_tokens` long, padding included if they
                are padded, or one of at most `max_arena_tokens`.
            options: one per prompt.

        Returns:
            Per sequence: embed `[hidden]`, sparse_embed `[terms, 2]` (see `active_terms`), classify and rerank
            `[labels]`, hidden `[tokens, hidden]`, token_classify `[tokens, labels]`, token_embed `[vectors, features]`.
            Views of arrays made for this call. Nothing on a stage that is not the last.

        Raises:
            MemoryError: too little memory for what the batch needs beside the arena.
        """
        assert isinstance(self.state, OneShot)
        return self.state.run(prompts, options)

    def run_part(self, work: Work) -> Sequence[Float32Array] | Tensor:
        """Run this process's part of some work; return what the leader gets: answers, or logits."""
        if isinstance(work, PackedStep):
            return self.decoder.run_part(work)
        return self.run(*work)

    @property
    def decoder(self) -> Decoder:
        """The state of a model that generates."""
        assert isinstance(self.state, Decoder)
        return self.state

    @property
    def arena(self) -> Arena:
        """Memory of the intermediates of the first program."""
        return self.arenas[0]

    @property
    def program(self) -> Program:
        """The first program."""
        return self.programs[0]

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""
        return MemoryUse.total(arena.use() for arena in self.arenas)

    def release_arenas(self) -> None:
        """Return the memory of intermediates to the system, while no batch runs."""
        for arena in self.arenas:
            arena.release()

    def compile(self) -> None:
        """Compile what batches of whole sequences need, so that none of them has to."""
        self.compile_products()
        self.check()

    def compile_products(self) -> None:
        """Compile the linear layers for batches of usual sizes."""
        self._cpu_runner.compile()

    def check(self) -> None:
        """Run the smallest batch, or one op of a decoder; raise whatever it raises."""
        if isinstance(self.state, Decoder):
            torch.zeros(1, device=self.device).add_(1).item()
        else:
            self.run([SHORTEST_PROMPT], [DEFAULT_OPTIONS])

    def close(self) -> None:
        """Release device memory."""
        self.state.close()

    @property
    def _cpu_runner(self) -> CpuRunner:
        assert isinstance(self.state, OneShot)
        assert isinstance(self.state.device, CpuRunner)
        return self.state.device

    def _batch_arena(self, longest: int) -> Arena:
        parts = self._loaded.parts
        # stages run the same batches
        stages = [part.program for part in parts[0]] if parts else [self.programs[0]]
        return batch_arena(
            self.programs[0], self._config, longest, self.device, self._workers, stages
        )

    def _map_handoffs(self) -> None:
        """Map the memory of the values that a stage receives and sends."""
        if self.link.handoffs is not None:
            parts = [of_stages[self.link.stage.number] for of_stages in self._loaded.parts]
            self.link.handoffs.map(parts, [arena.largest for arena in self.arenas])

    def _new_program_runner(self) -> ProgramRunner:
        parts, link = (self.programs[0], self._kernels, self.arenas[0]), self.link
        with device_memory(
            f"the GPU has too little memory for the graphs of batches up to {self.arena.max_tokens} tokens:"
            " lower max_batch_tokens, max_sequence_tokens or max_batch_sequences"
        ):
            if self.device.type == "cpu":
                return CpuRunner(*parts, link.states, handoffs=link.handoffs)
            return CudaRunner(
                *parts,
                CudaGraphs(self.device, self._config.device_timeout_seconds),
                max_batch_tokens=self._config.max_batch_tokens,
            )


def _task_of_sequences(checkpoint: Checkpoint, config: EngineConfig) -> Task:
    """Return the task of a model that runs whole sequences.

    Raises:
        CheckpointError: the checkpoint lacks the head of the task.
        ConfigError: its answers are written token by token, and the model does not generate.
    """
    task = config.task or checkpoint.task
    checkpoint.check_task(task)
    if TASKS[task].is_iterative:
        others = [each for each in checkpoint.tasks if not TASKS[each].is_iterative]
        raise ConfigError(
            f'task is "{task}", whose answers are written token by token by a Generator or the server;'
            f" allowed here: {', '.join(others) or 'no task of this checkpoint'}"
        )
    return task
