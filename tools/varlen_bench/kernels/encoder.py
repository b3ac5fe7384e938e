"""Our encoder on a server's batch: forward pass, single ops, host time.

The forward pass is the recorded program in the bucket of the batch, as in a server. It is timed with a warm cache,
because a small encoder finds the weights of its last batch there.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varlen.config import DType, EngineConfig
from varlen.execution.cuda.graphs import Buckets
from varlen.execution.packing import InputLayout, fill_inputs, prompt_arrays
from varlen.execution.runner import Runner
from varlen.memory.arena import alignment_of
from varlen.memory.planner import Dims, Region
from varlen.models.checkpoint_folder import Checkpoint
from varlen.program.program import PackedBatch, Program
from varlen.request.request import Prompt, RequestOptions
from varlen_bench.kernels.encoder_peers import encoder_peers, exact_vectors
from varlen_bench.kernels.grid import Grid
from varlen_bench.kernels.machine import Budget, DeviceLostError, Machine
from varlen_bench.kernels.measure import OURS, OURS_ON_HOST, Result, failed_note, measure
from varlen_bench.kernels.timing import WARM, host_time
from varlen_bench.ops.call import Inputs, OpCall, as_tensor
from varlen_bench.peers.checkpoints import EncoderShape, random_checkpoint
from varlen_kernels import reference

# Values of the column `op`.
ENCODER, ENCODER_OP, ENCODER_HOST = "encoder", "encoder-share", "encoder-host"
# Relative error of unit vectors at a cosine of 0.999.
MAX_ERROR = 0.045

_NORMALIZED = RequestOptions(normalize=True)
_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


class PackedForward:
    """The forward pass of our encoder over one batch, with inputs on the device."""

    def __init__(self, runner: Runner, prompts: list[Prompt], max_tokens: int) -> None:
        lengths = [prompt.num_tokens for prompt in prompts]
        # as in a server, the longest sequences first
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        dims = Buckets(max_tokens, len(lengths)).smallest(sum(lengths), len(lengths)).dims
        self.program = runner.program
        layout = InputLayout.of(self.program.inputs, dims)
        host = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        views = {name: view.numpy() for name, view in layout.views(host).items()}
        packed = [prompts[i] for i in order]
        fill_inputs(views, prompt_arrays(views, packed, [_NORMALIZED] * len(order)))
        self._batch = PackedBatch(layout.views(host.to(runner.device)), dims)
        self._region = with_own_tables(runner.program, runner.arena.allocate(dims), dims)
        self._out = [out.zero_() for out in self.program.new_outputs(dims, runner.device)]
        self._rows = torch.tensor(np.argsort(order).tolist(), device=runner.device)

    def call(self, kernels: object) -> Callable[[Inputs], Tensor]:
        """Return a call that computes the vectors, in packed order."""

        def run(inputs: Inputs) -> Tensor:  # noqa: ARG001  # the batch is part of the call
            (output,) = self.program.run(self._batch, kernels, self._region, out=self._out)
            return output

        return run

    def in_order(self, result: object, inputs: Inputs) -> Tensor:
        """Return the vectors in the order of the prompts."""
        return as_tensor(result, inputs)[self._rows]


def with_own_tables(program: Program, region: Region, dims: Dims) -> Region:
    """Return a region of new memory where no other buffer overlaps a table of indices.

    An op that runs without the others finds the tables that it reads; what the arena would have there are activations.
    """
    tables = {
        program.usage_of[result.name]
        for op in program.ops
        for result in op.results
        if result.name in program.usage_of and not result.dtype.is_floating_point
    }
    offsets, end = list(region.offsets), len(region.memory)
    alignment = alignment_of(region.memory.device)
    for index, buffer in enumerate(program.buffers):
        if not tables.isdisjoint(buffer.usages):
            offsets[index] = -(-end // alignment) * alignment
            end = offsets[index] + buffer.size.at(dims)
    memory = torch.empty(end, dtype=torch.uint8, device=region.memory.device)
    return Region(memory, tuple(offsets))


class SingleOpKernels:
    """Kernels that run a single op; the other ops do nothing."""

    def __init__(self, kernels: object, name: str) -> None:
        self._kernels = kernels
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            return getattr(self._kernels, name)
        return lambda *_, out, **__: out


def random_prompts(lengths: list[int], vocabulary: int, seed: int = 0) -> list[Prompt]:
    """Return prompts of random ids."""
    numbers = np.random.default_rng(seed)
    return [Prompt(numbers.integers(0, vocabulary, n, dtype=np.int32)) for n in lengths]


@torch.inference_mode()
def measure_ops(call: OpCall, forward: PackedForward, machine: Machine) -> Iterator[Result]:
    """Yield the time of each op, from a graph with only its calls."""
    # fills the buffers that the single ops read
    forward.call(machine.kernels)({})
    ops = [op.kernel for op in forward.program.ops]
    times = {
        name: machine.timer.graph(forward.call(SingleOpKernels(machine.kernels, name)), [{}], WARM)
        for name in dict.fromkeys(ops)
    }
    total = sum(time.median for time in times.values())
    for name, time in times.items():
        note = f"{time.median / total:.1%} of the sum of all ops, {ops.count(name)} calls"
        yield Result.of(replace(call, op=ENCODER_OP, tokens=0), name, graph=time, note=note)


@torch.inference_mode()
def measure_host(
    call: OpCall, forward: PackedForward, runner: Runner, prompts: list[Prompt], machine: Machine
) -> Iterator[Result]:
    """Yield the times of the forward pass and of a whole call."""
    call, run = replace(call, op=ENCODER_HOST), forward.call(machine.kernels)
    device = machine.timer.graph(run, [{}], WARM)
    launched = machine.timer.eager(run, [{}], WARM)
    yield Result.of(call, OURS, graph=device, eager=launched, note="only the forward pass")
    options = [_NORMALIZED] * len(prompts)
    whole = host_time(lambda: runner.run(prompts, options), device.count)
    extra = whole.median - device.median
    note = f"from ids to vectors on the host: {extra:.0f} us more than on the device"
    yield Result.of(call, OURS_ON_HOST, eager=whole, note=note)


def measure_encoder(
    shape: EncoderShape, grid: Grid, dtype: torch.dtype, machine: Machine, budget: Budget
) -> Iterator[Result]:
    """Yield all results of one encoder: host times, each op, ours and its peers.

    Raises:
        DeviceLostError: the device is unusable.
    """
    name = str(dtype).removeprefix("torch.")
    if not budget.allows():
        yield Result(ENCODER, shape.name, name, OURS, note=budget.spent_note)
        return
    try:
        yield from _measure_encoder(shape, grid, dtype, machine, budget)
    except DeviceLostError:
        raise
    except Exception as error:  # other encoders may succeed
        yield Result(ENCODER, shape.name, name, OURS, note=failed_note(error))
        machine.stop_if_lost(f"{shape.name}, ours")


def _measure_encoder(
    shape: EncoderShape, grid: Grid, dtype: torch.dtype, machine: Machine, budget: Budget
) -> Iterator[Result]:
    tokens = grid.serving_tokens
    with random_checkpoint(shape, max(grid.positions, grid.longest)) as folder:
        prompts = random_prompts(grid.serving_lengths(), shape.vocabulary)
        exact = exact_vectors(folder, prompts, machine.device)
        peers = encoder_peers(folder, prompts, dtype, machine.device, machine.compile_model)
        checkpoint = Checkpoint.open(folder)
        config = EngineConfig(
            device="cuda" if machine.device.type == "cuda" else "cpu",
            dtype=_DTYPES[dtype],
            max_batch_tokens=tokens,
            max_sequence_tokens=min(checkpoint.position_limit, tokens),
        )
        # a dry run has the ops of a GPU on the CPU
        kernels = None if machine.device.type == "cuda" else reference
        with closing(Runner(checkpoint, config, kernels=kernels)) as runner:
            forward = PackedForward(runner, prompts, tokens)
            call = OpCall(
                op=ENCODER,
                shape=f"{shape.name} {tokens} packed",
                dtype=dtype,
                # the batch is part of the call
                inputs={},
                formula=lambda _: exact,
                read=forward.in_order,
                threshold=MAX_ERROR,
                tokens=tokens,
            )
            # ours first, because peers may spend the budget
            yield from measure_host(call, forward, runner, prompts, machine)
            for count, length in grid.small_batches:
                few = random_prompts([length] * count, shape.vocabulary)
                small = replace(call, shape=f"{shape.name} {count}x{length}", tokens=count * length)
                alone = PackedForward(runner, few, tokens)
                yield from measure_host(small, alone, runner, few, machine)
            yield from measure_ops(call, forward, machine)
            run = forward.call(machine.kernels)
            if not grid.with_compile:
                peers = peers.without_compile()
            yield from measure(call, run, peers, machine, budget, warm=True)
