"""Command line of the serving benchmark; `make bench-serving` runs it with its defaults."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Annotated

import typer

from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.harness import command, machine
from varlen_bench.harness.neighbour import half_a_busy_core
from varlen_bench.serving import report
from varlen_bench.serving.figures import bench_figures, lone_figures, overload_figures
from varlen_bench.serving.loads import lone_mixes
from varlen_bench.serving.run import LoadTest
from varlen_bench.serving.systems import (
    LONE,
    OURS,
    PAIRED,
    SYSTEMS,
    Settings,
    before,
    chosen_systems,
)
from varlen_tools import pictures
from varlen_tools.local_server import end_on_sigterm
from varlen_tools.workloads import MIXES, Mix, named_mix, trace_mix

_PACKAGES = ("torch", "transformers", "onnxruntime", "tritonclient", "varlen")
# By what is measured: seconds of a load, in full and quick; the systems that run if none are chosen, all if empty.
_SECONDS = {"": (6.0, 2.5), "paired": (6.0, 2.5), "overload": (120.0, 10.0), "lone": (2.0, 1.0)}
_DEFAULT_SYSTEMS = {"": "", "paired": ",".join(PAIRED), "overload": OURS, "lone": ",".join(LONE)}

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Hugging Face folder of a mean-pooled BERT.")] = Path(
        "model_repository/minilm/1"
    ),
    only: command.Only = "",
    lengths: Annotated[
        str, typer.Option(help="uniform, short and mixed, comma-separated; by default all.")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="CSV with a column of lengths, in place of --lengths.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Measured seconds of a load that decides.")
    ] = None,
    peer_batch: Annotated[
        int, typer.Option(min=2, help="Largest batch of the dynamic batcher.")
    ] = 8,
    overload: Annotated[
        bool, typer.Option("--overload", help="Only twice the capacity, with deadlines.")
    ] = False,
    lone: Annotated[
        bool, typer.Option("--lone", help="Only requests one by one, of 3 to 512 tokens, by turns.")
    ] = False,
    paired: Annotated[
        int,
        typer.Option(
            min=0,
            help="Only systems by turns, in this number of turns: --only, or token_budget and dp.",
        ),
    ] = 0,
    baseline: Annotated[
        str, typer.Option(help="Commit whose token_budget --paired compares with instead.")
    ] = "",
    busy: Annotated[
        bool, typer.Option("--busy", help="Keep half a core busy beside the servers.")
    ] = False,
    seed: command.Seed = 0,
    quick: command.Quick = False,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Load real servers, ours and plain ones, until they cannot keep up."""
    kind = "lone" if lone else "overload" if overload else "paired" if paired else ""
    lengths = lengths or ("uniform" if quick or overload else ",".join(MIXES))
    with command.refused(pictures.PictureError):
        # for the page, at the end
        pictures.check_matplotlib()
        settings = Settings(
            model=model,
            systems=chosen_systems(only or _DEFAULT_SYSTEMS[kind], quick=quick),
            mixes=_lone_mixes(model) if lone else _mixes(lengths, trace, model),
            seconds=seconds or _SECONDS[kind][quick],
            turns=paired or (1 if quick else 3 if lone else 2),
            quick=quick,
            peer_batch=peer_batch,
            threads=machine.cpu_count(),
            seed=seed,
            note="beside half a busy core" if busy else "",
        )
    cores = settings.threads
    bench = command.started(
        context, "serving", cores, packages=_PACKAGES, quick=quick, revision=revision, output=output
    )
    with (
        TemporaryDirectory(prefix="varlen-serving-") as scratch,
        half_a_busy_core() if busy else nullcontext(),
        bench.progress() as progress,
    ):
        load_test = LoadTest(settings, Path(scratch), report=progress, append=bench.append)
        if lone:
            load_test.send_one_by_one()
        elif overload:
            load_test.overload()
        elif paired:
            pair = [before(baseline), SYSTEMS[OURS]] if baseline else settings.systems
            load_test.compare_in_turns(pair)
        else:
            load_test.compare()
    rows = load_test.rows
    if lone:
        figures = lone_figures(rows, settings.mixes)
    else:
        figures = overload_figures(rows) if overload else bench_figures(rows, settings.mixes)
    bench.show(*report.tables(rows), *report.notes(rows))
    csv = bench.output or Path(mkdtemp(prefix="varlen-serving-"), "serving.csv")
    page = csv.with_name(f"{csv.stem}{kind and '-'}{kind}.html")
    page.write_text(report.page(rows, figures, bench.provenance), encoding="utf-8")
    bench.show(f"report: {page}")
    bench.finish(f"serving_{kind}" if lone or overload else "serving", figures)
    if figures["lost"] or any(row.kind == "failed" and "varlen" in row.system for row in rows):
        raise typer.Exit(1)


def _lone_mixes(model: Path) -> list[Mix]:
    return lone_mixes(Checkpoint.open(model).position_limit)


def _mixes(lengths: str, trace: Path | None, model: Path) -> list[Mix]:
    limit = Checkpoint.open(model).position_limit
    if trace is not None:
        return [trace_mix(trace, limit)]
    return [named_mix(name.strip(), limit) for name in lengths.split(",") if name.strip()]


if __name__ == "__main__":
    end_on_sigterm()
    app()
