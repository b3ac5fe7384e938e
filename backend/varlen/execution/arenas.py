"""The arenas of a model, each for the largest batch that settings and memory allow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution.device import device_memory, memory_of
from varlen.execution.packing import largest_dims, with_adapted
from varlen.memory.arena import Arena, alignment_of
from varlen.memory.planner import Dims, Layout, max_tokens_that_fit
from varlen.program.program import Program, State
from varlen.program.rank import AttentionHeads
from varlen_kernels.reference.paged import FP8

# Tokens of a block unless the settings say otherwise; docs/decisions/0019-cpu-decoding.md has measurements.
_GPU_BLOCK_TOKENS = 16
_BLOCK_TOKENS = {"cpu": 64, "cuda": _GPU_BLOCK_TOKENS}
# Most rows of a step of few rows; with more, products of cuBLAS take less time.
MOST_ROWS = 64
# GPUs with instructions that convert fp8, from this compute capability on.
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class KvSize:
    """Size of the KV caches of one model.

    Attributes:
        block_bytes: memory of a block in all layers, keys and values, in bytes; with a draft model in both.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    dtype: torch.dtype


def kv_size(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    heads: AttentionHeads,
    *,
    num_layers: int,
    lengths: Sequence[int],
    has_beams: bool,
    processes: int = 1,
    beside: int = 0,
) -> KvSize:
    """Return the size of the caches that the settings allow.

    Args:
        dtype: dtype of the activations, and of keys and values unless the settings say fp8.
        heads: head layout of each layer, in this process.
        has_beams: whether most sequences are beams, which copy a block when they part.
        processes: processes that share `kv_bytes`.
        beside: bytes of a block of a draft model, which has as many blocks.
        lengths: lengths of the longest sequence, and of the longest source text if there are any.

    Raises:
        ConfigError: `kv_bytes` allows no block, or the device cannot read blocks of this size or dtype.
    """
    if config.kv_cache_dtype == "fp8":
        dtype = _fp8_of(device, dtype)
    default = _GPU_BLOCK_TOKENS if has_beams else _BLOCK_TOKENS[device.type]
    block_size = config.kv_block_tokens or default
    if device.type == "cuda" and block_size % _GPU_BLOCK_TOKENS:
        raise ConfigError(
            f"kv_block_tokens is {block_size}; allowed on a GPU: multiples of {_GPU_BLOCK_TOKENS}"
        )
    block_bytes = beside + 2 * num_layers * heads.keys * heads.dim * block_size * dtype.itemsize
    allowed = config.kv_limit(memory_of(device, processes)) // processes
    if allowed < block_bytes:
        raise ConfigError(
            f"kv_bytes allows {allowed} bytes; one block of {block_size} tokens needs {block_bytes}"
        )
    useful = config.max_running_sequences * sum(-(-length // block_size) for length in lengths)
    return KvSize(min(allowed // block_bytes, useful), block_size, block_bytes, dtype)


def _fp8_of(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values in 8 bits.

    Raises:
        ConfigError: the device does not convert it, or activations have 32 bits.
    """
    found = "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _FP8_CAPABILITY:
            if dtype == torch.float32:
                raise ConfigError(
                    'kv_cache_dtype is "fp8", and dtype is fp32; allowed with it: bf16, fp16'
                )
            return FP8
        found = "a GPU of compute capability {}.{}".format(*capability)
    raise ConfigError(
        f'kv_cache_dtype is "fp8", which needs a GPU of compute capability 8.9 or later; the device is {found};'
        " allowed here: auto"
    )


def new_caches(states: Sequence[State], device: torch.device) -> Tensor:
    """Return uninitialised memory for states of one shape: `[states, *shape]`.

    Raises:
        ConfigError: the device has too little memory.
    """
    ((shape, dtype),) = {(state.shape, state.dtype) for state in states}
    size = len(states) * torch.Size(shape).numel() * dtype.itemsize
    with device_memory(
        f"keys and values need {size} bytes, more than the device has free: lower kv_bytes"
    ):
        # on a CPU, memory is taken when a block is first written
        return torch.empty((len(states), *shape), dtype=dtype, device=device)


def caches_of(states: Sequence[State], memory: Tensor) -> dict[str, Tensor]:
    """Return the tensor of each state by name, in the memory of `new_caches`."""
    return {state.name: cache for state, cache in zip(states, memory, strict=True)}


def batch_arenas(
    programs: Sequence[Program],
    config: EngineConfig,
    longest: int,
    device: torch.device,
    workers: int,
    stages: Sequence[Program],
) -> tuple[Arena, ...]:
    """Return the arena of each program, for the largest batch of a worker.

    It holds the longest sequence too.

    Args:
        longest: longest sequence, in tokens.
        stages: the programs of all stages, which run the same batches; none without stages.

    Raises:
        ConfigError: the arena cannot hold one token, or the device has too little memory.
    """
    alignment = alignment_of(device)
    layouts = [Layout(program.buffers, alignment) for program in programs]
    workers *= config.num_processes
    allowed = config.arena_limit(memory_of(device, config.num_processes)) // workers
    # a batch with more tokens is a single sequence
    max_sequences = config.max_batch_tokens
    if device.type == "cuda":
        # a graph has room for as many sequences as a batch may have, and no more
        max_sequences = min(max_sequences, most_sequences(config) or max_sequences)

    def largest(tokens: int) -> Dims:
        dims = largest_dims(tokens, max_sequences)
        if config.execution == "padded":
            # padding is a sequence too, and may have no tokens
            more = {name: 2 * dims[name] for name in ("sequences", "pooled")}
            dims = {**dims, **more, "scores": tokens * min(tokens, longest)}
        return with_adapted(dims, [*programs, *stages])

    together = [[Layout(stage.buffers, alignment)] for stage in stages] or [layouts]
    most_tokens = max(config.max_batch_tokens, longest)
    most = min(max_tokens_that_fit(each, allowed, most_tokens, largest) for each in together)
    if not most:
        needed = sum(layout.plan(largest(1)).footprint for layout in layouts)
        raise ConfigError(
            f"arena_bytes allows {allowed} bytes for each of {workers} workers; this model needs {needed} for one token"
        )
    footprint = sum(layout.plan(largest(most)).footprint for layout in layouts)
    with device_memory(
        f"the intermediates of {most} tokens need {footprint} bytes, more than the device "
        "has free: lower max_batch_tokens, max_sequence_tokens or arena_bytes"
    ):
        return tuple(
            Arena(layout, largest(most), device, grows=config.growing_arena) for layout in layouts
        )


def few_dims(largest: Dims) -> Dims:
    """Return the dimensions of the largest step of few rows."""
    return {name: min(size, MOST_ROWS) for name, size in largest.items()}


def step_arenas(
    programs: Sequence[Program],
    config: EngineConfig,
    device: torch.device,
    *,
    max_step_tokens: int,
    few_rows: Program | None = None,
) -> tuple[Arena, ...]:
    """Return an arena for the largest step of each program.

    Args:
        few_rows: the first program for at most MOST_ROWS tokens, in the same arena.

    Raises:
        ConfigError: `arena_bytes` cannot hold them, or the device has too little memory.
    """
    layouts = [Layout(program.buffers, alignment_of(device)) for program in programs]
    # each sequence of a step has a token
    rows = min(config.max_running_sequences + config.short_slots, max_step_tokens)
    largest: Dims = {"tokens": max_step_tokens, "sequences": rows, "logit_rows": rows}
    largest = with_adapted(largest, programs)
    processes = config.num_processes
    allowed = config.arena_limit(memory_of(device, processes)) // processes
    sizes = [layout.plan(largest).footprint for layout in layouts]
    if few_rows is not None:
        few = Layout(few_rows.buffers, alignment_of(device)).plan(few_dims(largest))
        sizes[0] = max(sizes[0], few.footprint)
    needed = sum(sizes)
    if needed > allowed:
        raise ConfigError(
            f"arena_bytes allows {allowed} bytes; a step of {max_step_tokens} tokens needs {needed}:"
            " lower max_step_tokens"
        )
    with device_memory(
        f"a step of {max_step_tokens} tokens needs {needed} bytes, more than the device has free:"
        " lower max_step_tokens"
    ):
        return tuple(
            Arena(layout, largest, device, grows=config.growing_arena, room=size)
            for layout, size in zip(layouts, sizes, strict=True)
        )


def most_sequences(config: EngineConfig) -> int | None:
    """Return the most sequences of a batch; None without a limit."""
    return None if config.policy == "token_budget" else config.max_batch_sequences
