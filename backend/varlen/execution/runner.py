"""A loaded model: prompts in, one fp32 array per prompt out."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Protocol, TypeAlias

import numpy as np

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import ConfigError
from varlen.execution.arenas import batch_arena
from varlen.execution.cpu.runner import CpuRunner
from varlen.execution.cuda.graphs import CudaGraphs
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.device import choose_device, device_memory
from varlen.execution.executor import CoreShare
from varlen.execution.fingerprint import device_name
from varlen.execution.model_info import GraphUse, ModelInfo, sequence_limit
from varlen.execution.packing import active_terms
from varlen.execution.programs import load_program
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.execution.warm_up import check_numbers
from varlen.memory.memory_use import MemoryUse
from varlen.memory.out_of_memory import memory_errors
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import (
    DEFAULT_OPTIONS,
    SHORTEST_PROMPT,
    Float32Array,
    Prompt,
    RequestOptions,
    Vectors,
)
from varlen.scheduling.batch import Batch
from varlen.tasks import ITERATIVE_TASKS, Task
from varlen_kernels.ops import kernels_for

# Prompts and options of a batch.
WorkOfBatch: TypeAlias = tuple[Sequence[Prompt], Sequence[RequestOptions]]


class DeviceRunner(Protocol):
    """Runs a program's batches on one device."""

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence; see `Runner.run`."""

    def close(self) -> None:
        """Release device memory."""


class Runner:
    """Runs batches of one model on one device. Not for two threads at once.

    On a CPU it uses the cores that torch gives its thread; workers give it one.

    Attributes:
        info: model facts for the engine.
        link: link to the other processes that hold the model.
        device: device of its weights and batches.
        program: the recorded forward pass.
        arena: memory of the intermediates.
        device_runner: runs the program.
        slots: batches that may be in flight; more than one if `launch_batch` starts them.
        graph_use: cost of the CUDA graphs, if there are any.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        *,
        gpu: int = 0,
        kernels: object | None = None,
        workers: int = 1,
        measures: bool = False,
        link: RankLink[WorkOfBatch] = NO_OTHERS,
    ) -> None:
        """Load the weights and record the forward pass; on a GPU, capture every bucket.

        Args:
            checkpoint: the checkpoint to load.
            config: the settings.
            gpu: number of the GPU, if the model runs on one.
            kernels: a module with the functions that ops name; None selects the device's own.
            workers: number of runners of the model, which share `arena_bytes`.
            measures: whether to measure the fastest way to run linear layers, unless `warmup_seconds` is 0.
            link: link to the other ranks, if this process holds a part of the model.

        Raises:
            CheckpointError: the checkpoint is incomplete, or lacks the head of the task.
            ConfigError: a limit does not fit the checkpoint, or the device is absent.
        """
        task: Task = config.task or checkpoint.task
        checkpoint.check_task(task)
        if task in ITERATIVE_TASKS:
            others = [each for each in checkpoint.tasks if each not in ITERATIVE_TASKS]
            raise ConfigError(
                f'task is "{task}", whose answers are written token by token by a Generator or the server;'
                f" allowed here: {', '.join(others) or 'no task of this checkpoint'}"
            )
        longest = sequence_limit(checkpoint, config)
        self.device = choose_device(config.device, gpu)
        self._config = config
        self._kernels = kernels or kernels_for(self.device)
        loaded = load_program(
            checkpoint, config, task, self.device, self._kernels, measures=measures, link=link
        )
        self.link = link
        self.program = loaded.program
        self._programs = [part.program for part in loaded.parts] or [self.program]
        self.arena = batch_arena(
            self.program, config, longest, self.device, workers, self._programs
        )
        if link.handoffs is not None:
            part = loaded.parts[link.stage.number]
            link.handoffs.map([part], [self.arena.largest])
        self.device_runner: DeviceRunner = self._make_device_runner()
        self.info = ModelInfo(
            task,
            self.device.type,
            device_name(self.device),
            loaded.dtype,
            loaded.vocab_size,
            loaded.type_vocab_size,
            longest,
            min(config.max_batch_tokens, self.arena.max_tokens),
            self.arena.max_tokens,
            loaded.weight_bytes,
            self.arena.capacity,
            config.execution == "padded",
            workers,
            loaded.cost_fields,
        )
        self.slots, self.graph_use = 1, GraphUse()
        if isinstance(self.device_runner, CudaRunner):
            self.slots, self.graph_use = CudaRunner.slots, self.device_runner.graph_use
            check_numbers(self.device_runner, self.info, config.device_timeout_seconds)

    def another(self) -> "Runner":
        """Return a runner of the same model on its CPU, with another arena."""
        other = copy(self)
        other.arena = batch_arena(
            self.program,
            self._config,
            self.info.max_sequence_tokens,
            self.device,
            self.info.workers,
            self._programs,
        )
        other.device_runner = other._make_device_runner()
        return other

    def share_cores(self, share: CoreShare) -> None:
        """Run batches on all cores of its CPU while `share` says that they run alone."""
        assert isinstance(self.device_runner, CpuRunner)
        self.device_runner.share_cores(share, self.info.workers)

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence, in the order given.

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
        with memory_errors(), self.link.running((prompts, options)):
            answers = self.device_runner.run(*self._padded(prompts, options))
        if not self.link.stage.is_last:
            return []
        with memory_errors():
            return self._finished(prompts, answers[: len(prompts)])

    def run_batch(self, batch: Batch) -> list[Float32Array]:
        """Return the answer of each sequence of a batch; see `run`."""
        return self.run(batch.prompts, batch.options)

    def launch_batch(self, batch: Batch) -> Callable[[], list[Float32Array]]:
        """Start a batch on a GPU; return a function that waits for its answers."""
        assert isinstance(self.device_runner, CudaRunner)
        prompts = batch.prompts
        with memory_errors():
            launched = self.device_runner.launch(*self._padded(prompts, batch.options))

        def answers() -> list[Float32Array]:
            with memory_errors():
                return self._finished(prompts, launched()[: len(prompts)])

        return answers

    def padding_tokens(self, shape: BatchShape) -> int:
        """Return the number of padding tokens of a batch of this shape."""
        return self.info.padding_tokens(shape)

    def use(self) -> MemoryUse:
        """Return the memory use. From any thread."""
        return self.arena.use()

    def release_arena(self) -> None:
        """Return the memory of intermediates to the system, while no batch runs."""
        self.arena.release()

    def compile(self) -> None:
        """Compile what batches need, so that none of them has to."""
        self.compile_products()
        self.check()

    def compile_products(self) -> None:
        """Compile the linear layers for batches of usual sizes."""
        if isinstance(self.device_runner, CpuRunner):
            self.device_runner.compile()

    def check(self) -> None:
        """Run one sequence of one token; raise whatever it raises."""
        self.run([SHORTEST_PROMPT], [DEFAULT_OPTIONS])

    def close(self) -> None:
        """Release device memory."""
        self.device_runner.close()

    def _finished(
        self, prompts: Sequence[Prompt], answers: list[Float32Array]
    ) -> list[Float32Array]:
        """Return answers in the form in which they leave the runner."""
        if self.info.task == "sparse_embed":
            return [active_terms(weights) for weights in answers]
        if self.info.task == "token_embed":
            return [_kept_vectors(*each) for each in zip(prompts, answers, strict=True)]
        return answers

    def _padded(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> tuple[Sequence[Prompt], Sequence[RequestOptions]]:
        """Return a batch and, if the model is padded, the prompts that pad it, last."""
        if not self.info.is_padded:
            return prompts, options
        padding = _padding(prompts)
        return [*prompts, *padding], [*options, *(DEFAULT_OPTIONS for _ in padding)]

    def _make_device_runner(self) -> DeviceRunner:
        parts = self.program, self._kernels, self.arena
        with device_memory(
            f"the GPU has too little memory for the graphs of batches up to {self.arena.max_tokens} tokens:"
            " lower max_batch_tokens, max_sequence_tokens or max_batch_sequences"
        ):
            if self.device.type == "cpu":
                return CpuRunner(*parts, self.link.states, self.link.handoffs)
            return CudaRunner(
                *parts,
                CudaGraphs(self.device, self._config.device_timeout_seconds),
                max_batch_tokens=self._config.max_batch_tokens,
            )


def _kept_vectors(prompt: Prompt, vectors: Float32Array) -> Float32Array:
    places = prompt.payload_tokens(Vectors)
    return vectors if places is None else vectors[places]


def _padding(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts that fill each sequence up to the longest; their answers are dropped."""
    longest = max(prompt.num_tokens for prompt in prompts)
    missing = [longest - prompt.num_tokens for prompt in prompts]
    return [Prompt(np.zeros(count, dtype=np.int32)) for count in missing if count]
