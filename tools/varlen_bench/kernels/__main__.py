"""Command line of the kernel benchmark; `make bench-kernels` runs it with its defaults."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from varlen_bench.harness import rows as bench_report
from varlen_bench.kernels import report
from varlen_bench.kernels.encoder import ENCODER, HOST, SHARE, measure_encoder
from varlen_bench.kernels.grid import FULL, TINY, Grid
from varlen_bench.kernels.groups import GROUPS, chosen_groups
from varlen_bench.kernels.machine import (
    Budget,
    DeviceLostError,
    Machine,
    gpu_machine,
    stand_in_machine,
)
from varlen_bench.kernels.measure import Result, measure
from varlen_bench.kernels.timing import SAMPLES, copy_rate

DEFAULT_OUTPUT = Path("docs/benchmarks/kernels.csv")
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "varlen")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class _Plan:
    grid: Grid
    groups: list[str]
    dtypes: list[torch.dtype]


@app.command()
def main(
    only: Annotated[
        str, typer.Option(help=f"Of {', '.join([*GROUPS, ENCODER])}, by comma; all when empty.")
    ] = "",
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}, by comma.")] = "bf16",
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds; what does not fit is skipped and says so.")
    ] = 3000,
    passes: Annotated[
        int, typer.Option(min=1, help="Timed passes, of which the median.")
    ] = SAMPLES,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tiny shapes on the CPU, times made up.")
    ] = False,
    revision: Annotated[str, typer.Option(help="Git's, where the tree is a copy.")] = "",
    output: Annotated[
        Path | None,
        typer.Option(help=f"CSV file to append rows to; {DEFAULT_OUTPUT} unless a dry run."),
    ] = None,
) -> None:
    """Compare our kernels with torch, torch.compile, liger-kernel and transformers on this GPU."""
    try:
        plan = _Plan(TINY if dry_run else FULL, chosen_groups(only), _chosen_dtypes(dtypes))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if dry_run:
        machine = stand_in_machine()
    elif torch.cuda.is_available():
        machine, output = gpu_machine(passes), output or DEFAULT_OUTPUT
    else:
        print("bench-kernels: skipped, since torch sees no CUDA GPU here; --dry-run needs none")
        return
    provenance = bench_report.provenance(
        threads=torch.get_num_threads(),
        packages=PACKAGES,
        command=_command(only, dtypes, budget, passes, dry_run),
        root=Path.cwd(),
    )
    if revision:
        provenance = replace(provenance, revision=revision)
    console = Console(width=None if os.isatty(1) else 180)
    copy = copy_rate(machine.timer, machine.device, plan.grid.copy_bytes)
    print(f"{machine.gpu}, driver {machine.driver}, {provenance.versions}")
    print(f"a copy of {plan.grid.copy_bytes:,} bytes on the device: {copy:,.0f} GB/s", flush=True)
    results: list[Result] = []
    lost = ""
    try:
        for rows in _measure_all(plan, machine, Budget(budget)):
            results += rows
            if output is not None:
                described = report.csv_rows(rows, gpu=machine.gpu, driver=machine.driver, copy=copy)
                bench_report.append_rows(output, provenance, described)
    except DeviceLostError as error:
        lost = f"stopped: {error}; the rest was not measured"
    _print_tables(console, results, copy)
    for line in [*report.missing(results), *filter(None, [lost])]:
        print(line)
    print(f"rows appended to {output}" if output else "no rows were written")
    print(bench_report.bench_line("kernels", report.bench_figures(results, machine.gpu, copy)))
    if lost:
        raise typer.Exit(1)


def _measure_all(plan: _Plan, machine: Machine, budget: Budget) -> Iterator[list[Result]]:
    """Yield the results of one case or encoder at a time, so that a run that is cut short keeps its rows."""
    for dtype in plan.dtypes:
        for group in plan.groups:
            if group == ENCODER:
                for shape in plan.grid.encoders:
                    yield from _in_parts(measure_encoder(shape, plan.grid, dtype, machine, budget))
                continue
            for case in GROUPS[group](plan.grid, dtype):
                yield from _in_parts(measure(case, machine, budget))


def _in_parts(found: Iterator[Result]) -> Iterator[list[Result]]:
    """Yield all that is found at once, and what there is of it if the device is lost."""
    rows: list[Result] = []
    try:
        for result in found:
            rows.append(result)
            _say(result)
    except DeviceLostError:
        yield rows
        raise
    yield rows


def _say(result: Result) -> None:
    times = [
        f"{timing.median:.1f} us {how}"
        for timing, how in ((result.graph, "in a graph"), (result.eager, "by Python"))
        if timing is not None
    ]
    about = ", ".join([*times, *filter(None, [result.note])])
    print(f"{result.op} {result.shape} {result.dtype} {result.system}: {about}", flush=True)


def _print_tables(console: Console, results: Sequence[Result], copy: float) -> None:
    for op in dict.fromkeys(result.op for result in results):
        listed = op in {ENCODER, SHARE, HOST}
        console.print(report.listing(results, op) if listed else report.table(results, op, copy))


def _chosen_dtypes(names: str) -> list[torch.dtype]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in DTYPES:
            raise ValueError(f"{name!r} is no dtype; there are {', '.join(DTYPES)}")
    return [DTYPES[name] for name in wanted]


def _command(only: str, dtypes: str, budget: float, passes: int, dry_run: bool) -> str:
    words = ["python", "-m", "varlen_bench.kernels"]
    words += ["--only", only] if only else []
    words += ["--dtypes", dtypes, "--budget", f"{budget:g}", "--passes", str(passes)]
    words += ["--dry-run"] if dry_run else []
    return shlex.join(words)


if __name__ == "__main__":
    app()
