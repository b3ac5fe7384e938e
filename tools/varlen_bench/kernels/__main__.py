"""Command line of the kernel benchmark, which `make bench-kernels` runs."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from varlen_bench.harness.command import (
    Only,
    Output,
    Progress,
    Quick,
    Revision,
    csv_path,
    refused,
    select,
)
from varlen_bench.kernels import report
from varlen_bench.kernels.encoder import ENCODER, ENCODER_HOST, ENCODER_OP, measure_encoder
from varlen_bench.kernels.grid import DTYPES, FULL, GROUPS, QUICK, TINY, Grid, is_compiled
from varlen_bench.kernels.machine import (
    Budget,
    DeviceLostError,
    GpuRun,
    Machine,
    fake_machine,
    finds_gpu,
    gpu_machine,
)
from varlen_bench.kernels.measure import Result, measure
from varlen_bench.kernels.op_peers import peers_of
from varlen_bench.kernels.timing import SAMPLES, copy_rate
from varlen_kernels import tuning

PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "varlen")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    only: Only = "",
    dtypes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(DTYPES)}.")] = "bf16",
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds; calls that do not fit are skipped.")
    ] = 3000,
    passes: Annotated[int, typer.Option(min=1, help="Timed passes of each call.")] = SAMPLES,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tiny shapes on the CPU, with made-up times.")
    ] = False,
    quick: Quick = False,
    tuning_table: Annotated[
        Path | None, typer.Option("--tuning", help="A tuning.json instead of the installed one.")
    ] = None,
    revision: Revision = "",
    output: Output = None,
) -> None:
    """Compare our kernels with torch, torch.compile, liger-kernel and transformers on this GPU."""
    with refused():
        groups, kinds = select(only, [*GROUPS, ENCODER]), select(dtypes, DTYPES)
    if not dry_run and not finds_gpu("bench-kernels", "; --dry-run needs none"):
        return
    if tuning_table is not None:
        tuning.use_tables(tuning_table)
    grid = TINY if dry_run else QUICK if quick else FULL
    machine = fake_machine() if dry_run else gpu_machine(passes)
    run = GpuRun(
        context,
        "kernels",
        machine,
        output=csv_path("kernels", output, is_trial=dry_run or quick),
        revision=revision,
        packages=PACKAGES,
    )
    copy = copy_rate(machine.timer, machine.device, grid.copy_bytes)
    run.show(
        f"{machine.gpu}, driver {machine.driver}, {run.provenance.versions}",
        f"a copy of {grid.copy_bytes:,} bytes on the device: {copy:,.0f} GB/s",
    )
    results: list[Result] = []
    lost: list[str] = []
    with run.progress() as progress:
        calls = _calls(grid, groups, [DTYPES[kind] for kind in kinds], machine, Budget(budget))
        try:
            for call in calls:
                for rows in _until_lost(call, progress):
                    results += rows
                    run.append(report.csv_rows(rows, copy))
        except DeviceLostError as error:
            lost.append(f"stopped: {error}; the remaining calls were not measured")
    for op in dict.fromkeys(result.op for result in results):
        is_encoder = op in {ENCODER, ENCODER_OP, ENCODER_HOST}
        run.show(report.listing(results, op) if is_encoder else report.table(results, op, copy))
    run.show(*report.missing_times(results), *lost)
    run.finish("kernels", report.bench_figures(results, copy))
    if lost:
        raise typer.Exit(1)


def _calls(
    grid: Grid,
    groups: Sequence[str],
    dtypes: Sequence[torch.dtype],
    machine: Machine,
    budget: Budget,
) -> Iterator[Iterator[Result]]:
    """Yield the measurement of each call or encoder."""
    for dtype in dtypes:
        for group in groups:
            if group == ENCODER:
                for shape in grid.encoders:
                    yield measure_encoder(shape, grid, dtype, machine, budget)
                continue
            for call in GROUPS[group](grid, dtype):
                peers = peers_of(call, compiled=is_compiled(call, grid))
                yield measure(call, partial(call.run, machine.kernels), peers, machine, budget)


def _until_lost(results: Iterator[Result], progress: Progress) -> Iterator[list[Result]]:
    """Yield the list of results, also if the device is lost on the way."""
    rows: list[Result] = []
    try:
        for r in results:
            rows.append(r)
            progress(f"{r.op} {r.shape} {r.dtype} {r.system}: {r.summary}")
    except DeviceLostError:
        yield rows
        raise
    yield rows


if __name__ == "__main__":
    app()
