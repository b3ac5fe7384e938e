"""A loaded model: prompts in, one fp32 array per prompt out."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Protocol

import numpy as np
import torch

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import ConfigError
from varlen.execution.cpu import CpuRunner, limit_primitives
from varlen.execution.cuda import CudaRunner
from varlen.execution.device import choose_device, choose_dtype, memory_of
from varlen.execution.fingerprint import cost_fields, device_name
from varlen.execution.graphs import CudaGraphs
from varlen.execution.int8_encoder import int8_product, to_int8
from varlen.execution.linear_paths import BATCH_ROWS, PLAIN, choose_paths
from varlen.execution.model_info import GraphUse, ModelInfo, WorkerUse
from varlen.execution.packing import largest_dims
from varlen.execution.sparse_rows import active_terms
from varlen.execution.warm_up import check_numbers
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.layout import Layout
from varlen.memory.out_of_memory import memory_errors
from varlen.models.checkpoint import Checkpoint
from varlen.models.heads import record_head
from varlen.models.registry import load_encoder, load_heads
from varlen.models.vector_layers import load_layers
from varlen.program.program import Program
from varlen.program.recorder import Recorder
from varlen.request import (
    DEFAULT_OPTIONS,
    SHORTEST_PROMPT,
    Float32Array,
    Prompt,
    RequestOptions,
)
from varlen.sequence import Batch
from varlen.tasks import ITERATIVE_TASKS, Task
from varlen_kernels.cpu import compiling
from varlen_kernels.dispatch import kernels_for


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
        info: what the engine knows of the model.
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
    ) -> None:
        """Load the weights and record the forward pass; on a GPU, capture every bucket.

        Args:
            checkpoint: the checkpoint to load.
            config: the settings.
            gpu: number of the GPU, if the model runs on one.
            kernels: a module with the functions that ops name; None selects the device's own.
            workers: number of runners of the model, which share `arena_bytes`.
            measures: whether to measure the fastest way to run linear layers, unless `warmup_seconds` is 0.

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
        dtype = choose_dtype(config.dtype, self.device)
        encoder = load_encoder(checkpoint, dtype, self.device)
        ops = Recorder(
            for_gpu=self.device.type == "cuda",
            approximate_gelu=config.approximate_gelu,
            has_key_lengths=task == "token_embed" and checkpoint.hides_tokens,
        )
        hidden = encoder.record(ops)
        layers = load_layers(checkpoint.folder, checkpoint.vector_layers(task), self.device)
        heads = load_heads(checkpoint, encoder, task, dtype, self.device)
        output = record_head(
            ops,
            task,
            heads,
            hidden,
            checkpoint.pooling,
            layers,
            checkpoint.splade,
            pools_prompt=checkpoint.pools_prompt,
        )
        self._kernels = kernels or kernels_for(self.device)
        self.program: Program = ops.finish(output)
        fields = cost_fields(checkpoint, self.device)
        if config.approximate_gelu:
            fields = {**fields, "gelu": "tanh"}
        if config.dtype == "int8":
            self.program = to_int8(self.program, encoder, checkpoint)
            fields = {**fields, "int8": int8_product()}
        # packed weights have no address
        weight_bytes = self.program.weight_bytes
        if measures and self.device.type == "cpu":
            limit_primitives()
            self.program = choose_paths(
                self.program,
                self._kernels,
                config,
                fields,
                default=PLAIN,
                rows=BATCH_ROWS,
                threads=1,
            )
        self._config = config
        self.arena = _make_arena(self.program, config, self.device, workers)
        self.device_runner: DeviceRunner = self._make_device_runner()
        self.info = ModelInfo(
            task,
            self.device.type,
            device_name(self.device),
            "int8" if config.dtype == "int8" else str(dtype).removeprefix("torch."),
            encoder.vocab_size,
            encoder.type_vocab_size,
            longest,
            self.arena.max_tokens,
            weight_bytes,
            self.arena.capacity,
            config.execution == "padded",
            workers,
            fields,
        )
        self.slots, self.graph_use = 1, GraphUse()
        if isinstance(self.device_runner, CudaRunner):
            self.slots, self.graph_use = CudaRunner.slots, self.device_runner.graph_use
            check_numbers(self.device_runner, self.info, config.device_timeout_seconds)

    def another(self) -> "Runner":
        """Return a runner of the same model on its CPU, with another arena."""
        other = copy(self)
        other.arena = _make_arena(self.program, self._config, self.device, self.info.workers)
        other.device_runner = other._make_device_runner()
        return other

    def run(
        self, prompts: Sequence[Prompt], options: Sequence[RequestOptions]
    ) -> list[Float32Array]:
        """Return the answer of each sequence, in the order given.

        Args:
            prompts: checked, at least one, together at most `max_batch_tokens` long, padding included if they
                are padded.
            options: one per prompt.

        Returns:
            Per sequence: embed `[hidden]`, sparse_embed `[terms, 2]` (see `active_terms`), classify and rerank
            `[labels]`, hidden `[tokens, hidden]`, token_classify `[tokens, labels]`, token_embed `[vectors, features]`.
            Views of arrays made for this call.

        Raises:
            MemoryError: too little memory for what the batch needs beside the arena.
        """
        with memory_errors():
            answers = self.device_runner.run(*self._padded(prompts, options))
            return self._finished(prompts, answers[: len(prompts)])

    def run_batch(self, batch: Batch) -> list[Float32Array]:
        """Return the answer of each sequence of a batch; see `run`."""
        sequences = batch.sequences
        return self.run([each.prompt for each in sequences], [each.options for each in sequences])

    def launch_batch(self, batch: Batch) -> Callable[[], list[Float32Array]]:
        """Start a batch on a GPU; return a function that waits for its answers."""
        assert isinstance(self.device_runner, CudaRunner)
        sequences = batch.sequences
        prompts, options = [each.prompt for each in sequences], [each.options for each in sequences]
        with memory_errors():
            launched = self.device_runner.launch(*self._padded(prompts, options))

        def answers() -> list[Float32Array]:
            with memory_errors():
                return self._finished(prompts, launched()[: len(prompts)])

        return answers

    def padding_tokens(self, shape: BatchShape) -> int:
        """Return the number of padding tokens of a batch of this shape."""
        return self.info.padding_tokens(shape)

    def use(self) -> WorkerUse:
        """Return the memory use. From any thread."""
        use, layout = self.arena.use(), self.arena.layout
        return WorkerUse(
            use.reserved_bytes,
            use.footprint_bytes,
            use.peak_live_bytes,
            use.chunks,
            layout.plan_seconds,
            layout.plan_hits,
            layout.plan_misses,
        )

    def compile(self) -> None:
        """Compile what batches need, so that none of them has to."""
        if not isinstance(self.device_runner, CpuRunner):
            self.check()
            return
        self.device_runner.compile()
        with compiling():
            self.check()

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
            return [
                vectors if prompt.kept_places is None else vectors[prompt.kept_places]
                for prompt, vectors in zip(prompts, answers, strict=True)
            ]
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
        try:
            with memory_errors():
                if self.device.type == "cpu":
                    return CpuRunner(*parts)
                return CudaRunner(
                    *parts, CudaGraphs(self.device, self._config.device_timeout_seconds)
                )
        except MemoryError:
            raise ConfigError(
                f"the GPU has too little memory for the graphs of batches up to {self.arena.max_tokens} tokens:"
                " lower max_batch_tokens or max_batch_sequences"
            ) from None


def _padding(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts that fill each sequence up to the longest; their answers are dropped."""
    longest = max(prompt.num_tokens for prompt in prompts)
    missing = [longest - prompt.num_tokens for prompt in prompts]
    return [Prompt(np.zeros(count, dtype=np.int32)) for count in missing if count]


def sequence_limit(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the length of the longest sequence that is served, in tokens.

    Where no setting says it, it is the checkpoint's own limit, or what a batch and the queue can hold.

    Raises:
        ConfigError: the configured one is longer than the checkpoint or a batch can hold.
    """
    limit = config.max_sequence_tokens
    if limit is None:
        held = config.max_batch_tokens, config.max_queued_tokens
        return min(checkpoint.max_sequence_tokens, *held)
    if limit > checkpoint.position_limit:
        raise ConfigError(
            f"max_sequence_tokens is {limit}; this checkpoint has position embeddings for {checkpoint.position_limit}"
        )
    for name in ("max_batch_tokens", "max_queued_tokens"):
        if limit > getattr(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)}; it must hold the longest sequence, {limit} tokens"
            )
    return limit


def _make_arena(
    program: Program, config: EngineConfig, device: torch.device, workers: int
) -> Arena:
    """Return an arena for the largest batch that the settings allow each worker.

    Raises:
        ConfigError: the arena cannot hold one token, or the device has too little memory.
    """
    layout = Layout(program.buffers, alignment_of(device))
    allowed = config.arena_limit(memory_of(device)) // workers
    # a graph has room for as many sequences as a batch may have, and no more
    most_sequences = _most_sequences(config) if device.type == "cuda" else None
    largest = partial(largest_dims, max_sequences=most_sequences)
    most = layout.max_tokens_that_fit(allowed, config.max_batch_tokens, largest)
    if not most:
        needed = layout.plan(largest(1)).footprint
        raise ConfigError(
            f"arena_bytes allows {allowed} bytes for each of {workers} workers; this model needs {needed} for one token"
        )
    try:
        with memory_errors():
            return Arena(layout, largest(most), device)
    except MemoryError:
        footprint = layout.plan(largest(most)).footprint
        raise ConfigError(
            f"the intermediates of {most} tokens need {footprint} bytes, more than the device "
            "has free: lower max_batch_tokens or arena_bytes"
        ) from None


def _most_sequences(config: EngineConfig) -> int | None:
    """Return the most sequences of a batch, with padding; None without a limit."""
    if config.policy == "token_budget":
        return None
    count = config.max_batch_sequences
    return 2 * count if config.execution == "padded" else count
