"""The systems behind one call: token ids in, one vector per sequence out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.config import Device, DType, EngineConfig
from varlen.execution.cpu import CpuRunner
from varlen.execution.cuda import CudaRunner
from varlen.execution.packing import largest_dims
from varlen.execution.runner import DeviceRunner, Runner
from varlen.memory.arena import Arena
from varlen.models.checkpoint import Checkpoint
from varlen.program.program import Program
from varlen.request import Prompt, RequestOptions
from varlen_bench.kernels.encoder_peers import load_model
from varlen_bench.memory.cases import OURS, PEER, Ids, Name
from varlen_bench.memory.unplanned import NoArena, UnplannedProgram
from varlen_kernels.dispatch import kernels_for

Vectors: TypeAlias = npt.NDArray[np.float32]
Run: TypeAlias = Callable[[Ids], Vectors]

# The precision that is served; on a CPU the one in which all machines compute.
_DTYPES: dict[str, DType] = {"cpu": "fp32", "cuda": "bf16"}
_TORCH_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A system that is ready.

    Attributes:
        run: answers a request, with all cores.
        run_in_one_thread: the same in the calling thread, as far as torch's allocator can tell.
        weights: what it holds for good.
        program, arena: of ours.
        device: where it is.
    """

    run: Run
    run_in_one_thread: Run
    weights: Sequence[Tensor]
    device: torch.device
    program: Program | None = None
    arena: Arena | None = None

    @property
    def weight_bytes(self) -> int:
        """Memory that its weights take."""
        return sum({weight.data_ptr(): weight.nbytes for weight in self.weights}.values())


def load(name: Name, folder: Path, device: str, max_tokens: int) -> Loaded:
    """Return a system that answers requests of at most so many tokens with the checkpoint of a folder."""
    if name == PEER:
        return load_transformers(folder, torch.device(device))
    runner = load_runner(folder, device, max_tokens)
    if name == OURS:
        return planned(runner)
    program, where = runner.program, runner.device
    # its arena and graphs go before the others come
    runner.close()
    del runner
    return unplanned(program, where, max_tokens)


def load_runner(folder: Path, device: str, max_tokens: int) -> Runner:
    """Return our engine for batches of at most so many tokens."""
    checkpoint = Checkpoint.open(folder)
    config = EngineConfig(
        device=cast(Device, device),
        dtype=_DTYPES[device],
        max_batch_tokens=max_tokens,
        max_sequence_tokens=min(max_tokens, checkpoint.position_limit),
        max_queued_tokens=max(max_tokens, checkpoint.position_limit),
    )
    return Runner(checkpoint, config)


def planned(runner: Runner) -> Loaded:
    """Return our engine as it is served."""
    return Loaded(
        _caller(runner.device_runner),
        _caller(_in_one_thread(runner.program, runner.arena, runner.device_runner)),
        _weights(runner.program),
        runner.device,
        runner.program,
        runner.arena,
    )


def unplanned(planned_program: Program, device: torch.device, max_tokens: int) -> Loaded:
    """Return the same program and weights without an arena."""
    program, arena = UnplannedProgram(planned_program), NoArena(largest_dims(max_tokens), device)
    executor: DeviceRunner
    if device.type == "cuda":
        executor = CudaRunner(program, kernels_for(device), arena)
    else:
        executor = _cpu_executor(program, arena)
    alone = _in_one_thread(program, arena, executor)
    return Loaded(_caller(executor), _caller(alone), _weights(program), device)


def load_transformers(folder: Path, device: torch.device) -> Loaded:
    """Return transformers' model with mean pooling."""
    model = load_model(folder, _TORCH_DTYPES[device.type], device, "sdpa")

    @torch.inference_mode()
    def run(ids: Ids) -> Vectors:
        on_device = torch.from_numpy(ids.astype(np.int64)).to(device)
        pooled = model(input_ids=on_device).last_hidden_state.float().mean(1)
        vectors: Vectors = torch.nn.functional.normalize(pooled, dim=1).cpu().numpy()
        return vectors

    return Loaded(run, run, [*model.parameters(), *model.buffers()], device)


def _caller(executor: DeviceRunner) -> Run:
    def run(ids: Ids) -> Vectors:
        return np.stack(
            executor.run([Prompt(row) for row in ids], [RequestOptions(normalize=True)] * len(ids))
        )

    return run


def _in_one_thread(program: Program, arena: Arena, executor: DeviceRunner) -> DeviceRunner:
    """Return an executor without worker threads: a profiler of torch sees only its own thread."""
    if arena.device.type == "cuda":
        return executor
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = _cpu_executor(program, arena)
    torch.set_num_threads(cores)
    return alone


def _cpu_executor(program: Program, arena: Arena) -> CpuRunner:
    width = program.outputs[0].shape[1]
    assert isinstance(width, int)
    return CpuRunner(program, kernels_for(arena.device), arena, width)


def _weights(program: Program) -> list[Tensor]:
    return [operand for op in program.ops for operand in op.operands if isinstance(operand, Tensor)]
