"""Command line of the campaign; `make campaign` runs it: `python -m tests.campaign --seconds 900 --seed 1`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from varlen_bench.harness import command
from varlen_tools.local_server import end_on_sigterm

from . import figures
from .phase import Campaign, run_phase
from .phases import PHASES
from .report import Report
from .target import Checkpoints

_PACKAGES = ("torch", "numpy", "tokenizers", "tritonclient", "varlen")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    seconds: Annotated[
        float, typer.Option(min=10, help="Time of all phases together, without starts of servers.")
    ] = 900,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of all phases together, at most.")
    ] = 100_000,
    models: Annotated[Path, typer.Option(help="Model repository of `make setup`.")] = Path(
        "model_repository"
    ),
    logs: Annotated[
        Path | None, typer.Option(help="Existing folder that gets the logs of the servers.")
    ] = None,
    only: command.Only = "",
    seed: command.Seed = 0,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Attack real servers on this machine, and check that they keep their promises."""
    try:
        chosen = command.select(only, PHASES)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    run = command.Run(
        context,
        "tests.campaign",
        threads=0,
        packages=_PACKAGES,
        output=output,
        revision=revision,
    )
    reports: list[Report] = []
    whole = sum(PHASES[name].weight for name in chosen)
    with TemporaryDirectory(prefix="varlen-campaign-") as folder, run.progress() as progress:
        scratch = Path(folder)
        checkpoints = Checkpoints.prepare(models, scratch)
        progress("computing the answers")
        known = checkpoints.known(seed)
        for name in chosen:
            share = PHASES[name].weight / whole
            most = max(1, int(share * requests))
            campaign = Campaign(seed, known, checkpoints, scratch, most, progress, logs)
            progress(f"{name}: about {share * seconds:.0f} s")
            report = run_phase(name, PHASES[name].run, campaign, share * seconds)
            for problem in report.ledger.problems:
                progress(f"{name}: PROBLEM: {problem}")
            reports.append(report)
            # a run that is cut off keeps the rows of its phases
            run.append(figures.rows([report], seed))
    run.show(*figures.tables(reports, seed))
    if run.output is not None:
        page = run.output.with_suffix(".md")
        page.write_text(figures.page(reports, seed, run.provenance), encoding="utf-8")
        run.show(f"report: {page}")
    run.finish("campaign", figures.bench_figures(reports, seed))
    if any(report.ledger.num_problems for report in reports):
        raise typer.Exit(1)


if __name__ == "__main__":
    end_on_sigterm()
    app()
