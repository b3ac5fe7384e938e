"""The process of one measurement: memory above weights, or speed.

The order {"system": a system} gives its figures, {"system": None} the speed in each round. All systems take token ids
and return one vector per sequence.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from varlen.config import Device, DType, EngineConfig
from varlen.execution.cpu.runner import CpuRunner
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.one_shot import OneShot, ProgramRunner
from varlen.execution.packing import dims_of, largest_dims
from varlen.execution.runner import Runner
from varlen.memory.arena import Arena
from varlen.memory.planner import Dims, Region
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import CallOp, PackedBatch, Program, State, Value
from varlen.request.request import Prompt, RequestOptions
from varlen_bench.compare.systems import System
from varlen_bench.harness.accuracy import Vectors
from varlen_bench.harness.resident import MIB, resident_peak
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.peers.checkpoints import EncoderShape, load_encoder
from varlen_kernels.ops import kernels_for

# Token ids of one request, [batch, length].
Ids: TypeAlias = npt.NDArray[np.int32]
# Systems, each measured in its own process.
OURS = System("varlen", "varlen", "fp32", "engine")
NO_ARENA = System("varlen-no-arena", "varlen", "fp32", "engine")
PEER = System("transformers", "transformers", "fp32", "engine")

_ROUND = 10
# Returns the vector of each sequence of a request.
EmbedIds: TypeAlias = Callable[[Ids], Vectors]

# The served precision; on a CPU the one that every CPU computes in.
_DTYPES: dict[str, DType] = {"cpu": "fp32", "cuda": "bf16"}
_TORCH_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


_TINY_TOKENS = 2
# The speed is measured on every third round of a case.
_ROUND_STEP = 3


@dataclass(frozen=True, slots=True)
class Case:
    """Requests to one encoder; request i has `batch` sequences of `lengths[i]` tokens."""

    encoder: EncoderShape
    batch: int
    lengths: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest request."""
        return self.batch * max(self.lengths)

    def ids(self, number: int) -> Ids:
        """Return the ids of one request: random, and the same each time."""
        shape = self.batch, self.lengths[number]
        numbers = np.random.default_rng(number)
        return numbers.integers(0, self.encoder.vocabulary, shape, dtype=np.int32)

    def longest(self) -> Ids:
        """Return the ids of the longest request."""
        return self.ids(self.lengths.index(max(self.lengths)))

    def every(self, step: int) -> Case:
        """Return every `step`-th request by length, the longest among them, in their order."""
        by_length = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        kept = sorted(by_length[::step])
        return replace(self, lengths=tuple(self.lengths[i] for i in kept))

    def rounds(self) -> list[range]:
        """Return the numbers of the requests of each round: ten requests of mixed lengths."""
        count = max(1, len(self.lengths) // _ROUND)
        return [range(first, len(self.lengths), count) for first in range(count)]

    @classmethod
    def from_json(cls, case: dict[str, Any]) -> Case:
        """Return the case whose `asdict` was written as JSON."""
        return cls(EncoderShape(**case["encoder"]), case["batch"], tuple(case["lengths"]))


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
    assert isinstance(runner.state, OneShot)
    return _loaded(OURS, runner.program, runner.arena, runner.state.device)


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


def _loaded(system: System, program: Program, arena: Arena, runner: ProgramRunner) -> LoadedSystem:
    embed, measured = _embedder(runner), arena if system == OURS else None
    return LoadedSystem(system, embed, program.weights, arena.device, measured)


def _embedder(runner: ProgramRunner) -> EmbedIds:
    state = OneShot(runner)

    def embed(ids: Ids) -> Vectors:
        options = [RequestOptions(normalize=True)] * len(ids)
        return np.stack(state.run([Prompt(row) for row in ids], options))

    return embed


class UnplannedProgram(Program):
    """A program whose values are allocated by torch and freed after their last use."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.ops, program.outputs)
        last_use = {value: number for number, op in enumerate(self.ops) for value in op.reads}
        self._unused_after: list[list[str]] = [[] for _ in self.ops]
        for value, number in last_use.items():
            if value not in self.outputs:
                self._unused_after[number].append(value.name)

    def run(
        self,
        batch: PackedBatch,
        kernels: object,
        region: Region,  # noqa: ARG002  # the signature of Program
        *,
        states: Mapping[str, Tensor] | None = None,
        out: Sequence[Tensor] | None = None,
        call: CallOp | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs for `batch`: `out`, or new tensors."""
        assert call is None
        bound: dict[str, Tensor] = {**batch.inputs, **(states or {})}
        placed = dict(zip(self.outputs, out or (), strict=False))
        for op, unused in zip(self.ops, self._unused_after, strict=True):
            operands = [bound[x.name] if isinstance(x, Value | State) else x for x in op.operands]
            # every op of an encoder has one result
            (result,) = op.results
            into = {"out": placed[result]} if result in placed else {}
            made = getattr(kernels, op.kernel)(*operands, **op.attributes, **into)
            del operands
            for name in unused:
                del bound[name]
            bound[result.name] = made
        return tuple(bound[value.name] for value in self.outputs)


class OpByOp:
    """Kernels whose ops run one by one: compiled steps need an arena."""

    def __init__(self, kernels: object) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)


class NoArena(Arena):
    """An arena without memory; every batch fits."""

    def __init__(self, largest: Dims, device: torch.device) -> None:
        self.largest, self.max_tokens, self.device = largest, largest["tokens"], device
        self._empty = Region(torch.empty(0, dtype=torch.uint8, device=device), ())

    def allocate(self, dims: Dims) -> Region:  # noqa: ARG002  # the signature of Arena
        """Return an empty region."""
        return self._empty


def start(argument: Message) -> Callable[[Message], Message]:
    """Return the function that answers the order of this process."""
    torch.set_num_threads(argument["threads"])
    case, folder = Case.from_json(argument["case"]), Path(argument["folder"])
    device = argument["device"]

    def handle(order: Message) -> Message:
        if order["system"] is None:
            return {"speeds": measure_speed(folder, device, case)}
        system = load(System(**order["system"]), folder, device, case.max_tokens)
        return {"figures": measure_memory(system, case)}

    return handle


def measure_memory(system: LoadedSystem, case: Case) -> list[dict[str, float]]:
    """Return the figures of a fresh system; for varlen also of an exact arena."""
    _settle(system, case)
    device, weights, arena = system.device, system.weight_bytes, system.arena
    held = [arena.use().reserved_bytes] if arena else []
    planned_before = arena.layout.plan_seconds if arena else 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = 0.0
    with resident_peak() as resident:
        for ids in map(case.ids, range(len(case.lengths))):
            began = time.perf_counter()
            system.embed(ids)
            seconds += time.perf_counter() - began
            if arena:
                held.append(arena.use().reserved_bytes)
    planned = arena.layout.plan_seconds - planned_before if arena else 0.0
    figures = {"weights_mib": weights / MIB, "peak_mib": resident.above / MIB, "seconds": seconds}
    if device.type == "cuda":
        peaks = {
            "peak_mib": torch.cuda.max_memory_reserved(device),
            "allocated_mib": torch.cuda.max_memory_allocated(device),
        }
        figures |= {name: (peak - weights) / MIB for name, peak in peaks.items()}
    figures["asked_mib_longest"] = asked_bytes(system, case.longest()) / MIB
    if arena is None:
        return [figures]
    plans = [arena.layout.plan(dims_of([length] * case.batch)) for length in case.lengths]
    ratios = [plan.footprint / plan.peak_live for plan in plans]
    bound = max(plan.peak_live for plan in plans)
    figures |= {
        "footprint_vs_bound": statistics.fmean(ratios),
        "footprint_vs_bound_max": max(ratios),
        "bound_largest_mib": bound / MIB,
        "reserved_mib": max(held) / MIB,
        "reserved_vs_bound": max(held) / bound,
        "new_mib_per_request": allocated_bytes(held) / len(case.lengths) / MIB,
        "plan_share": planned / seconds,
    }
    exact = statistics.fmean(plan.footprint for plan in plans) / MIB
    return [figures, {"new_mib_per_request": exact}]


def allocated_bytes(held: Sequence[int]) -> int:
    """Return the bytes that an arena allocated, from those that it held after each request."""
    # no request both allocates and releases
    return held[0] + sum(max(0, after - before) for before, after in pairwise(held))


def measure_speed(folder: Path, device: str, case: Case) -> list[float]:
    """Return the speed with the arena over the speed without it, by round."""
    runner = load_runner(folder, device, case.max_tokens)
    without = unplanned(runner.program, runner.device, case.max_tokens)
    systems = planned(runner).embed, without.embed
    compare(systems, case.longest(), turn=0)
    ratios = []
    for numbers in case.rounds()[::_ROUND_STEP]:
        seconds = [compare(systems, case.ids(number), turn) for turn, number in enumerate(numbers)]
        ours, fresh = map(sum, zip(*seconds, strict=True))
        ratios.append(fresh / ours)
    return ratios


def compare(systems: tuple[EmbedIds, EmbedIds], ids: Ids, turn: int) -> tuple[float, float]:
    """Return the seconds of both systems on one request; they take turns in going first."""
    seconds, answers = [0.0, 0.0], dict[int, Vectors]()
    for which in (0, 1) if turn % 2 == 0 else (1, 0):
        began = time.perf_counter()
        answers[which] = systems[which](ids)
        seconds[which] = time.perf_counter() - began
    if not np.array_equal(answers[0], answers[1]):
        raise RuntimeError(f"the answers to a request of shape {ids.shape} differ")
    return seconds[0], seconds[1]


def asked_bytes(system: LoadedSystem, ids: Ids) -> int:
    """Return the bytes that one request asks of torch's allocator, freed ones included."""
    if system.device.type == "cuda":
        asked = "allocated_bytes.all.allocated"
        before = torch.cuda.memory_stats(system.device)[asked]
        system.embed(ids)
        return int(torch.cuda.memory_stats(system.device)[asked] - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        system.embed(ids)
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    sizes = (event["args"]["Bytes"] for event in events if event.get("name") == "[memory]")
    return sum(size for size in sizes if size > 0)


def _settle(system: LoadedSystem, case: Case) -> None:
    """Read every weight and run a tiny request, which the peak does not include."""
    with torch.inference_mode():
        for weight in system.weights:
            weight.sum()
    shape = case.batch, min(_TINY_TOKENS, *case.lengths)
    system.embed(np.zeros(shape, dtype=np.int32))
    gc.collect()


if __name__ == "__main__":
    run_worker(start)
