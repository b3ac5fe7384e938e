"""Two batches in flight beside one after another: `python -m varlen_bench.gpu_report.overlap`."""

from collections.abc import Callable, Iterator
from functools import partial

import typer

from varlen.execution.model_state import OneShot
from varlen.request.request import Float32Array, Prompt, RequestOptions
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

_BATCHES = 12
_PASSES = 5
_Batch = tuple[list[Prompt], list[RequestOptions]]


def measure_shape(shape: EncoderShape, grid: EncoderGrid) -> Iterator[Figure]:
    """Yield times by number of batches in flight, and whether the bits differ."""
    row = partial(figure, "overlap")
    with random_checkpoint(shape, grid.max_length) as folder, loaded(folder, grid) as runner:
        for name, lengths in grid.batches.items():
            case = f"{shape.name} {name}"
            batches = [random_batch(lengths, shape.vocabulary, seed) for seed in range(_BATCHES)]
            expected = [runner.run(*batch) for batch in batches]
            found = _in_flight(runner, batches)
            wrong = sum(map(differs, found, expected))
            yield row(case, f"batches of {_BATCHES} whose bits differ", wrong, MUST_BE_0)
            alone = host_time(lambda: [runner.run(*each) for each in batches], _PASSES)  # noqa: B023
            both = host_time(partial(_in_flight, runner, batches), _PASSES)
            yield row(case, "one in flight", alone.median / _BATCHES, "us a batch")
            yield row(case, "two in flight", both.median / _BATCHES, "us a batch")
            graphs = graphs_of(runner)
            with graphs.stream():
                busy = device_time(graphs.graph(sum(lengths), len(lengths)))
            part = busy * _BATCHES / both.median
            yield row(case, "two in flight, GPU in graphs", part, "of the time")


def _in_flight(runner: OneShot, batches: list[_Batch]) -> list[list[Float32Array]]:
    """Return the answers of all batches; as many are in flight as allowed."""
    pending: list[Callable[[], list[Float32Array]]] = []
    found: list[list[Float32Array]] = []
    for batch in batches:
        if len(pending) == graphs_of(runner).slots:
            found.append(pending.pop(0)())
        pending.append(runner.launch(*batch))
    return found + [answers() for answers in pending]


def measure_all(_: Machine) -> Iterator[Figure]:
    """Yield all figures."""
    for shape in SERVED.shapes:
        yield from measure_shape(shape, SERVED)


main = command("overlap", measure_all, "Measure two batches in flight beside one.", seconds=20)

if __name__ == "__main__":
    typer.run(main)
