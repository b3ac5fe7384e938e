"""The command `python -m varlen_bench.show_plan model_repository/minilm/1 --lengths 200 --lengths 240`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from varlen.errors import VarlenError
from varlen.execution.runner import Runner
from varlen_bench import pictures
from varlen_bench.show_plan.maps import Map, program_map
from varlen_bench.show_plan.picture import draw, in_units, render
from varlen_client.cli.progress import show_stage
from varlen_tools.model_source import find_source

_LENGTHS = ["200", "240"]
_OUTPUT = [Path("plan.svg"), Path("plan.html")]
_NOTE = "Planned as the arena plans a batch that runs as a whole: into one chunk; only its shape counts."


def main(
    source: Annotated[Path, typer.Argument(help="Model of a repository, or checkpoint folder.")],
    lengths: Annotated[
        list[str],
        typer.Option(help="Tokens of a batch's sequences: 200 or 5,17,200. May be repeated."),
    ] = _LENGTHS,
    output: pictures.OutputOption = _OUTPUT,
) -> None:
    """Draw where a batch's intermediates lie in memory."""
    try:
        heading, maps = _model_maps(source, [_batch(text) for text in lengths])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lengths") from None
    for one in maps:
        print(
            f"{one.title}: {len(one.areas)} usages; footprint {in_units(one.footprint)},"
            f" {one.ratio:.3f} of the peak of live bytes"
        )
    page = partial(render, heading, maps, _NOTE)
    pictures.write_outputs(output, partial(draw, heading, maps), page)


def _model_maps(folder: Path, batches: list[list[int]]) -> tuple[str, list[Map]]:
    """Return the name of a model, and a map of each batch."""
    try:
        source = find_source(folder, {"device": "cpu"})
        with show_stage(f"loading {source.name}"):
            runner = Runner(source.open_checkpoint(), source.config)
    except VarlenError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    runner.close()
    longest = max(map(max, batches))
    # a longer sequence may run by itself
    most = max((sum(batch) for batch in batches if len(batch) > 1), default=0)
    longest_allowed = min(runner.info.max_sequence_tokens, runner.info.max_arena_tokens)
    if longest > longest_allowed:
        raise ValueError(f"{longest} tokens; this model takes at most {longest_allowed}")
    if most > runner.info.max_batch_tokens:
        raise ValueError(
            f"{most} tokens together; a batch has at most {runner.info.max_batch_tokens}"
        )
    maps = [program_map(runner.program, runner.arena.layout, batch) for batch in batches]
    return source.name, maps


def _batch(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(f'"{text}"; allowed: lengths from 1, with commas between')
    return [int(part) for part in parts]


if __name__ == "__main__":
    typer.run(main)
