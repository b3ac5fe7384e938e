"""The command: `python -m varlen_tools.show_plan model_repository/minilm/1 --lengths 200 --lengths 240`."""

from pathlib import Path
from typing import Annotated

import typer

from varlen.config import EngineConfig
from varlen.errors import VarlenError
from varlen.execution.runner import Runner
from varlen.models.checkpoint import Checkpoint
from varlen_tools.show_plan.maps import Map, paper_maps, program_map
from varlen_tools.show_plan.page import render
from varlen_tools.show_plan.picture import draw, in_units

_PAPER = "paper"
_LENGTHS = ["200", "240"]
_OUTPUT = [Path("plan.svg"), Path("plan.html")]
_ARENA_NOTE = (
    "Planned as the arena plans a batch that runs as a whole: into one chunk, by its shape alone."
)
_PAPER_NOTE = "The paper's records of BERT-base under its rules: each batch finds the chunks that the one before left."


def main(
    source: Annotated[
        str, typer.Argument(help='A checkpoint folder, or "paper": the published records.')
    ],
    lengths: Annotated[
        list[str],
        typer.Option(help="One batch: the tokens of its sequences, as 200 or 5,17,200. Repeat it."),
    ] = _LENGTHS,
    output: Annotated[
        list[Path], typer.Option(help="What to write, .svg or .html. Repeat it.")
    ] = _OUTPUT,
) -> None:
    """Draw where every intermediate of a batch lies in memory, and when."""
    wrong = [str(path) for path in output if path.suffix not in {".svg", ".html"}]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]} is neither .svg nor .html", param_hint="--output")
    nowhere = [str(path.parent) for path in output if not path.parent.is_dir()]
    if nowhere:
        raise typer.BadParameter(f"there is no folder {nowhere[0]}", param_hint="--output")
    batches = [_batch(text) for text in lengths]
    if source == _PAPER:
        heading, note = "BERT-base, one layer: the records of TurboTransformers", _PAPER_NOTE
        if any(len(batch) > 1 for batch in batches):
            raise typer.BadParameter(
                "the paper's records are of one sequence", param_hint="--lengths"
            )
        maps = paper_maps([batch[0] for batch in batches])
    else:
        heading, note = _name(Path(source)), _ARENA_NOTE
        maps = _maps(Path(source), batches)
    for path in output:
        page = draw(heading, maps) if path.suffix == ".svg" else render(heading, maps, note)
        path.write_text(page, encoding="utf-8")
        print(path)
    for one in maps:
        print(
            f"{one.title}: {len(one.areas)} usages in {len(one.chunks)} chunk(s) of {in_units(sum(one.chunks))};"
            f" footprint {in_units(one.footprint)}, {one.footprint / one.peak_live:.3f} of the peak of live bytes"
        )


def _maps(folder: Path, batches: list[list[int]]) -> list[Map]:
    try:
        runner = Runner(Checkpoint.open(folder), EngineConfig(device="cpu"))
    except VarlenError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    runner.close()
    longest = max(max(batch) for batch in batches)
    if longest > runner.max_sequence_tokens:
        raise typer.BadParameter(
            f"{longest} tokens; this model takes at most {runner.max_sequence_tokens}",
            param_hint="--lengths",
        )
    most = max(sum(batch) for batch in batches)
    if most > runner.max_batch_tokens:
        raise typer.BadParameter(
            f"{most} tokens together; a batch has at most {runner.max_batch_tokens}",
            param_hint="--lengths",
        )
    layout = runner.arena.layout
    return [program_map(runner.program, layout, batch) for batch in batches]


def _name(folder: Path) -> str:
    """Return what to call a checkpoint: a repository's version folders have numbers for names."""
    folder = folder.resolve()
    return folder.parent.name if folder.name.isdecimal() else folder.name


def _batch(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f'"{text}"; allowed: lengths from 1, with commas between', param_hint="--lengths"
        )
    return [int(part) for part in parts]


if __name__ == "__main__":
    typer.run(main)
