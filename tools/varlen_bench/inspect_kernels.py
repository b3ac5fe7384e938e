"""What the compiler makes of every kernel: `python -m varlen_bench.inspect_kernels [OP...]`. Needs no GPU.

Compiles the calls that `kernel_calls` lists and prints registers, loads and tensor-core instructions. With
`--write` the registers become the ceilings that the compile tests hold kernels to; do this after a kernel was
changed on purpose, under both versions of Triton that `make test-kernels` uses.
"""

from pathlib import Path
from typing import Annotated

import torch
import triton
import typer
from rich.console import Console
from rich.table import Table

from varlen_bench.kernel_limits import (
    ARCHES,
    CEILINGS,
    Place,
    ceilings_of,
    compile_call,
    place,
    problems,
    read_ceilings,
    write_ceilings,
)
from varlen_bench.machine_code import MachineCode
from varlen_bench.ops import Call, all_calls

_COLUMNS = {
    "warps": "num_warps",
    "registers": "registers",
    "stack": "stack_bytes",
    "shared": "shared_bytes",
    "wide loads": "wide_loads",
    "narrow loads": "narrow_loads",
    "wide stores": "wide_stores",
    "narrow stores": "narrow_stores",
    "mma": "mma",
    "wgmma": "wgmma",
    "barriers": "barriers",
}


def main(
    ops: Annotated[list[str] | None, typer.Argument(help="Of `fused`; all if none.")] = None,
    arch: Annotated[list[int] | None, typer.Option(help="Such as 90; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Such as bfloat16.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write ceilings into this CSV.")] = None,
) -> None:
    """Print what every kernel became, and what is wrong with it."""
    calls = [call for call in all_calls() if not ops or call.op in ops]
    if not calls:
        raise typer.BadParameter(f"no call of {', '.join(ops or ())} is listed")
    table = Table(title=f"triton {triton.__version__}")
    for column in ("call", "kernel", "dtype", "sm"):
        table.add_column(column, no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", max_width=9)
    names = {call.name for call in all_calls()}
    ceilings = {
        where: ceiling
        for where, ceiling in read_ceilings(write or CEILINGS).items()
        if where.call in names
    }
    found: list[str] = []
    for call, kind, target in _cases(calls, arch or list(ARCHES), dtype):
        codes = compile_call(call, kind, target)
        for code in codes:
            table.add_row(*_cells(place(call, kind, code), code))
        if write is not None:
            ceilings |= ceilings_of((place(call, kind, code), code) for code in codes)
        case = f"{call.name} {kind} sm_{target}"
        found += [f"{case}: {line}" for line in problems(call, kind, codes, ceilings)]
    # wide enough that nothing is cut where the output is no terminal
    Console(width=None if Console().is_terminal else 200).print(table)
    if write is not None:
        write_ceilings(write, ceilings)
    for line in found:
        print(line)
    raise typer.Exit(1 if found else 0)


def _cases(
    calls: list[Call], arches: list[int], dtypes: list[str] | None
) -> list[tuple[Call, torch.dtype, int]]:
    """Return every call in each of its dtypes that was asked for, on each architecture."""
    return [
        (call, dtype, arch)
        for call in calls
        for dtype in call.dtypes
        if not dtypes or str(dtype).removeprefix("torch.") in dtypes
        for arch in arches
    ]


def _cells(where: Place, code: MachineCode) -> list[str]:
    counts = [str(getattr(code, field)) for field in _COLUMNS.values()]
    return [where.call, code.kernel, where.dtype, str(code.arch), *counts]


if __name__ == "__main__":
    typer.run(main)
