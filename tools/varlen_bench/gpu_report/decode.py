"""Decode steps beside the memory that they must read: `python -m varlen_bench.gpu_report.decode`.

The roofline of a step is the time of a copy of as many bytes: its weights, keys and values.
"""

from collections.abc import Iterator
from functools import partial

import typer

from varlen.execution.cuda.step_runner import CudaSteps
from varlen.execution.step_runner import StepRunner
from varlen.request.generation import GenerationOptions
from varlen_bench.gpu_report.decoders import (
    SERVED,
    DecoderGrid,
    decode_chunks,
    loaded,
    prompt_chunk,
    step_of,
)
from varlen_bench.gpu_report.figures import MUST_BE_0, Figure, command, device_time, figure
from varlen_bench.kernels.machine import Machine
from varlen_bench.kernels.timing import copy_rate, host_time

_HOST_PASSES = 20
_COPY_BYTES = 1 << 30
_GREEDY = GenerationOptions(temperature=0.0)
_SAMPLED = GenerationOptions(temperature=0.8, top_k=50, top_p=0.9, seed=1)


def measure_decoder(name: str, grid: DecoderGrid, bandwidth: float) -> Iterator[Figure]:
    """Yield the times of steps.

    Args:
        name: name of the decoder.
        grid: its steps.
        bandwidth: bytes that a copy reads and writes in a second.
    """
    row = partial(figure, "decode")
    with loaded(name, grid) as service:
        runner, use = service.model.runner, service.model.runner.graph_use
        assert isinstance(runner, StepRunner)
        yield row(name, "captures", use.seconds, "s")
        yield row(name, "memory of graphs", use.num_bytes / 2**20, "MiB")
        for count, context in grid.steps:
            yield from _steps(f"{name} {count}x{context}", runner, count, context, bandwidth)
        count, context = grid.steps[0]
        beside = decode_chunks(runner, count // 2, context, _GREEDY)
        for length in grid.chunks:
            step = step_of((*beside, prompt_chunk(runner, length, _GREEDY)))
            spent = host_time(partial(runner.run_batch, step), _HOST_PASSES).median
            yield row(f"{name} {length} beside {len(beside)}", "step with a prompt", spent, "us")


def _steps(
    case: str, runner: StepRunner, count: int, context: int, bandwidth: float
) -> Iterator[Figure]:
    """Yield the times of one size of decode step: its graph, and whole steps."""
    row = partial(figure, "decode", case)
    greedy = step_of(decode_chunks(runner, count, context, _GREEDY))
    first, again = runner.run_batch(greedy), runner.run_batch(greedy)
    yield row("tokens that differ in a second run", _num_different(first, again), MUST_BE_0)
    steps = runner.steps
    assert isinstance(steps, CudaSteps)
    with steps.stream():
        graph = device_time(steps.graph(count))
    kept = count * context * runner.kv.block_bytes / runner.kv.block_size
    roofline = 1e6 * (runner.weight_bytes + kept) / bandwidth
    yield row("graph", graph, "us")
    yield row("graph, part of the roofline", roofline / graph, "1 is a copy")
    sampled = step_of(decode_chunks(runner, count, context, _SAMPLED))
    for kind, step in (("greedy", greedy), ("sampled", sampled)):
        whole = host_time(partial(runner.run_batch, step), _HOST_PASSES).median
        yield row(f"whole {kind} step", whole, "us")
        yield row(f"whole {kind} step, part of the roofline", roofline / whole, "1 is a copy")


def _num_different(first: object, again: object) -> int:
    assert isinstance(first, list)
    assert isinstance(again, list)
    return sum(one != other for one, other in zip(first, again, strict=True))


def measure_all(machine: Machine) -> Iterator[Figure]:
    """Yield all figures."""
    bandwidth = 1e9 * copy_rate(machine.timer, machine.device, _COPY_BYTES)
    yield figure("decode", "device", "copy", bandwidth / 1e12, "TB/s")
    for name in SERVED.save:
        yield from measure_decoder(name, SERVED, bandwidth)


main = command("decode", measure_all, "Measure decode steps of random decoders.", seconds=60)

if __name__ == "__main__":
    typer.run(main)
