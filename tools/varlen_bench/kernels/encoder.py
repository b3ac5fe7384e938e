"""Our encoder end to end on a server's batch: its forward pass, the call that serves it, and each op's share.

The forward pass is the one that is served: the recorded program, in the bucket that the batch would run in.
It is timed warm, since the weights that a small encoder finds in the cache are those its last batch left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from varlen.config import DType, EngineConfig
from varlen.execution.buckets import Buckets
from varlen.execution.packing import fill_inputs, input_bytes, input_views
from varlen.execution.runner import Runner
from varlen.models.checkpoint import Checkpoint
from varlen.program.program import PackedBatch
from varlen.request import Prompt, RequestOptions
from varlen_bench.kernels.case import Case, Inputs
from varlen_bench.kernels.encoder_peers import (
    encoder_peers,
    exact_vectors,
    save_random_checkpoint,
)
from varlen_bench.kernels.grid import EncoderShape, Grid
from varlen_bench.kernels.machine import Budget, DeviceLostError, Machine
from varlen_bench.kernels.measure import OURS, RUN, Result, failed_note, measure
from varlen_bench.kernels.timing import WARM, Timing, host_time

ENCODER, SHARE, HOST = "encoder", "encoder-share", "encoder-host"
# Relative error of unit vectors at a cosine of 0.999.
MOST_ERROR = 0.045

NORMALIZED = RequestOptions(normalize=True)

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class PackedForward:
    """The forward pass of our encoder over one batch whose inputs are on the device already."""

    def __init__(self, runner: Runner, sequences: list[Prompt], max_tokens: int) -> None:
        lengths = [sequence.num_tokens for sequence in sequences]
        # as served: the longest first
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        bucket = Buckets(max_tokens).smallest(sum(lengths), len(lengths))
        self.program = runner.program
        declared, dims = self.program.inputs, bucket.dims
        host = torch.zeros(input_bytes(declared, dims), dtype=torch.uint8)
        views = input_views(host, declared, dims)
        fill_inputs(views, [sequences[i] for i in order], [NORMALIZED] * len(order))
        on_device = input_views(host.to(runner.device), declared, dims)
        self._batch = PackedBatch(on_device, dims)
        self._region = runner.arena.allocate_whole(dims)
        self._out = [out.zero_() for out in self.program.new_outputs(dims, runner.device)]
        self._places = torch.tensor(np.argsort(order).tolist(), device=runner.device)

    def run(self, kernels: object) -> Tensor:
        """Return the vectors, in the order of packing."""
        (output,) = self.program.run(self._batch, kernels, self._region, out=self._out)
        return output

    def in_order(self, result: object, inputs: Inputs) -> Tensor:  # noqa: ARG002  # a `read`
        """Return the vectors in order of arrival."""
        assert isinstance(result, Tensor)
        return result[self._places]


class OneOp:
    """Kernels of which only those called `name` run; the others leave their results as they are."""

    def __init__(self, kernels: ModuleType, name: str) -> None:
        self._kernels = kernels
        self._name = name

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == self._name:
            return cast(Callable[..., object], getattr(self._kernels, name))
        return lambda *_, out, **__: out


def load_runner(folder: Path, dtype: torch.dtype, machine: Machine, tokens: int) -> Runner:
    """Return the checkpoint on the machine's device, for batches of so many tokens."""
    checkpoint = Checkpoint.open(folder)
    device: Literal["cpu", "cuda"] = "cuda" if machine.device.type == "cuda" else "cpu"
    name = cast(DType, _NAMES[dtype])
    longest = min(checkpoint.position_limit, tokens)
    config = EngineConfig(
        device=device, dtype=name, max_batch_tokens=tokens, max_sequence_tokens=longest
    )
    return Runner(checkpoint, config)


def random_sequences(lengths: list[int], vocabulary: int, seed: int = 0) -> list[Prompt]:
    """Return sequences of random ids."""
    numbers = np.random.default_rng(seed)
    return [Prompt(numbers.integers(0, vocabulary, n, dtype=np.int32)) for n in lengths]


def encoder_case(
    shape: EncoderShape, dtype: torch.dtype, forward: PackedForward, tokens: int, exact: Tensor
) -> Case:
    """Return the forward pass as a case without peers, whose exact vectors are known."""
    return Case(
        op=ENCODER,
        shape=f"{shape.name} {tokens} packed",
        dtype=dtype,
        make=lambda device, seed: {},  # noqa: ARG005  # the batch is part of the call
        call=lambda kernels, inputs: forward.run(kernels),  # noqa: ARG005
        exact=lambda inputs: exact,  # noqa: ARG005
        bytes_moved=0,
        read=forward.in_order,
        threshold=MOST_ERROR,
        tokens=tokens,
        warm=True,
    )


@torch.inference_mode()
def op_shares(case: Case, forward: PackedForward, machine: Machine) -> Iterator[Result]:
    """Yield the time of each op of the forward pass: a graph that holds all calls of this op and no other.

    Each reads what the last whole pass left.
    """
    forward.run(machine.kernels)
    timings: dict[str, Timing] = {}
    for name in dict.fromkeys(op.kernel for op in forward.program.ops):
        only = OneOp(machine.kernels, name)
        timings[name] = machine.timer.graph(_runs(forward, only), [{}], WARM)
    total = sum(timing.median for timing in timings.values())
    for name, timing in timings.items():
        calls = sum(op.kernel == name for op in forward.program.ops)
        note = f"{timing.median / total:.1%} of the sum of all ops, {calls} calls"
        yield _result(case, SHARE, name, graph=timing, note=note)


@torch.inference_mode()
def host_cost(
    case: Case, forward: PackedForward, runner: Runner, sequences: list[Prompt], machine: Machine
) -> Iterator[Result]:
    """Yield the forward pass alone, and the call that serves it: from ids on the host to vectors on the host."""
    call = _runs(forward, machine.kernels)
    device = machine.timer.graph(call, [{}], WARM)
    launched = machine.timer.eager(call, [{}], WARM)
    yield _result(case, HOST, OURS, graph=device, eager=launched, note="the forward pass alone")
    wanted = [NORMALIZED] * len(sequences)
    waited = host_time(lambda: runner.run(sequences, wanted), device.passes)
    over = waited.median - device.median
    note = f"from ids to vectors on the host: {over:.0f} us more than the device works"
    yield _result(case, HOST, RUN, eager=waited, note=note)


def measure_encoder(
    shape: EncoderShape, grid: Grid, dtype: torch.dtype, machine: Machine, budget: Budget
) -> Iterator[Result]:
    """Yield every row of one encoder: ours and its peers, the host's part in small batches, and the shares of ops.

    Raises:
        DeviceLostError: the device cannot be used any more.
    """
    if not budget.allows():
        note = f"skipped: the budget of {budget.seconds:.0f} s is spent"
        yield Result(ENCODER, shape.name, _spelled(dtype), OURS, note=note)
        return
    try:
        yield from _measure_encoder(shape, grid, dtype, machine, budget)
    except DeviceLostError:
        raise
    except Exception as error:  # the other encoders may do
        yield Result(ENCODER, shape.name, _spelled(dtype), OURS, note=failed_note(error))
        machine.stop_if_lost(f"{shape.name}, ours")


def _measure_encoder(
    shape: EncoderShape, grid: Grid, dtype: torch.dtype, machine: Machine, budget: Budget
) -> Iterator[Result]:
    tokens = grid.serving_tokens
    with TemporaryDirectory(prefix="varlen-bench-") as scratch:
        folder = Path(scratch)
        save_random_checkpoint(shape, folder, max(grid.positions, grid.longest))
        sequences = random_sequences(grid.serving_lengths(), shape.vocabulary)
        exact = exact_vectors(folder, sequences, machine.device)
        peers = encoder_peers(folder, sequences, dtype, machine.device, machine.compile_model)
        with closing(load_runner(folder, dtype, machine, tokens)) as runner:
            forward = PackedForward(runner, sequences, tokens)
            case = replace(encoder_case(shape, dtype, forward, tokens, exact), peers=peers)
            # our rows come before those of peers, on which a budget may be spent
            yield from host_cost(case, forward, runner, sequences, machine)
            for count, length in grid.small_batches:
                few = random_sequences([length] * count, shape.vocabulary)
                small = replace(case, shape=f"{shape.name} {count}x{length}", tokens=count * length)
                alone = PackedForward(runner, few, tokens)
                yield from host_cost(small, alone, runner, few, machine)
            yield from op_shares(case, forward, machine)
            yield from measure(case, machine, budget)


def _runs(forward: PackedForward, kernels: object) -> Callable[[Inputs], Tensor]:
    return lambda inputs: forward.run(kernels)  # noqa: ARG005  # a Call


def _result(
    case: Case,
    op: str,
    system: str,
    *,
    graph: Timing | None = None,
    eager: Timing | None = None,
    note: str = "",
) -> Result:
    made = Result(op, case.shape, _spelled(case.dtype), system)
    tokens = 0 if op == SHARE else case.tokens
    return replace(made, tokens=tokens, graph=graph, eager=eager, note=note)


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
