"""Print the machine code figures of every kernel: `python -m varlen_bench.inspect_kernels [OP...]`.

Compiles the calls of `ops.compiled` and needs no GPU. `--write` stores registers, and instructions in a file beside
them, as the ceilings of the compile tests. Use it after a kernel was changed on purpose, under both Triton versions of
`make test-kernels`.
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
    ceiling_files,
    ceiling_key,
    compile_call,
    lowest_ceilings,
    problems,
    read_ceilings,
    write_ceilings,
)
from varlen_bench.machine_code import MachineCode
from varlen_bench.ops.compiled import COMPILED

# all fields but kernel and arch
_FIGURES = [figure.name for figure in fields(MachineCode)[2:]]


def main(
    ops: Annotated[list[str] | None, typer.Argument(help="Launchers; all if none.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write ceilings of registers into this CSV.")
    ] = None,
) -> None:
    """Print the figures of every kernel, and the limits that it exceeds."""
    calls = [call for call in COMPILED if not ops or call.op in ops]
    if not calls:
        raise typer.BadParameter(f"no call of {', '.join(ops or ())} is listed")
    table = Table(title=f"triton {triton.__version__}")
    for column in ("call", "kernel", "dtype", "sm"):
        table.add_column(column, no_wrap=True)
    for figure in _FIGURES:
        table.add_column(figure.replace("_", " "), justify="right", max_width=9)
    listed = {call.name for call in COMPILED}
    files = ceiling_files(write or CEILINGS)
    ceilings = {
        figure: {key: most for key, most in read_ceilings(file).items() if key.call in listed}
        for figure, file in files.items()
    }
    found: list[str] = []
    for call, dtype, arch in ((c, d, a) for c in calls for d in c.dtypes for a in ARCHES):
        codes = compile_call(call, dtype, arch)
        for code in codes:
            figures = [str(getattr(code, figure)) for figure in _FIGURES]
            table.add_row(call.name, code.kernel, str(dtype)[6:], str(arch), *figures)
        if write is not None:
            keyed = [(ceiling_key(call, dtype, code), code) for code in codes]
            for figure in ceilings:
                ceilings[figure] |= lowest_ceilings(figure, keyed)
        lines = problems(call, dtype, codes, ceilings)
        found += [f"{call.name} {dtype} sm_{arch}: {line}" for line in lines]
    # wide enough for all columns if the output is not a terminal
    Console(width=None if Console().is_terminal else 200).print(table)
    if write is not None:
        for figure, file in files.items():
            write_ceilings(file, ceilings[figure])
    for line in found:
        print(line)
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
