"""Encoders on a GPU: two batches in flight, and programmatic dependent launch on and off.

A kernel that starts early and reads before it waits gives other bits, seldom and under load. So random batches run
again and again, with dependent launch and without it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from varlen.config import DType, EngineConfig
from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.one_shot import OneShot
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array, Prompt, RequestOptions
from varlen_bench.gpu_report.figures import MUST_BE_0, Figure, device_time, figure
from varlen_bench.kernels.encoder import random_prompts
from varlen_bench.kernels.grid import FULL
from varlen_bench.kernels.machine import Machine
from varlen_bench.kernels.timing import host_time
from varlen_bench.peers.checkpoints import BERT_BASE, MINILM, EncoderShape, random_checkpoint
from varlen_kernels.triton import dependent_launch as launches

_HOST_PASSES = 40
# Batches that run one after another or overlap, and how often.
_BATCHES, _PASSES = 12, 5
# Random batches with dependent launch and without it, and their limits.
_RANDOM_BATCHES, _MOST_SEQUENCES, _LONGEST = 400, 60, 120
_Batch = tuple[list[Prompt], list[RequestOptions]]


@dataclass(frozen=True, slots=True)
class EncoderGrid:
    """What a stage runs on encoders.

    Attributes:
        batches: lengths of the sequences of each batch, by name.
    """

    shapes: tuple[EncoderShape, ...]
    batches: dict[str, list[int]]
    dtype: DType = "bf16"
    max_tokens: int = 8192
    max_length: int = 512


SERVED = EncoderGrid(
    (MINILM, BERT_BASE),
    {
        "1x20": [20],
        "8x20": [20] * 8,
        "64x13": [13] * 64,
        "16x250": [250] * 16,
        "8192 of 5-500": FULL.serving_lengths(),
    },
)


@contextmanager
def loaded(folder: Path, grid: EncoderGrid) -> Iterator[OneShot]:
    """Yield the executor of a checkpoint on the GPU."""
    config = EngineConfig(
        device="cuda",
        dtype=grid.dtype,
        max_batch_tokens=grid.max_tokens,
        max_sequence_tokens=grid.max_length,
    )
    with closing(Runner(Checkpoint.open(folder), config)) as runner:
        assert isinstance(runner.state, OneShot)
        yield runner.state


def _graphs_of(state: OneShot) -> CudaRunner:
    """Return the graphs of an encoder."""
    assert isinstance(state.device, CudaRunner)
    return state.device


def random_batch(
    lengths: list[int], vocabulary: int, seed: int = 0
) -> tuple[list[Prompt], list[RequestOptions]]:
    """Return prompts of random ids; every second vector is normalized."""
    options = [RequestOptions(normalize=index % 2 == 0) for index in range(len(lengths))]
    return random_prompts(lengths, vocabulary, seed), options


def differs(answers: list[Float32Array], expected: list[Float32Array]) -> bool:
    """Return whether any bit of an answer differs."""
    return not all(map(np.array_equal, answers, expected))


def measure_overlap(shape: EncoderShape, grid: EncoderGrid) -> Iterator[Figure]:
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
            graphs = _graphs_of(runner)
            with graphs.stream():
                busy = device_time(graphs.graph(sum(lengths), len(lengths)))
            part = busy * _BATCHES / both.median
            yield row(case, "two in flight, GPU in graphs", part, "of the time")


def _in_flight(runner: OneShot, batches: list[_Batch]) -> list[list[Float32Array]]:
    """Return the answers of all batches; as many are in flight as allowed."""
    pending: list[Callable[[], list[Float32Array]]] = []
    found: list[list[Float32Array]] = []
    for batch in batches:
        if len(pending) == _graphs_of(runner).slots:
            found.append(pending.pop(0)())
        pending.append(runner.launch(*batch))
    return found + [answers() for answers in pending]


@contextmanager
def _without_dependent_launch() -> Iterator[None]:
    """Launch every kernel after the end of the one before it."""
    supported = launches._is_supported
    launches._is_supported = lambda _: False  # type: ignore[assignment]
    try:
        yield
    finally:
        launches._is_supported = supported


def measure_dependent_launch(
    shape: EncoderShape, grid: EncoderGrid, batches: int
) -> Iterator[Figure]:
    """Yield times and bits of an encoder with dependent launch and without it."""
    row = partial(figure, "dependent launch")
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
                graphs = _graphs_of(runner)
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


def overlap(_: Machine) -> Iterator[Figure]:
    """Yield two batches in flight beside one after another."""
    for shape in SERVED.shapes:
        yield from measure_overlap(shape, SERVED)


def dependent_launch(_: Machine) -> Iterator[Figure]:
    """Yield encoders with dependent launch and without it."""
    for shape in SERVED.shapes:
        yield from measure_dependent_launch(shape, SERVED, _RANDOM_BATCHES)
