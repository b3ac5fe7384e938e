"""Limits of a kernel's machine code: no spills, shared memory that fits, wide loads, tensor cores.

Registers have ceilings by version of Triton and compute capability, in a CSV that is checked in: more registers
than before make a kernel slow without a failing test. A GPU allocates registers in units of eight.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from varlen_bench.dry_run import SHARED_MEMORY_LIMITS, dry_run
from varlen_bench.machine_code import MachineCode, read_machine_code
from varlen_bench.ops.compiled import CompiledCall
from varlen_kernels.tuning import minor_version

# Compute capabilities that every call is compiled for: A100; H100 and H200.
ARCHES = (80, 90)
CEILINGS = Path("tests/kernels/compiled/registers.csv")
_WRITE = f"python -m varlen_bench.inspect_kernels --write {CEILINGS}"
_REGISTER_UNIT = 8


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The row and the column of a ceiling in the CSV."""

    call: str
    kernel: str
    dtype: str
    column: str


def compile_call(call: CompiledCall, dtype: torch.dtype, arch: int) -> list[MachineCode]:
    """Return the machine code of the kernels that the call launches, in their order."""
    with dry_run(arch) as compiled:
        call.run(dtype)
    return [read_machine_code(compilation) for compilation in compiled]


def problems(
    call: CompiledCall, dtype: torch.dtype, codes: Iterable[MachineCode], ceilings: dict[Place, int]
) -> list[str]:
    """Return what is wrong with the machine code of a call's kernels, one line each."""
    codes = list(codes)
    found = [] if codes else ["no kernel was compiled"]
    for code in codes:
        found += [f"{code.kernel}: {line}" for line in _problems(call, code)]
        ceiling = ceilings.get(place(call, dtype, code))
        if ceiling is None:
            found.append(f"{code.kernel}: has no ceiling for its registers; write one: {_WRITE}")
        elif code.registers > ceiling:
            found.append(f"{code.kernel}: {code.registers} registers; its ceiling is {ceiling}")
    # HGMMA on sm_90, HMMA before
    multiplies = any(code.wgmma if code.arch == 90 else code.mma for code in codes)
    if call.tensor_cores and dtype != torch.float32 and not multiplies:
        found.append("no kernel multiplies on tensor cores")
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


def place(call: CompiledCall, dtype: torch.dtype, code: MachineCode) -> Place:
    """Return the place of a kernel's ceiling for the Triton of this process."""
    column = f"triton {minor_version()} sm_{code.arch}"
    return Place(call.name, code.kernel, str(dtype).removeprefix("torch."), column)


def ceilings_of(codes: Iterable[tuple[Place, MachineCode]]) -> dict[Place, int]:
    """Return the lowest ceilings that these kernels keep."""
    ceilings: dict[Place, int] = {}
    for where, code in codes:
        allocated = -(-code.registers // _REGISTER_UNIT) * _REGISTER_UNIT
        # a call may compile one kernel in several forms
        ceilings[where] = max(allocated, ceilings.get(where, 0))
    return ceilings


def read_ceilings(path: Path) -> dict[Place, int]:
    """Return the ceilings of a CSV; none if it does not exist."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            Place(row["call"], row["kernel"], row["dtype"], column): int(row[column])
            for row in csv.DictReader(file)
            for column in row
            if column.startswith("triton ") and row[column]
        }


def write_ceilings(path: Path, ceilings: dict[Place, int]) -> None:
    """Write ceilings: a row for each call, kernel and dtype, a column for each compiler and GPU."""
    columns = sorted({where.column for where in ceilings})
    rows = sorted({(where.call, where.kernel, where.dtype) for where in ceilings})
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["call", "kernel", "dtype", *columns])
        for row in rows:
            writer.writerow([*row, *(ceilings.get(Place(*row, column), "") for column in columns)])
