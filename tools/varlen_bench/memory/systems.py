"""The systems: token ids in, one vector per sequence out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from varlen.config import Device, DType, EngineConfig
from varlen.execution.cpu.runner import CpuRunner
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.packing import largest_dims
from varlen.execution.runner import DeviceRunner, Runner
from varlen.memory.arena import Arena
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import Program
from varlen.request.request import Prompt, RequestOptions
from varlen_bench.compare.systems import System
from varlen_bench.harness.accuracy import Vectors
from varlen_bench.memory.cases import NO_ARENA, OURS, PEER, Ids
from varlen_bench.memory.unplanned import NoArena, OpByOp, UnplannedProgram
from varlen_bench.peers.checkpoints import load_encoder
from varlen_kernels.ops import kernels_for

# Returns the vector of each sequence of a request.
EmbedIds: TypeAlias = Callable[[Ids], Vectors]

# The served precision; on a CPU the one that every CPU computes in.
_DTYPES: dict[str, DType] = {"cpu": "fp32", "cuda": "bf16"}
_TORCH_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedSystem:
    """A system that is ready to embed requests."""

    system: System
    # in the calling thread, the only one that torch's profiler sees
    embed: EmbedIds
    weights: Sequence[Tensor]
    device: torch.device
    # None of systems without one
    arena: Arena | None = None

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights; a shared one counts once."""
        return sum({weight.data_ptr(): weight.nbytes for weight in self.weights}.values())


def load(system: System, folder: Path, device: str, max_tokens: int) -> LoadedSystem:
    """Return a system with the checkpoint in `folder`, for requests of at most `max_tokens`."""
    if system == PEER:
        return _load_transformers(folder, torch.device(device))
    runner = load_runner(folder, device, max_tokens)
    if system == OURS:
        return planned(runner)
    program, where = runner.program, runner.device
    # its arena and graphs are released before new ones are made
    runner.close()
    del runner
    return unplanned(program, where, max_tokens)


def load_runner(folder: Path, device: str, max_tokens: int) -> Runner:
    """Return varlen's runner for batches of at most `max_tokens`."""
    checkpoint = Checkpoint.open(folder)
    config = EngineConfig(
        device=cast(Device, device),
        dtype=_DTYPES[device],
        max_batch_tokens=max_tokens,
        max_sequence_tokens=min(max_tokens, checkpoint.position_limit),
        max_queued_tokens=max(max_tokens, checkpoint.position_limit),
    )
    return Runner(checkpoint, config)


def planned(runner: Runner) -> LoadedSystem:
    """Return varlen as it is served."""
    return _loaded(OURS, runner.program, runner.arena, runner.device_runner)


def unplanned(planned_program: Program, device: torch.device, max_tokens: int) -> LoadedSystem:
    """Return the same program and weights without an arena."""
    program, arena = UnplannedProgram(planned_program), NoArena(largest_dims(max_tokens), device)
    kernels = kernels_for(device)
    if device.type == "cpu":
        return _loaded(NO_ARENA, program, arena, CpuRunner(program, OpByOp(kernels), arena))
    return _loaded(NO_ARENA, program, arena, CudaRunner(program, kernels, arena))


def _load_transformers(folder: Path, device: torch.device) -> LoadedSystem:
    model = load_encoder(folder, _TORCH_DTYPES[device.type], device, "sdpa")

    @torch.inference_mode()
    def embed(ids: Ids) -> Vectors:
        on_device = torch.from_numpy(ids.astype(np.int64)).to(device)
        pooled = model(input_ids=on_device).last_hidden_state.float().mean(1)
        vectors: Vectors = torch.nn.functional.normalize(pooled, dim=1).cpu().numpy()
        return vectors

    return LoadedSystem(PEER, embed, [*model.parameters(), *model.buffers()], device)


def _loaded(system: System, program: Program, arena: Arena, runner: DeviceRunner) -> LoadedSystem:
    embed, measured = _embedder(runner), arena if system == OURS else None
    return LoadedSystem(system, embed, program.weights, arena.device, measured)


def _embedder(runner: DeviceRunner) -> EmbedIds:
    def embed(ids: Ids) -> Vectors:
        options = [RequestOptions(normalize=True)] * len(ids)
        return np.stack(runner.run([Prompt(row) for row in ids], options))

    return embed
