"""Limits of each kernel's machine code, and its figures: `python -m varlen_bench.inspect_kernels [OP...]`.

Compiles the calls of `ops.compiled` and needs no GPU. Limits are of spills, shared memory, registers, instructions,
loads and tensor cores. Two CSVs in the repository hold ceilings of registers and instructions per kernel, Triton
version and compute capability, because a change that needs more makes a kernel slower and no other test fails.
`--write` stores them. Use it after a kernel was changed on purpose, under both Triton versions of `make test-kernels`.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import triton
import typer
from rich.console import Console
from rich.table import Table

from varlen_bench.dry_run import SHARED_MEMORY_LIMITS, dry_run
from varlen_bench.machine_code import MachineCode, read_machine_code
from varlen_bench.ops.compiled import COMPILED, CompiledCall
from varlen_kernels.tuning import minor_version

# all fields but kernel and arch
_FIGURES = [figure.name for figure in fields(MachineCode)[2:]]
# Compute capabilities to compile for: A100, and H100/H200.
ARCHES = (80, 90)
CEILINGS = Path("tests/kernels/compiled/registers.csv")
_WRITE = f"python -m varlen_bench.inspect_kernels --write {CEILINGS}"
# Figures with ceilings, and the unit that these are rounded up to. A GPU allocates registers in units of eight.
# Code may grow a little with constants; a new path of a kernel takes more.
UNITS = {"registers": 8, "instructions": 64}


@dataclass(frozen=True, slots=True, order=True)
class CeilingKey:
    """Row and column of a ceiling in the CSV."""

    call: str
    kernel: str
    dtype: str
    column: str


# Ceilings of one figure.
Ceilings: TypeAlias = dict[CeilingKey, int]


def compile_call(call: CompiledCall, dtype: torch.dtype, arch: int) -> list[MachineCode]:
    """Return the machine code of the kernels that a call launches, in order."""
    with dry_run(arch) as compiled:
        call.run(dtype)
    return [read_machine_code(compilation) for compilation in compiled]


def problems(
    call: CompiledCall,
    dtype: torch.dtype,
    codes: Iterable[MachineCode],
    ceilings: Mapping[str, Ceilings],
) -> list[str]:
    """Return one line per exceeded limit of a call's kernels.

    Args:
        ceilings: ceilings by figure. A kernel must have a ceiling of registers; without others it is not checked.
    """
    codes = list(codes)
    found = [] if codes else ["no kernel was compiled"]
    for code in codes:
        found += [f"{code.kernel}: {line}" for line in _problems(call, code)]
        for figure, limits in ceilings.items():
            ceiling, count = limits.get(ceiling_key(call, dtype, code)), getattr(code, figure)
            if ceiling is not None and count > ceiling:
                found.append(f"{code.kernel}: {count} {figure}; its ceiling is {ceiling}")
            elif ceiling is None and figure == "registers":
                found.append(f"{code.kernel}: no register ceiling; write one: {_WRITE}")
    # sm_90 has HGMMA, sm_80 HMMA
    uses_tensor_cores = any(code.wgmma if code.arch == 90 else code.mma for code in codes)
    if call.tensor_cores and dtype != torch.float32 and not uses_tensor_cores:
        found.append("no kernel uses tensor cores")
    return found


def _problems(call: CompiledCall, code: MachineCode) -> Iterator[str]:
    if code.stack_bytes:
        yield f"registers spill: {code.stack_bytes} bytes of stack"
    limit = SHARED_MEMORY_LIMITS[code.arch]
    if code.shared_bytes > limit:
        yield f"{code.shared_bytes} bytes of shared memory; sm_{code.arch} has {limit}"
    if call.narrow_loads is not None:
        if code.narrow_loads > call.narrow_loads:
            yield f"{code.narrow_loads} loads under 128 bits; allowed: {call.narrow_loads}"
        if not code.wide_loads:
            yield "no load of 128 bits"


def ceiling_key(call: CompiledCall, dtype: torch.dtype, code: MachineCode) -> CeilingKey:
    """Return the key of a kernel's ceiling under the installed Triton."""
    column = f"triton {minor_version()} sm_{code.arch}"
    return CeilingKey(call.name, code.kernel, str(dtype).removeprefix("torch."), column)


def lowest_ceilings(figure: str, codes: Iterable[tuple[CeilingKey, MachineCode]]) -> Ceilings:
    """Return the lowest ceilings of a figure that these kernels do not exceed."""
    unit = UNITS[figure]
    ceilings: Ceilings = {}
    for key, code in codes:
        # a call may compile a kernel several times, for different constants
        rounded = -(-getattr(code, figure) // unit) * unit
        ceilings[key] = max(rounded, ceilings.get(key, 0))
    return ceilings


def ceiling_files(registers: Path = CEILINGS) -> dict[str, Path]:
    """Return the file of each figure; they are in one folder."""
    return {"registers": registers, "instructions": registers.with_name("instructions.csv")}


def read_ceilings(path: Path) -> Ceilings:
    """Return the ceilings of a CSV file, which may be missing."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            CeilingKey(row["call"], row["kernel"], row["dtype"], column): int(row[column])
            for row in csv.DictReader(file)
            for column in row
            if column.startswith("triton ") and row[column]
        }


def write_ceilings(path: Path, ceilings: Ceilings) -> None:
    """Write ceilings: one row per call, kernel and dtype, one column per Triton and GPU."""
    columns = sorted({key.column for key in ceilings})
    rows = sorted({(key.call, key.kernel, key.dtype) for key in ceilings})
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["call", "kernel", "dtype", *columns])
        for row in rows:
            writer.writerow(
                [*row, *(ceilings.get(CeilingKey(*row, column), "") for column in columns)]
            )


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
