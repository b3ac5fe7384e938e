"""Fill Triton's cache with the kernels of the stages that follow, in many processes."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer

from varlen_bench.gpu_report.smoke import smoke_calls
from varlen_bench.harness.machine import cpu_count
from varlen_bench.harness.rows import bench_line
from varlen_bench.kernels.grid import DTYPES, GROUPS, QUICK
from varlen_bench.launch_choices import compile_ahead, default_runs, run_empty
from varlen_kernels.tuning import capability_text

_MAX_PROCESSES = 16


def runs() -> list[Callable[[], object]]:
    """Return the calls of the smoke test and of the benchmark, with their default launches."""
    smoke = [partial(run_empty, call) for dtype in DTYPES.values() for call in smoke_calls(dtype)]
    return smoke + default_runs(QUICK, list(GROUPS), ["bf16"])


def main(budget: Annotated[float, typer.Option(min=1, help="Seconds.")] = 60) -> None:
    """Compile for this GPU; print how many kernels were not cached."""
    capability = "none"
    if torch.cuda.is_available():
        capability = capability_text(torch.cuda.get_device_capability())
    count = len(runs())
    processes = min(cpu_count(), _MAX_PROCESSES)
    with compile_ahead(runs, count, capability, processes) as compiling:
        compiled = compiling.wait(range(count), budget)
    print(bench_line("compile", {"capability": capability, "calls": count, "kernels": compiled}))


if __name__ == "__main__":
    typer.run(main)
