"""Command line of the GPU report, which `make gpu-report` runs."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from varlen_bench.gpu_report.bounded import Outcome, run_stages
from varlen_bench.gpu_report.stages import Files, all_stages
from varlen_bench.gpu_report.summary import is_wrong, summary
from varlen_bench.harness.command import Only, Revision, refused, select
from varlen_bench.kernels.gpu_run import finds_gpu

SECONDS = 585
SUMMARY = "summary.md"

app = typer.Typer(add_completion=False)


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("gpu-report"),
    seconds: Annotated[float, typer.Option(min=20, help="For all stages together.")] = SECONDS,
    only: Only = "",
    revision: Revision = "",
) -> None:
    """Test, measure and tune on this GPU; fail if a result is wrong."""
    # the summary reads earlier files of the folder, too
    files = Files(output, revision)
    stages = {stage.name: stage for stage in all_stages(files)}
    with refused():
        names = select(only, stages)
    if not finds_gpu("gpu-report"):
        return
    output.mkdir(parents=True, exist_ok=True)
    # a stage must end with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def save(outcomes: list[Outcome]) -> None:
        (output / SUMMARY).write_text(summary(files, outcomes), encoding="utf-8")
        last = outcomes[-1]
        print(f"{last.stage.name}: {last.status} {last.seconds:.0f} s {last.note}", flush=True)

    outcomes = run_stages([stages[name] for name in names], seconds, output, save)
    print((output / SUMMARY).read_text(encoding="utf-8"))
    if is_wrong(files, outcomes):
        print(f"gpu-report: results are wrong, see {output / SUMMARY}")
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
