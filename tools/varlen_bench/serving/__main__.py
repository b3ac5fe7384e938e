"""Command line of the serving benchmark; `make bench-serving` runs it with its defaults."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from varlen_bench.harness import machine
from varlen_bench.harness import rows as bench_report
from varlen_bench.harness.rows import Cell, Provenance
from varlen_bench.peers.exports import cache_folder, exported
from varlen_bench.serving import draw, page, report
from varlen_bench.serving.arrivals import Mix, model_limits, trace_mix, uniform_mix
from varlen_bench.serving.plan import plan
from varlen_bench.serving.repository import Checkpoint
from varlen_bench.serving.rows import Row
from varlen_bench.serving.run import Lab, Say, Settings, lab
from varlen_bench.serving.systems import OURS, TOKEN_BUDGET, System, chosen_systems
from varlen_tools.local_server import end_on_sigterm

DEFAULT_MODEL = Path("model_repository/minilm/1")
DEFAULT_OUTPUT = Path("docs/benchmarks/serving.csv")
PACKAGES = ("torch", "transformers", "onnxruntime", "tritonclient", "varlen")
_SECONDS, _QUICK_SECONDS = 6.0, 2.5
_OVERLOAD_SECONDS, _QUICK_OVERLOAD_SECONDS = 120.0, 10.0
# Of our servers, the first time that they start; the default of the backend, and less.
_WARMUP_SECONDS, _QUICK_WARMUP_SECONDS = 20, 5
_LENGTHS, _QUICK_LENGTHS = "uniform,short", "uniform"
# The package's docstring has what other sizes cost.
_PEER_BATCH = 8

app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[
        Path, typer.Option(help="Hugging Face folder of a mean-pooled BERT.")
    ] = DEFAULT_MODEL,
    only: Annotated[
        str, typer.Option(help="Systems or beginnings of their names, by comma; all when empty.")
    ] = "",
    lengths: Annotated[
        str, typer.Option(help=f"uniform and short, by comma; {_LENGTHS} when empty.")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="CSV with a column of lengths, in place of others.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Measured seconds of a load that decides.")
    ] = None,
    peer_batch: Annotated[
        int, typer.Option(min=2, help="Most requests that the dynamic batcher joins.")
    ] = _PEER_BATCH,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and lengths.")] = 0,
    overload: Annotated[
        bool, typer.Option("--overload", help="Twice the capacity, with deadlines, instead.")
    ] = False,
    paired: Annotated[
        int, typer.Option(min=0, help="Turns in which dp and token_budget are compared, instead.")
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A look, not a measurement: less of all, no CSV.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help=f"CSV to append to; {DEFAULT_OUTPUT} unless --quick."),
    ] = None,
) -> None:
    """Load real servers, ours and plain ones, until they cannot keep up, and compare what they sustain."""
    if output is None and not quick:
        output = DEFAULT_OUTPUT
    seconds = seconds or _default_seconds(overload=overload, quick=quick)
    lengths = lengths or (_QUICK_LENGTHS if quick or overload else _LENGTHS)
    console = Console(width=None if os.isatty(1) else 200)
    with console.status("start") as status:
        # a log gets lines, a terminal one line that changes
        say = _with_time(status.update if console.is_terminal else console.print)
        try:
            limit, vocabulary = model_limits(model)
            ours = f"{TOKEN_BUDGET},{OURS}" if paired else OURS
            systems = chosen_systems(only or (ours if overload or paired else ""), quick=quick)
            mixes = _mixes(lengths, trace, limit)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from error
        checkpoint = Checkpoint(
            model,
            _exports(model, systems, say),
            max_tokens=limit,
            peer_batch=peer_batch,
            threads=machine.cpu_count(),
            warmup_seconds=_QUICK_WARMUP_SECONDS if quick else _WARMUP_SECONDS,
        )
        settings = Settings(
            systems, mixes, checkpoint, vocabulary, plan(seconds, quick=quick), seed
        )
        words = {
            "model": model if model != DEFAULT_MODEL else "",
            "only": only,
            "lengths": "" if trace else lengths,
            "trace": trace or "",
            "seconds": f"{seconds:g}",
            "peer-batch": peer_batch,
            "paired": paired or "",
            "seed": seed or "",
        }
        run = bench_report.provenance(
            threads=checkpoint.threads,
            packages=PACKAGES,
            command=_command(words, overload=overload, quick=quick),
            root=Path.cwd(),
        )
        rows: list[Row] = []
        with lab(settings, say) as running:
            for found in _parts(running, seconds, paired, overload=overload):
                rows += found
                if output is not None:
                    bench_report.append_rows(output, run, [asdict(row) for row in found])
    named = [(mix.name, mix.label) for mix in mixes]
    figures = report.overload_figures(rows) if overload else report.bench_figures(rows, named)
    _show(console, rows, mixes)
    folder, stem = (output.parent, output.stem) if output else (_scratch(), "serving")
    part = "-overload" if overload else "-paired" if paired else ""
    _write_page(console, folder / (stem + part), rows, mixes, figures, run)
    if output is not None:
        console.print(f"rows appended to {output}")
    name = "serving_overload" if overload else "serving"
    print(bench_report.bench_line(name, figures), flush=True)
    if figures["lost"] or any(row.kind == "failed" and "varlen" in row.system for row in rows):
        raise typer.Exit(1)


def _parts(running: Lab, seconds: float, turns: int, *, overload: bool) -> Iterator[list[Row]]:
    """Return the rows of what is wanted, as they are measured."""
    if overload:
        return running.measure_overload(seconds)
    return running.measure_paired(turns) if turns else running.measure()


def _with_time(say: Say) -> Say:
    """Return what says the seconds since now before every line."""
    begin = time.monotonic()
    return lambda line: say(f"{time.monotonic() - begin:5.0f} s  {line}")


def _default_seconds(*, overload: bool, quick: bool) -> float:
    if overload:
        return _QUICK_OVERLOAD_SECONDS if quick else _OVERLOAD_SECONDS
    return _QUICK_SECONDS if quick else _SECONDS


def _mixes(lengths: str, trace: Path | None, limit: int) -> list[Mix]:
    if trace is not None:
        return [trace_mix(trace, limit)]
    names = [name.strip() for name in lengths.split(",") if name.strip()]
    return [uniform_mix(name, limit) for name in names]


def _exports(model: Path, systems: Sequence[System], say: Say) -> dict[str, Path]:
    """Return the checkpoint in the format of each engine that has one; an engine that is not there has none."""
    if not any(system.engine == "onnxruntime" for system in systems):
        return {}
    say("onnxruntime: exporting")
    try:
        return {"onnxruntime": exported(model.resolve(), "onnxruntime", "fp32", cache_folder())}
    except RuntimeError as error:
        say(str(error))
        return {}


def _show(console: Console, rows: Sequence[Row], mixes: Sequence[Mix]) -> None:
    if any(row.kind == "result" for row in rows):
        for mix in mixes:
            console.print(report.result_table(rows, mix.label))
    if any(row.kind == "paired" for row in rows):
        console.print(report.paired_table(rows))
    for line in [*report.overload_lines(rows), *report.notes(rows)]:
        console.print(line, highlight=False, markup=False)


def _write_page(
    console: Console,
    path: Path,
    rows: Sequence[Row],
    mixes: Sequence[Mix],
    figures: Mapping[str, Cell],
    run: Provenance,
) -> None:
    """Write the picture and the page beside it."""
    labels = [mix.label for mix in mixes]
    is_curve = any(row.kind == "load" for row in rows)
    png = draw.picture(rows, labels) if is_curve else None
    if png is not None:
        path.with_suffix(".png").write_bytes(png)
    text = page.render(rows, labels=labels, figures=figures, png=png, run=run)
    path.with_suffix(".html").write_text(text, encoding="utf-8")
    console.print(f"report: {path.with_suffix('.html')}")


def _scratch() -> Path:
    """Return a folder for the report of a quick look."""
    return Path(tempfile.mkdtemp(prefix="varlen-serving-"))


def _command(words: Mapping[str, object], *, overload: bool, quick: bool) -> str:
    command = ["python", "-m", "varlen_bench.serving"]
    for name, value in words.items():
        if value != "":
            # where a file lies is this machine's business
            told = value.name if isinstance(value, Path) and value.is_absolute() else str(value)
            command += [f"--{name}", told]
    command += ["--overload"] if overload else []
    command += ["--quick"] if quick else []
    return shlex.join(command)


if __name__ == "__main__":
    end_on_sigterm()
    app()
