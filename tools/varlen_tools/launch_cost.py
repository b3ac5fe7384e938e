"""What the host pays to launch each op: `python -m varlen_tools.launch_cost`. Needs no GPU.

Each launcher is called on tensors that are there already, with a stand-in for the driver, so what is
measured is Python alone: the launcher's checks and Triton's own dispatch. What the driver adds on a GPU, some
microseconds that overlap with the GPU's work, is not in it.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import triton
import typer
from rich.console import Console
from rich.table import Table
from triton.runtime.jit import JITFunction

from varlen_tools.dry_run import dry_run
from varlen_tools.kernel_calls.any_batch import ANY_BATCH

_LENGTHS = (5, 20, 80, 200)


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the median time of a call, after some that do not count."""
    times = []
    for _ in range(calls + 10):
        began = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times[10:]) / 1000


@contextmanager
def counted_launches() -> Iterator[list[float]]:
    """Collect the microseconds of each launch inside Triton's own dispatch."""
    spent: list[float] = []
    run = JITFunction.run

    def timed(*arguments: object, **options: object) -> object:
        began = time.perf_counter_ns()
        result = run(*arguments, **options)
        spent.append((time.perf_counter_ns() - began) / 1000)
        return result

    JITFunction.run = timed
    try:
        yield spent
    finally:
        JITFunction.run = run


def main(
    ops: Annotated[list[str] | None, typer.Argument(help="Of `fused`; all if none.")] = None,
    calls: Annotated[int, typer.Option(min=1, help="Of each op.")] = 1000,
) -> None:
    """Print the median microseconds of one call of each op."""
    table = Table(title=f"host time of a call, triton {triton.__version__}")
    table.add_column("op")
    for column in ("launches", "us in Triton", "us in all"):
        table.add_column(column, justify="right")
    for op in ops or ANY_BATCH:
        call = ANY_BATCH[op](_LENGTHS, torch.bfloat16)
        with dry_run(90):
            in_all = microseconds(call, calls)
            with counted_launches() as spent:
                for _ in range(calls):
                    call()
        launches = len(spent) // calls
        in_triton = launches * statistics.median(spent)
        table.add_row(op, str(launches), f"{in_triton:.1f}", f"{in_all:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
