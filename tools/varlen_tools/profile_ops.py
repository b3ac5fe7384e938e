"""Time of a forward pass by op: `python -m varlen_tools.profile_ops SOURCE`.

The recorded program runs with timed kernels, so the measured program is the served one.
Worker threads run in parallel: the seconds of an op are the sum over all of them.
"""

import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from threading import Lock
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from varlen.errors import VarlenError
from varlen.execution.runner import Runner
from varlen.models.checkpoint import Checkpoint
from varlen.request import DEFAULT_OPTIONS, Prompt
from varlen_kernels import reference
from varlen_tools.model_source import SettingsOption, SourceArgument, find_source, parse_settings


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
    """Return batches of random sequences, sorted by length, within `max_batch_tokens`."""
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
    """Run the batches `rounds` times, after one unmeasured run; return the seconds."""
    began = 0.0
    for number in range(1 + rounds):
        if number == 1:
            timed.seconds.clear()
            timed.calls.clear()
            began = time.perf_counter()
        for batch in batches:
            runner.run(batch, [DEFAULT_OPTIONS] * len(batch))
    return time.perf_counter() - began


def main(
    source: SourceArgument,
    settings: SettingsOption = None,
    sequences: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 100,
    shortest: Annotated[int, typer.Option(min=1, help="Shortest length, in tokens.")] = 5,
    longest: Annotated[int, typer.Option(min=1, help="Longest length, in tokens.")] = 500,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of every batch.")] = 3,
) -> None:
    """Print each op's part of the time on a CPU, for uniformly random lengths."""
    timed = TimedKernels(reference)
    try:
        found = find_source(source, parse_settings(settings))
        checkpoint = Checkpoint.open(found.checkpoint)
        limit = min(longest, checkpoint.position_limit)
        # a GPU runs whole graphs, in which no op can be timed by itself
        config = replace(found.config, device="cpu", max_sequence_tokens=limit)
        runner = Runner(checkpoint, config, kernels=timed)
    except VarlenError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    if shortest > limit:
        raise typer.BadParameter(f"{shortest}; the longest is {limit}", param_hint="--shortest")
    generator = random.Random(0)
    lengths = [generator.randint(shortest, limit) for _ in range(sequences)]
    batches = random_batches(lengths, config.max_batch_tokens, runner.vocab_size)
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
