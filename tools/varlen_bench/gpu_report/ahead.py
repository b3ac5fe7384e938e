"""Decode steps with two in flight (decision 0059), and the kernels of a captured step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from varlen.execution.cuda.runner import CudaSteps
from varlen.execution.runner import Runner
from varlen.request.generation import GenerationOptions
from varlen_bench.gpu_report.decoders import SERVED, DecoderGrid, decode_chunks, loaded, step_of
from varlen_bench.gpu_report.figures import Figure, figure
from varlen_bench.harness.summary import Spread
from varlen_bench.kernels.machine import Machine

_KINDS = {
    "greedy": GenerationOptions(temperature=0.0),
    "sampled": GenerationOptions(temperature=0.8, top_k=50, top_p=0.9, seed=1),
    "penalty": GenerationOptions(temperature=0.0, repetition_penalty=1.05),
}
# Sequences and tokens of their contexts, the most important first.
_STEPS = ((1, 128), (64, 512), (8, 800))
_WARM_UPS, _PASSES, _STEPS_OF_PASS = 10, 5, 30
# Replays that the profiler sees, and kernels that get a row.
_REPLAYS, _MOST_KERNELS = 20, 14


def measure_ahead(
    name: str, grid: DecoderGrid, steps: tuple[tuple[int, int], ...]
) -> Iterator[Figure]:
    """Yield times of steps with two in flight, then the kernels of each graph."""
    with loaded(name, grid) as service:
        runner = service.model.runner
        assert isinstance(runner, Runner)
        for count, context in steps:
            for kind, options in _KINDS.items():
                spent = step_ahead(runner, count, context, options)
                yield figure(
                    "ahead", f"{name} {count}x{context}", f"{kind} step, ahead", spent, "us"
                )
        for count, context in steps:
            yield from traced(f"{name} {count}x{context}", runner, count, context)


def step_ahead(runner: Runner, count: int, context: int, options: GenerationOptions) -> float:
    """Return the median microseconds of a step that starts before the last one is read."""
    # blocks for all steps: contexts grow by a token a step, as in service
    total = 1 + _WARM_UPS + _PASSES * _STEPS_OF_PASS
    grown = decode_chunks(runner, count, context + total, options)
    chunks = [chunk._replace(start=context - 1) for chunk in grown]
    started = [runner.launch_batch(step_of(tuple(chunks)))]
    number = 0

    def run(steps: int) -> float:
        nonlocal number
        began = perf_counter()
        for _ in range(steps):
            number += 1
            following = (
                chunk._replace(start=chunk.start + number, token_ids=(0,), follows=row)
                for row, chunk in enumerate(chunks)
            )
            step = replace(step_of(tuple(following)), number=number, after=number - 1)
            started.append(runner.launch_batch(step))
            started.pop(0)()
        return 1e6 * (perf_counter() - began) / steps

    run(_WARM_UPS)
    spent = [run(_STEPS_OF_PASS) for _ in range(_PASSES)]
    started.pop()()
    return Spread.of(spent).median


def traced(case: str, runner: Runner, count: int, context: int) -> Iterator[Figure]:
    """Yield number, time and gaps of the kernels of a replay, by torch's profiler."""
    runner.run_batch(step_of(decode_chunks(runner, count, context, _KINDS["greedy"])))
    steps = runner.decoder.steps
    assert isinstance(steps, CudaSteps)
    with steps.stream():
        events = profiled_kernels(steps.graph())
    yield from kernel_figures(case, events)


def profiled_kernels(replay: Callable[[], object]) -> list[tuple[float, float, str]]:
    """Return begin, end in microseconds, and name, of the kernels of some replays, in order."""
    from torch.profiler import ProfilerActivity, profile

    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_REPLAYS):
            replay()
        torch.cuda.synchronize()
    events: Any = found.events()
    on_device = [each for each in events if each.device_type.name == "CUDA"]
    return sorted((each.time_range.start, each.time_range.end, each.name) for each in on_device)


def kernel_figures(case: str, events: list[tuple[float, float, str]]) -> Iterator[Figure]:
    """Yield the figures of one replay from the kernels of `_REPLAYS`."""
    row = partial(figure, "kernels", case)
    yield row("kernels of a replay", len(events) / _REPLAYS, "kernels")
    if not events:
        return
    times, counts = defaultdict[str, float](float), Counter[str]()
    gaps, end = list[float](), events[0][1]
    for begin, stop, name in events:
        times[name] += stop - begin
        counts[name] += 1
        # the first kernel has none before it
        gaps += [begin - end] if begin > events[0][0] else []
        end = max(end, stop)
    yield row("replay, first to last kernel", (end - events[0][0]) / _REPLAYS, "us")
    if gaps:
        yield row("gap before a kernel, median", Spread.of(gaps).median, "us")
    for name in sorted(times, key=lambda each: -times[each])[:_MOST_KERNELS]:
        # names of templates are long
        yield row(f"{counts[name] / _REPLAYS:.0f} of {name[:60]}", times[name] / _REPLAYS, "us")


def steps(_: Machine) -> Iterator[Figure]:
    """Yield steps ahead of all decoders."""
    for name in SERVED.save:
        yield from measure_ahead(name, SERVED, _STEPS)
