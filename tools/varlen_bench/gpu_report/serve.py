"""Requests that generate, in a closed loop: `python -m varlen_bench.gpu_report.serve`.

With `--loads-only` nothing is served: the loads compile what later stages need, in a time limit of their own.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from varlen.in_process.generator import Generation, Generator
from varlen_bench.gpu_report.decoders import SERVED, DecoderGrid, loaded
from varlen_bench.gpu_report.figures import Figure, Seconds, figure, write_figures
from varlen_bench.harness.command import Output, Revision
from varlen_bench.kernels.machine import Machine

# Token ids of prompts are below the vocabulary of every decoder.
_IDS = 250
# A search has rows for each beam, and each of them takes a sequence.
_SEARCHES_PART = 8


def measure_loads(grid: DecoderGrid) -> Iterator[Figure]:
    """Yield the time of the first load of each decoder, with what it compiles."""
    for name in grid.save:
        began = time.perf_counter()
        with loaded(name, grid):
            yield figure("load", name, "first load", time.perf_counter() - began, "s")


def measure_serving(name: str, grid: DecoderGrid) -> Iterator[Figure]:
    """Yield tokens per second of a decoder, by number of requests."""
    row = partial(figure, "serve")
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0, "ignore_eos": True},
        "sampled": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1, "ignore_eos": True},
        "beams": {"num_beams": grid.num_beams},
    }
    numbers = np.random.default_rng(0)
    with loaded(name, grid) as service:
        generator = Generator(service)
        for count in grid.requests:
            prompts = [numbers.integers(1, _IDS, grid.prompt_tokens).tolist() for _ in range(count)]
            for kind, options in kinds.items():
                some = prompts[: max(1, count // _SEARCHES_PART)] if kind == "beams" else prompts
                case = f"{name} {len(some)} requests"
                # the first request of a kind may compile
                generator.generate(some, max_tokens=2, **options)
                began = time.perf_counter()
                answers = generator.generate(some, max_tokens=grid.answer_tokens, **options)
                spent = time.perf_counter() - began
                yield row(case, kind, _num_tokens(answers) / spent, "tokens/s")
                yield row(case, f"{kind}, time of a token", 1e3 * spent / _longest(answers), "ms")


def _num_tokens(answers: list[Generation]) -> int:
    return sum(len(answer.token_ids) for answer in answers)


def _longest(answers: list[Generation]) -> int:
    return max(len(answer.token_ids) for answer in answers)


def main(
    context: typer.Context,
    budget: Seconds = 60,
    loads_only: Annotated[
        bool, typer.Option("--loads-only", help="Load the models; serve no request.")
    ] = False,
    revision: Revision = "",
    output: Output = None,
) -> None:
    """Measure requests of random decoders, or only their first loads."""

    def measure(_: Machine) -> Iterator[Figure]:
        if loads_only:
            yield from measure_loads(SERVED)
            return
        for name in SERVED.save:
            yield from measure_serving(name, SERVED)

    write_figures(context, "serve", measure, budget, output, revision)


if __name__ == "__main__":
    typer.run(main)
