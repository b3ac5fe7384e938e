"""A loaded decoder: steps in, one token per sequence that samples out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import ConfigError
from varlen.execution.device import choose_device, choose_dtype, memory_of
from varlen.execution.kv_cache import kv_size, new_caches
from varlen.execution.packed_weights import pack_linear_layers
from varlen.execution.step_cpu import CpuSteps
from varlen.execution.step_cuda import CudaSteps
from varlen.generation_options import GenerationOptions
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.layout import Layout
from varlen.memory.out_of_memory import memory_errors
from varlen.memory.usage import Dims
from varlen.models import inputs
from varlen.models.attention import PagedAttention
from varlen.models.checkpoint import Checkpoint
from varlen.models.registry import load_decoder
from varlen.program.program import Program
from varlen.program.recorder import Recorder
from varlen.request import Prompt, Reply, Request, RequestOptions
from varlen.sequence import (
    Batch,
    Chunk,
    GeneratedSequence,
    RequestState,
    SampledToken,
    StepBatch,
)
from varlen_kernels.dispatch import decoder_kernels_for

# Chooses a token for each row of logits, `[sequences, vocabulary]` fp32, which it may overwrite.
Sample: TypeAlias = Callable[[Tensor, Sequence[GeneratedSequence]], list[SampledToken]]


class DeviceSteps(Protocol):
    """Runs a program's steps on one device."""

    def stream(self) -> AbstractContextManager[object]:
        """Return the context in which everything on the device is done."""

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of a step, `[logit rows, vocabulary]`, valid until the next one."""

    def close(self) -> None:
        """Release device memory."""


class StepRunner:
    """Runs the steps of one model on one device. Not for two threads at once.

    Attributes:
        device: device of weights, caches and steps.
        dtype: data type of weights and activations.
        vocab_size: token ids are below this.
        max_sequence_tokens: longest sequence, prompt and answer together, in tokens.
        weight_bytes: memory of the weights, in bytes.
        kv: size of the KV caches.
        program: the recorded step.
        arena: memory of the intermediates.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, sample: Sample, *, gpu: int = 0
    ) -> None:
        """Load the weights, record the step and reserve the KV caches.

        Args:
            checkpoint: the checkpoint to load.
            config: the settings.
            sample: chooses tokens from logits on the device of the settings.
            gpu: number of the GPU, if the model runs on one.

        Raises:
            CheckpointError: the checkpoint is incomplete.
            ConfigError: a limit does not fit the checkpoint, or the device is absent.
        """
        checkpoint.check_task("generate")
        self.max_sequence_tokens = sequence_limit(checkpoint, config)
        self.device = choose_device(config.device, gpu)
        self.dtype = choose_dtype(config.dtype, self.device)
        decoder = load_decoder(checkpoint, self.dtype, self.device)
        self.vocab_size = decoder.vocab_size
        self.kv = kv_size(
            config,
            self.device,
            self.dtype,
            decoder.attention_heads,
            num_layers=decoder.num_layers,
            max_sequence_tokens=self.max_sequence_tokens,
        )
        ops = Recorder()
        attention = PagedAttention(self.kv.num_blocks, self.kv.block_size, self.kv.dtype)
        hidden = decoder.record(ops, attention)
        rows = ops.select_rows(hidden, inputs.logit_rows(ops))
        self.program: Program = ops.finish(decoder.record_logits(ops, rows))
        self.weight_bytes = self.program.weight_bytes
        self._caches = new_caches(self.program.states, self.device)
        self._sample = sample
        del decoder, ops, attention, hidden, rows
        kernels = decoder_kernels_for(self.device)
        if self.device.type == "cpu":
            self.program = pack_linear_layers(self.program)
        self.arena = _make_arena(self.program, config, self.device)
        parts = self.program, kernels, self.arena, self._caches
        block_size = self.kv.block_size
        self._steps: DeviceSteps
        if self.device.type == "cuda":
            blocks = -(-self.max_sequence_tokens // block_size)
            self._steps = CudaSteps(*parts, block_size=block_size, blocks_per_sequence=blocks)
        else:
            self._steps = CpuSteps(*parts, block_size=block_size)

    def run_batch(self, batch: Batch) -> list[SampledToken]:
        """Return the token of each sequence that samples, chunk by chunk.

        Raises:
            MemoryError: too little memory for what the step needs beside the arena.
        """
        step = cast(StepBatch, batch)
        with memory_errors(), torch.inference_mode(), self._steps.stream():
            self._copy_blocks(step.copies)
            logits = self._steps.logits(step.chunks)
            return self._sample(logits, [each for chunk in step.chunks for each in chunk.samples])

    def warm_up(self) -> None:
        """Run a prompt and a token, so that the first request runs at normal speed."""
        prompt = Prompt(np.zeros(2, dtype=np.int32))
        for options in (GenerationOptions(temperature=0.0), GenerationOptions(top_k=2, top_p=0.5)):
            request = Request((prompt,), RequestOptions(generation=options))
            # never answered
            (sequence,) = RequestState(request, cast(Reply, None), 0.0).sequences
            assert isinstance(sequence, GeneratedSequence)
            # both in one block, even if it holds one token
            lengths = {1, min(2, self.kv.block_size, self.arena.max_tokens)}
            for length in sorted(lengths, reverse=True):
                chunk = Chunk(sequence, 0, (0,) * length, (0,), (sequence,))
                shape = BatchShape.of([length])
                self.run_batch(StepBatch((sequence,), shape, 0.0, "warm-up", (chunk,)))

    def padding_tokens(self, shape: BatchShape) -> int:  # noqa: ARG002  # of every runner
        """Return 0: a step has no padding."""
        return 0

    def check(self) -> None:
        """Run one op on the device; raise whatever it raises."""
        torch.zeros(1, device=self.device).add_(1).item()

    def close(self) -> None:
        """Release the KV caches, and what runs steps."""
        self._steps.close()
        self._caches.clear()

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, destinations = torch.tensor(np.array(copies).T, device=self.device)
        for cache in self._caches.values():
            cache[destinations] = cache[sources]


def sequence_limit(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the length of the longest sequence, prompt and answer together, in tokens.

    Raises:
        ConfigError: the configured one is longer than the checkpoint allows.
    """
    limit = config.max_sequence_tokens or checkpoint.max_sequence_tokens
    if limit > checkpoint.position_limit:
        raise ConfigError(
            f"max_sequence_tokens is {limit}; this checkpoint has positions for {checkpoint.position_limit}"
        )
    return limit


def _make_arena(program: Program, config: EngineConfig, device: torch.device) -> Arena:
    """Return an arena for the largest step.

    Raises:
        ConfigError: `arena_bytes` cannot hold it, or the device has too little memory.
    """
    layout = Layout(program.buffers, alignment_of(device))
    largest = _largest_dims(config)
    allowed, needed = config.arena_limit(memory_of(device)), layout.plan(largest).footprint
    if needed > allowed:
        raise ConfigError(
            f"arena_bytes allows {allowed} bytes; a step of {config.max_step_tokens} tokens needs {needed}:"
            " lower max_step_tokens"
        )
    try:
        with memory_errors():
            return Arena(layout, largest, device, allowed)
    except MemoryError:
        raise ConfigError(
            f"a step of {config.max_step_tokens} tokens needs {needed} bytes, more than the device has free:"
            " lower max_step_tokens"
        ) from None


def _largest_dims(config: EngineConfig) -> Dims:
    return {"tokens": config.max_step_tokens, "logit_rows": config.max_running_sequences}
