"""Programmatic dependent launch on and off: `python -m varlen_bench.gpu_report.dependent_launch`.

A kernel that starts early and reads before it waits gives other bits, seldom and under load. So random batches run
again and again, with dependent launch and without it.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import typer

from varlen_bench.gpu_report.encoders import (
    SERVED,
    EncoderGrid,
    differs,
    graphs_of,
    loaded,
    random_batch,
)
from varlen_bench.gpu_report.figures import MUST_BE_0, Figure, command, device_time, figure
from varlen_bench.kernels.machine import Machine
from varlen_bench.kernels.timing import host_time
from varlen_bench.peers.checkpoints import EncoderShape, random_checkpoint
from varlen_kernels.triton import dependent_launch

_PART = "dependent launch"
_HOST_PASSES = 40
# Random batches of an encoder, and their limits.
_BATCHES = 400
_MOST_SEQUENCES, _LONGEST = 60, 120


@contextmanager
def _without_dependent_launch() -> Iterator[None]:
    """Launch every kernel after the end of the one before it."""
    supported = dependent_launch._is_supported
    dependent_launch._is_supported = lambda _: False  # type: ignore[assignment]
    try:
        yield
    finally:
        dependent_launch._is_supported = supported


def measure_shape(shape: EncoderShape, grid: EncoderGrid, batches: int) -> Iterator[Figure]:
    """Yield times and bits of an encoder with dependent launch and without it.

    Args:
        shape: the encoder.
        grid: its batches.
        batches: number of random batches.
    """
    row = partial(figure, _PART)
    with ExitStack() as stack:
        folder = stack.enter_context(random_checkpoint(shape, grid.max_length))
        began = time.perf_counter()
        on = stack.enter_context(loaded(folder, grid))
        yield row(shape.name, "load", time.perf_counter() - began, "s")
        with _without_dependent_launch():
            # the graphs are captured here, and replay as they were captured
            off = stack.enter_context(loaded(folder, grid))
        for name, lengths in grid.batches.items():
            case = f"{shape.name} {name}"
            batch = random_batch(lengths, shape.vocabulary)
            answers = [runner.run(*batch) for runner in (on, off)]
            yield row(case, "batches whose bits differ", int(differs(*answers)), MUST_BE_0)
            for kind, runner in (("on", on), ("off", off)):
                graphs = graphs_of(runner)
                with graphs.stream():
                    spent = device_time(graphs.graph(sum(lengths), len(lengths)))
                yield row(case, f"replay, dependent launch {kind}", spent, "us")
                whole = host_time(partial(runner.run, *batch), _HOST_PASSES).median
                yield row(case, f"from ids to vectors, dependent launch {kind}", whole, "us")
        wrong, numbers = 0, np.random.default_rng(0)
        for seed in range(batches):
            longest = min(_LONGEST, grid.max_length)
            most = min(_MOST_SEQUENCES, grid.max_tokens // longest)
            lengths = numbers.integers(1, longest + 1, numbers.integers(1, most + 1)).tolist()
            batch = random_batch(lengths, shape.vocabulary, seed)
            wrong += differs(on.run(*batch), off.run(*batch))
        yield row(shape.name, f"random batches of {batches} whose bits differ", wrong, MUST_BE_0)


def measure_all(_: Machine) -> Iterator[Figure]:
    """Yield all figures."""
    for shape in SERVED.shapes:
        yield from measure_shape(shape, SERVED, _BATCHES)


main = command(
    "dependent_launch",
    measure_all,
    "Compare encoders with dependent launch and without it.",
    seconds=60,
)

if __name__ == "__main__":
    typer.run(main)
