"""The memory of keys and values: how many blocks it has, and its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.errors import ConfigError
from varlen.execution.device import device_memory, memory_of
from varlen.program.heads import AttentionHeads
from varlen.program.program import State

# Tokens of a block unless the settings say otherwise; docs/decisions/0019-cpu-decoding.md has measurements.
_GPU_BLOCK_TOKENS = 16
_BLOCK_TOKENS = {"cpu": 64, "cuda": _GPU_BLOCK_TOKENS}


@dataclass(frozen=True, slots=True)
class KvSize:
    """Size of the KV caches of one model.

    Attributes:
        num_blocks: blocks of each cache.
        block_size: tokens of a block.
        block_bytes: memory of a block in all layers, keys and values, in bytes.
        dtype: dtype of keys and values.
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
) -> KvSize:
    """Return the size of the caches that the settings allow.

    Args:
        config: the settings.
        device: holds the caches.
        dtype: dtype of the activations, and of keys and values.
        heads: head layout of each layer, in this process.
        num_layers: number of layers.
        has_beams: whether most sequences are beams, which copy a block when they part.
        processes: processes that share `kv_bytes`.
        lengths: lengths of the longest sequence, and of the longest source text if there are any.

    Raises:
        ConfigError: `kv_bytes` allows no block, or the GPU cannot read blocks of this size.
    """
    default = _GPU_BLOCK_TOKENS if has_beams else _BLOCK_TOKENS[device.type]
    block_size = config.kv_block_tokens or default
    if device.type == "cuda" and block_size % _GPU_BLOCK_TOKENS:
        raise ConfigError(
            f"kv_block_tokens is {block_size}; allowed on a GPU: multiples of {_GPU_BLOCK_TOKENS}"
        )
    block_bytes = 2 * num_layers * heads.keys * heads.dim * block_size * dtype.itemsize
    allowed = config.kv_limit(memory_of(device)) // processes
    if allowed < block_bytes:
        raise ConfigError(
            f"kv_bytes allows {allowed} bytes; one block of {block_size} tokens needs {block_bytes}"
        )
    useful = config.max_running_sequences * sum(-(-length // block_size) for length in lengths)
    return KvSize(min(allowed // block_bytes, useful), block_size, block_bytes, dtype)


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
