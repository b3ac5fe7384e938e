"""Time of a forward pass by op: `python -m varlen_tools.profile_ops FOLDER`.

The recorded program runs with timed kernels, so the measured program is the served one.
Worker threads run in parallel: the seconds of an op are the sum over all of them.
"""

import random
import time
from collections import Counter, defaultdict
from pathlib import Path
from threading import Lock
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from varlen.config import DEFAULT_MAX_BATCH_TOKENS, EngineConfig
from varlen.errors import VarlenError
from varlen.execution.runner import Runner
from varlen.models.checkpoint import Checkpoint
from varlen.request import DEFAULT_OPTIONS, Prompt
from varlen_kernels import reference


class TimedKernels:
    """The kernels of a module, each call timed; `seconds` and `calls` are by kernel name."""

    def __init__(self, kernels: object) -> None:
        self._kernels = kernels
        # worker threads call at the same time
        self._lock = Lock()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        kernel = getattr(self._kernels, name)

        def timed(*operands: object, **attributes: object) -> object:
            began = time.perf_counter()
            result = kernel(*operands, **attributes)
            spent = time.perf_counter() - began
            with self._lock:
                self.seconds[name] += spent
                self.calls[name] += 1
            return result

        return timed


def random_batches(
    lengths: list[int], max_batch_tokens: int, vocab_size: int, seed: int = 0
) -> list[list[Prompt]]:
    """Return sequences of random ids, sorted by length and split into batches of at most `max_batch_tokens`."""
    numbers = np.random.default_rng(seed)
    batches: list[list[Prompt]] = [[]]
    room = max_batch_tokens
    for length in sorted(lengths):
        if length > room:
            batches.append([])
            room = max_batch_tokens
        ids = numbers.integers(0, vocab_size, length, dtype=np.int32)
        batches[-1].append(Prompt(ids))
        room -= length
    return batches


def profile(runner: Runner, timed: TimedKernels, batches: list[list[Prompt]], rounds: int) -> float:
    """Run the batches once unmeasured and then `rounds` times; return the seconds of these rounds.

    Args:
        timed: the kernels of `runner`; they hold the measured rounds afterwards.
    """

    def run_once() -> None:
        for batch in batches:
            runner.run(batch, [DEFAULT_OPTIONS] * len(batch))

    run_once()
    timed.seconds.clear()
    timed.calls.clear()
    began = time.perf_counter()
    for _ in range(rounds):
        run_once()
    return time.perf_counter() - began


def _runner(
    folder: Path, dtype: str, longest: int, max_batch_tokens: int
) -> tuple[Runner, TimedKernels]:
    checkpoint = Checkpoint.open(folder)
    config = EngineConfig(
        # a GPU runs whole graphs, in which no op can be timed by itself
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]  # checked by EngineConfig
        max_batch_tokens=max_batch_tokens,
        max_sequence_tokens=min(longest, checkpoint.position_limit),
    )
    timed = TimedKernels(reference)
    return Runner(checkpoint, config, kernels=timed), timed


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    sequences: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 100,
    shortest: Annotated[int, typer.Option(min=1, help="Shortest length, in tokens.")] = 5,
    longest: Annotated[int, typer.Option(min=1, help="Longest length, in tokens.")] = 500,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="As in config.pbtxt.")
    ] = DEFAULT_MAX_BATCH_TOKENS,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of every batch.")] = 3,
) -> None:
    """Print the share of time of each op on a CPU, for sequences of uniformly random lengths."""
    try:
        runner, timed = _runner(folder, dtype, longest, max_batch_tokens)
    except VarlenError as error:
        raise typer.BadParameter(str(error)) from None
    longest = runner.max_sequence_tokens
    if shortest > longest:
        raise typer.BadParameter(
            f"{shortest} tokens; the longest are {longest}", param_hint="--shortest"
        )
    generator = random.Random(0)
    lengths = [generator.randint(shortest, longest) for _ in range(sequences)]
    batches = random_batches(lengths, max_batch_tokens, runner.vocab_size)
    seconds = profile(runner, timed, batches, rounds)
    table = Table("op", "calls", "seconds", "share", title=f"{rounds} x {len(batches)} batches")
    in_ops = sum(timed.seconds.values())
    for name, spent in sorted(timed.seconds.items(), key=lambda entry: -entry[1]):
        table.add_row(name, str(timed.calls[name]), f"{spent:.3f}", f"{spent / in_ops:.1%}")
    Console().print(table)
    rate = rounds * sum(lengths) / seconds
    print(f"{rate:,.0f} tokens/s on {torch.get_num_threads()} threads, {runner.dtype}")


if __name__ == "__main__":
    typer.run(main)
