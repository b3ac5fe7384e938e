"""Print the machine code of every kernel in figures: `python -m varlen_bench.inspect_kernels [OP...]`. Needs no GPU.

Compiles the calls of `ops.compiled` and prints registers, loads and tensor-core instructions. `--write` makes the
registers the ceilings of the compile tests; use it after a kernel was changed on purpose, under both versions of
Triton that `make test-kernels` uses.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import triton
import typer
from rich.console import Console
from rich.table import Table

from varlen_bench.kernel_limits import (
    ARCHES,
    CEILINGS,
    ceilings_of,
    compile_call,
    place,
    problems,
    read_ceilings,
    write_ceilings,
)
from varlen_bench.machine_code import MachineCode
from varlen_bench.ops.compiled import COMPILED

# all but kernel and arch
_FIGURES = [figure.name for figure in fields(MachineCode)[2:]]


def main(
    ops: Annotated[list[str] | None, typer.Argument(help="Launchers; all if none.")] = None,
    arch: Annotated[list[int] | None, typer.Option(help="Such as 90; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Such as bfloat16.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write ceilings into this CSV.")] = None,
) -> None:
    """Print the figures of every kernel, and what is wrong with it."""
    calls = [call for call in COMPILED if not ops or call.op in ops]
    if not calls:
        raise typer.BadParameter(f"no call of {', '.join(ops or ())} is listed")
    table = Table(title=f"triton {triton.__version__}")
    for column in ("call", "kernel", "dtype", "sm"):
        table.add_column(column, no_wrap=True)
    for figure in _FIGURES:
        table.add_column(figure.replace("_", " "), justify="right", max_width=9)
    names = {call.name for call in COMPILED}
    read = read_ceilings(write or CEILINGS)
    ceilings = {where: ceiling for where, ceiling in read.items() if where.call in names}
    found: list[str] = []
    for call, kind, target in ((c, d, a) for c in calls for d in c.dtypes for a in arch or ARCHES):
        name = str(kind).removeprefix("torch.")
        if dtype and name not in dtype:
            continue
        codes = compile_call(call, kind, target)
        for code in codes:
            figures = [str(getattr(code, figure)) for figure in _FIGURES]
            table.add_row(call.name, code.kernel, name, str(code.arch), *figures)
        if write is not None:
            ceilings |= ceilings_of((place(call, kind, code), code) for code in codes)
        lines = problems(call, kind, codes, ceilings)
        found += [f"{call.name} {kind} sm_{target}: {line}" for line in lines]
    # wide enough that nothing is cut if the output is no terminal
    Console(width=None if Console().is_terminal else 200).print(table)
    if write is not None:
        write_ceilings(write, ceilings)
    for line in found:
        print(line)
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
