"""The command `python -m varlen_bench.profile_ops model_repository/tiny_gpt2 --output ops.html`.

The recorded program runs with timed kernels, one op after another. On a CPU a server runs most of these ops in one call
of compiled code, without Python between them.
"""

import random
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console

from varlen.errors import VarlenError
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.generation import MAX_BEAMS
from varlen.tasks import TASKS
from varlen_bench import pictures
from varlen_bench.profile_ops.models import profile_batches, profile_steps
from varlen_bench.profile_ops.picture import class_table, draw, op_table, render
from varlen_bench.profile_ops.timed import Breakdown
from varlen_client.cli.progress import show_stage
from varlen_tools.model_source import (
    ModelSource,
    SettingsOption,
    SourceArgument,
    find_source,
    parse_settings,
)

_RUNNING = [1, 32]


def main(
    source: SourceArgument,
    settings: SettingsOption = None,
    sequences: Annotated[int, typer.Option(min=1, help="Encoder: number of sequences.")] = 100,
    shortest: Annotated[int, typer.Option(min=1, help="Encoder: shortest length, in tokens.")] = 5,
    longest: Annotated[int, typer.Option(min=1, help="Encoder: longest length, in tokens.")] = 500,
    running: Annotated[
        list[int], typer.Option(min=1, help="Generation: sequences of a step. May be repeated.")
    ] = _RUNNING,
    context: Annotated[
        int, typer.Option(min=1, help="Generation: length of prompts and sources, in tokens.")
    ] = 128,
    beams: Annotated[
        int, typer.Option(min=1, max=MAX_BEAMS, help="Generation: beams of a sequence.")
    ] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of every batch or step.")] = 3,
    output: pictures.OutputOption = None,
) -> None:
    """Print where a model spends its time on a CPU, by op.

    An encoder runs batches of uniformly random lengths. A model that generates runs its first step (prefill, or
    encoding the sources) and a decode step.
    """
    try:
        found = find_source(source, parse_settings(settings))
        checkpoint = found.open_checkpoint()
        # a GPU runs whole graphs, in which no op can be timed by itself
        found = replace(found, config=replace(found.config, device="cpu"))
        with show_stage(f"profiling {found.name}"):
            if TASKS[found.config.task or checkpoint.task].is_iterative:
                breakdowns = profile_steps(
                    checkpoint, found.config, running, context=context, beams=beams, rounds=rounds
                )
            else:
                lengths = (shortest, longest)
                breakdowns = [_profile_encoder(checkpoint, found, sequences, lengths, rounds)]
    except VarlenError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    _print(breakdowns)
    shown = (found.name, breakdowns)
    pictures.write_outputs(output, partial(draw, *shown), partial(render, *shown))


def _profile_encoder(
    checkpoint: Checkpoint,
    found: ModelSource,
    sequences: int,
    lengths: tuple[int, int],
    rounds: int,
) -> Breakdown:
    shortest, longest = lengths
    limit = min(longest, checkpoint.position_limit)
    if shortest > limit:
        raise typer.BadParameter(f"{shortest}; the longest is {limit}", param_hint="--shortest")
    numbers = random.Random(0)
    drawn = [numbers.randint(shortest, limit) for _ in range(sequences)]
    config = replace(found.config, max_sequence_tokens=limit)
    return profile_batches(checkpoint, config, drawn, rounds)


def _print(breakdowns: list[Breakdown]) -> None:
    Console().print(*map(op_table, breakdowns), class_table(breakdowns), sep="\n")
    for one in breakdowns:
        print(
            f"{one.title}: {one.tokens_per_second:,.0f} tokens/s on {torch.get_num_threads()} threads"
        )


if __name__ == "__main__":
    typer.run(main)
