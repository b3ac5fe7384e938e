"""A loaded decoder: steps in, one token per sequence that samples out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.costs.batch_shape import BatchShape
from varlen.errors import ConfigError
from varlen.execution.device import choose_device, choose_dtype, memory_of
from varlen.execution.fingerprint import cost_fields
from varlen.execution.graphs import CudaGraphs
from varlen.execution.kv_cache import KvSize, kv_size, new_caches
from varlen.execution.linear_paths import PACKED, STEP_ROWS, choose_paths
from varlen.execution.model_info import GraphUse
from varlen.execution.source_encoder import SourceEncoder
from varlen.execution.step_cpu import CpuSteps
from varlen.execution.step_cuda import CudaSteps
from varlen.execution.step_warm_up import warm_up_steps
from varlen.generation_options import GenerationOptions
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.layout import Layout
from varlen.memory.out_of_memory import memory_errors
from varlen.models import inputs
from varlen.models.attention import CrossAttention, PagedAttention
from varlen.models.checkpoint import Checkpoint
from varlen.models.registry import (
    DecoderModel,
    EncoderDecoderModel,
    load_decoder,
    load_encoder_decoder,
)
from varlen.program.program import Program
from varlen.program.recorder import Recorder
from varlen.request import Prompt, Reply, Request, RequestOptions
from varlen.sequence import (
    Batch,
    BeamStep,
    Chunk,
    GeneratedSequence,
    RequestState,
    SampledToken,
    StepBatch,
)
from varlen_kernels.cpu import copy_blocks
from varlen_kernels.dispatch import kernels_for

# Chooses what each row of logits goes on with, `[sequences, vocabulary]` fp32, which it may overwrite.
Choose: TypeAlias = Callable[
    [Tensor, Sequence[GeneratedSequence]], Sequence[SampledToken | BeamStep]
]

# Largest step unless the settings say otherwise; docs/decisions/0019-cpu-decoding.md compares sizes.
_STEP_TOKENS = {"cpu": 128, "cuda": 512}
# Longest source text, likewise.
_SOURCE_TOKENS = 512
_GREEDY = GenerationOptions(temperature=0.0)


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
        max_step_tokens: largest step, in tokens.
        weight_bytes: memory of the weights, in bytes.
        kv: size of the KV caches.
        programs: the step of the decoder, then the encoder if there is one.
        arenas: memory of their intermediates.
        graph_use: cost of the CUDA graphs, if there are any.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        choose: Choose,
        *,
        gpu: int = 0,
        kernels: object | None = None,
    ) -> None:
        """Load the weights, record the step and reserve the KV caches.

        Args:
            checkpoint: the checkpoint to load.
            config: the settings.
            choose: chooses tokens from logits on the device of the settings.
            gpu: number of the GPU, if the model runs on one.
            kernels: a module with the functions that ops name; None selects the device's own.

        Raises:
            CheckpointError: the checkpoint is incomplete.
            ConfigError: a limit does not fit the checkpoint, or the device is absent.
        """
        has_sources = checkpoint.translate is not None
        checkpoint.check_task("translate" if has_sources else "generate")
        self.max_sequence_tokens = sequence_limit(checkpoint, config)
        self.device = choose_device(config.device, gpu)
        self.max_step_tokens = step_limit(checkpoint, config, self.device)
        check_step_dtype(config)
        self.dtype = choose_dtype(config.dtype, self.device)
        model: DecoderModel | EncoderDecoderModel
        load = load_encoder_decoder if has_sources else load_decoder
        model = load(checkpoint, self.dtype, self.device)
        self.vocab_size = model.vocab_size
        self.kv = kv_size(
            config,
            self.device,
            self.dtype,
            model.attention_heads,
            num_layers=model.num_layers,
            # a source and its target
            lengths=[self.max_sequence_tokens] * (2 if has_sources else 1),
            has_beams=has_sources,
        )
        new_recorder = partial(
            Recorder,
            for_gpu=self.device.type == "cuda",
            approximate_gelu=config.approximate_gelu,
        )
        self.programs = record_steps(model, self.kv, new_recorder)
        del model
        self.weight_bytes = sum(program.weight_bytes for program in self.programs)
        self._caches = new_caches(self.programs[0].states, self.device)
        self._choose = choose
        kernels = kernels or kernels_for(self.device)
        if self.device.type == "cpu":
            fields = cost_fields(checkpoint, self.device)
            self.programs = tuple(
                choose_paths(
                    program,
                    kernels,
                    config,
                    fields,
                    default=PACKED,
                    rows=STEP_ROWS,
                    threads=torch.get_num_threads(),
                )
                for program in self.programs
            )
        self.arenas = make_arenas(
            self.programs, config, self.device, max_step_tokens=self.max_step_tokens
        )
        parts = self.programs[0], kernels, self.arenas[0], self._caches
        block_size = self.kv.block_size
        self._steps: DeviceSteps
        self.graph_use = GraphUse()
        if self.device.type == "cuda":
            blocks = -(-self.max_sequence_tokens // block_size)
            self._steps = CudaSteps(
                *parts,
                block_size=block_size,
                blocks_per_sequence=blocks,
                blocks_per_source=blocks if has_sources else 0,
                graphs=CudaGraphs(self.device, config.device_timeout_seconds),
            )
            self.graph_use = self._steps.graph_use
        else:
            self._steps = CpuSteps(*parts, block_size=block_size)
        self._encoder: SourceEncoder | None = None
        if has_sources:
            encoder_parts = self.programs[1], kernels, self.arenas[1], self._caches
            self._encoder = SourceEncoder(*encoder_parts, block_size=block_size)

    def run_batch(self, batch: Batch) -> Sequence[SampledToken | BeamStep]:
        """Return what each row of logits goes on with, chunk by chunk.

        Raises:
            MemoryError: too little memory for what the step needs beside the arena.
        """
        step = cast(StepBatch, batch)
        with memory_errors(), torch.inference_mode(), self._steps.stream():
            self._copy_blocks(step.copies)
            if self._encoder is not None:
                self._encoder.encode(step.chunks)
            logits = self._steps.logits(step.chunks)
            return self._choose(logits, [each for chunk in step.chunks for each in chunk.samples])

    def warm_up(self) -> None:
        """Run a prompt and a token, so that the first request runs at normal speed."""
        self._copy_blocks([(0, 0)])
        # a token, and its block
        source: tuple[int, ...] = () if self._encoder is None else (0,)
        source_block_ids = (0,) if source else ()
        prompt = Prompt(
            np.zeros(2, dtype=np.int32),
            source_ids=np.array(source, dtype=np.int32) if source else None,
        )
        drawn, searched = GenerationOptions(top_k=2, top_p=0.5), GenerationOptions(num_beams=2)
        for options in (searched,) if source else (_GREEDY, drawn, searched):
            request = Request((prompt,), RequestOptions(generation=options))
            # both in one block, even if it holds one token
            lengths = {1, min(2, self.kv.block_size, self.arenas[0].max_tokens)}
            for length in sorted(lengths, reverse=True):
                # never answered
                (sequence,) = RequestState(request, cast(Reply, None), 0.0).sequences
                assert isinstance(sequence, GeneratedSequence)
                chunk = Chunk(
                    sequence, 0, (0,) * length, (0,), (sequence,), source_block_ids, source
                )
                shape = BatchShape.of([length])
                self.run_batch(StepBatch((sequence,), shape, 0.0, "warm-up", (chunk,)))
        if self.device.type == "cuda":
            self._warm_up_kernels()
        self._check_numbers(chunk)

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

    def _warm_up_kernels(self) -> None:
        """Run steps of prompts of all forms, so that none compiles a kernel in service."""
        largest = self.arenas[0].largest
        steps = warm_up_steps(
            max_tokens=largest["tokens"],
            max_length=self.max_sequence_tokens,
            max_sequences=largest["logit_rows"],
            block_size=self.kv.block_size,
            has_sources=self._encoder is not None,
        )
        with torch.inference_mode(), self._steps.stream():
            for chunks in steps:
                if self._encoder is not None:
                    self._encoder.encode(chunks)
                self._steps.logits(chunks)

    def _check_numbers(self, like: Chunk) -> None:
        """Run random tokens in the largest step that only decodes.

        Args:
            like: a chunk whose sequence and source each of them has.

        Raises:
            ConfigError: the logits hold NaN.
        """
        count = self.arenas[0].largest["logit_rows"]
        token_ids = np.random.default_rng(0).integers(0, self.vocab_size, count).tolist()
        chunks = [
            like._replace(token_ids=(token_id,), block_ids=(index % self.kv.num_blocks,))
            for index, token_id in enumerate(token_ids)
        ]
        with torch.inference_mode(), self._steps.stream():
            has_nan = bool(self._steps.logits(chunks).isnan().any())
        if has_nan:
            raise ConfigError(
                f"random tokens of {count} sequences have logits with NaN in {self.dtype}: set dtype to bf16 or fp32"
            )

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, destinations = torch.tensor(np.array(copies).T, device=self.device)
        for cache in self._caches.values():
            if self.device.type == "cpu":
                copy_blocks(cache, sources, destinations)
            else:
                cache[destinations] = cache[sources]


def check_step_dtype(config: EngineConfig) -> None:
    """Raise ConfigError for int8, which no device generates in."""
    if config.dtype == "int8":
        raise ConfigError(
            'dtype is "int8", which serves tasks of one step; allowed for generate and translate:'
            " auto, fp32, fp16, bf16"
        )


def sequence_limit(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the length of the longest sequence, prompt and answer together, in tokens.

    Raises:
        ConfigError: the configured one is longer than the checkpoint allows.
    """
    limit = config.max_sequence_tokens or checkpoint.max_sequence_tokens
    if checkpoint.translate is not None:
        limit = min(limit, _source_limit(config))
    if limit > checkpoint.position_limit:
        raise ConfigError(
            f"max_sequence_tokens is {limit}; this checkpoint has positions for {checkpoint.position_limit}"
        )
    return limit


def record_steps(
    model: DecoderModel | EncoderDecoderModel,
    kv: KvSize,
    new_recorder: Callable[[], Recorder] = Recorder,
) -> tuple[Program, ...]:
    """Return the program of a decoder's step, then that of the encoder, if any.

    The encoder's program has no outputs: it stores keys and values for the decoder.

    Args:
        model: the model to record.
        kv: sizes of its KV caches.
        new_recorder: starts the recording of each program.
    """
    caches = kv.num_blocks, kv.block_size, kv.dtype
    ops, attention = new_recorder(), PagedAttention(*caches)
    others: tuple[Program, ...] = ()
    if isinstance(model, EncoderDecoderModel):
        cross, encoder_ops = CrossAttention(*caches), new_recorder()
        model.record_encoder(encoder_ops, cross)
        hidden = model.record(ops, attention, cross)
        others = (encoder_ops.finish(),)
    else:
        hidden = model.record(ops, attention)
    rows = ops.select_rows(hidden, inputs.logit_rows(ops))
    return (ops.finish(model.record_logits(ops, rows)), *others)


def step_limit(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> int:
    """Return the size of the largest step, in tokens."""
    if config.max_step_tokens:
        return config.max_step_tokens
    if checkpoint.translate is not None:
        return _source_limit(config) + config.max_running_sequences
    return max(_STEP_TOKENS[device.type], config.max_running_sequences)


def _source_limit(config: EngineConfig) -> int:
    """Return the longest source, which is encoded in one step beside every running sequence.

    Raises:
        ConfigError: a step has no room for one.
    """
    if not config.max_step_tokens:
        return _SOURCE_TOKENS
    if config.max_step_tokens <= config.max_running_sequences:
        raise ConfigError(
            f"max_step_tokens is {config.max_step_tokens}; it must hold a source text beside a token of each of the"
            f" {config.max_running_sequences} running sequences (max_running_sequences)"
        )
    return config.max_step_tokens - config.max_running_sequences


def make_arenas(
    programs: Sequence[Program], config: EngineConfig, device: torch.device, *, max_step_tokens: int
) -> tuple[Arena, ...]:
    """Return an arena for the largest step of each program.

    Raises:
        ConfigError: `arena_bytes` cannot hold them, or the device has too little memory.
    """
    layouts = [Layout(program.buffers, alignment_of(device)) for program in programs]
    largest = {
        "tokens": max_step_tokens,
        "sequences": config.max_running_sequences,
        "logit_rows": config.max_running_sequences,
    }
    allowed = config.arena_limit(memory_of(device))
    needed = sum(layout.plan(largest).footprint for layout in layouts)
    if needed > allowed:
        raise ConfigError(
            f"arena_bytes allows {allowed} bytes; a step of {max_step_tokens} tokens needs {needed}:"
            " lower max_step_tokens"
        )
    try:
        with memory_errors():
            return tuple(Arena(layout, largest, device) for layout in layouts)
    except MemoryError:
        raise ConfigError(
            f"a step of {max_step_tokens} tokens needs {needed} bytes, more than the device has free:"
            " lower max_step_tokens"
        ) from None
