"""Command line of the benchmark of ranks; `make bench-ranks` runs it with its defaults."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from varlen_bench.harness import command
from varlen_bench.harness.tables import csv_table
from varlen_bench.ranks.run import COLUMNS, MEASUREMENTS, Row, Settings

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    only: command.Only = "",
    ranks: Annotated[int, typer.Option(min=2, help="Processes that hold a model.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which systems take turns.")] = 9,
    quick: command.Quick = False,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Measure what it costs that several processes hold one model."""
    with command.refused():
        names = command.select(only, MEASUREMENTS)
    bench = command.started(
        context, "ranks", 1, packages=("torch",), quick=quick, revision=revision, output=output
    )
    rows: list[Row] = []
    with bench.progress() as progress:
        for name in names:
            with TemporaryDirectory(prefix="varlen-bench-") as scratch:
                settings = Settings(ranks, 1 if quick else rounds, Path(scratch), progress)
                for row in MEASUREMENTS[name](settings):
                    bench.append([row])
                    rows.append(row)
    bench.show(csv_table(f"{ranks} ranks", COLUMNS, rows))
    figures = {f"{row['measurement']}_{row['case']}_{row['system']}": row["median"] for row in rows}
    bench.finish("ranks", {key.replace(" ", "_"): value for key, value in figures.items()})


if __name__ == "__main__":
    app()
