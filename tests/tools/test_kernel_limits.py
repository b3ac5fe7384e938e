"""Each fault of machine code is reported, and ceilings live in a CSV."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from varlen_bench import inspect_kernels
from varlen_bench.kernel_limits import (
    Place,
    ceilings_of,
    compile_call,
    place,
    problems,
    read_ceilings,
    write_ceilings,
)
from varlen_bench.machine_code import MachineCode
from varlen_bench.ops.compiled import CompiledCall
from varlen_bench.ops.rows import add_layer_norm

DTYPE = torch.bfloat16
NORM = CompiledCall("256", partial(add_layer_norm, 8, 256), dtypes=(DTYPE,))
CALL = replace(NORM, narrow_loads=2)
GOOD = MachineCode(
    kernel="_norm_kernel",
    arch=90,
    num_warps=4,
    registers=40,
    stack_bytes=0,
    shared_bytes=1024,
    wide_loads=5,
    narrow_loads=2,
    wide_stores=1,
    narrow_stores=0,
    mma=0,
    wgmma=0,
    barriers=0,
)
CEILINGS = {place(CALL, DTYPE, replace(GOOD, arch=arch)): 40 for arch in (80, 90)}


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"stack_bytes": 48}, "registers spill: 48 bytes of stack"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory; sm_90 has 232448"),
        ({"shared_bytes": 166913, "arch": 80}, "166913 bytes of shared memory; sm_80 has 166912"),
        ({"narrow_loads": 3}, "3 loads under 128 bits; allowed: 2"),
        ({"wide_loads": 0}, "no load of 128 bits"),
        ({"registers": 41}, "41 registers; its ceiling is 40"),
    ],
    ids=str,
)
def test_each_problem_is_named(change: dict[str, int], problem: str) -> None:
    code = replace(GOOD, **change)  # type: ignore[arg-type]

    assert problems(CALL, DTYPE, [GOOD], CEILINGS) == []
    assert problems(CALL, DTYPE, [code], CEILINGS) == [f"_norm_kernel: {problem}"]


def test_loads_of_an_odd_width_may_be_narrow() -> None:
    code = replace(GOOD, wide_loads=0, narrow_loads=99)

    assert problems(replace(CALL, narrow_loads=None), DTYPE, [code], CEILINGS) == []


def test_a_missing_ceiling_says_how_to_write_one() -> None:
    (found,) = problems(CALL, torch.float32, [GOOD], CEILINGS)

    assert "python -m varlen_bench.inspect_kernels --write" in found


def test_a_call_that_compiles_nothing_is_a_problem() -> None:
    assert problems(CALL, DTYPE, [], CEILINGS) == ["no kernel was compiled"]


@pytest.mark.parametrize(
    "dtype, arch, mma, wgmma, enough",
    [
        (DTYPE, 80, 1, 0, True),
        (DTYPE, 90, 1, 0, False),
        (DTYPE, 90, 0, 1, True),
        (torch.float32, 90, 0, 0, True),
    ],
    ids=str,
)
def test_each_gpu_has_its_own_tensor_cores_and_fp32_needs_none(
    dtype: torch.dtype, arch: int, mma: int, wgmma: int, enough: bool
) -> None:
    other = replace(GOOD, arch=arch)
    code = replace(other, mma=mma, wgmma=wgmma)
    ceilings = {place(CALL, dtype, code): 40}

    found = problems(replace(CALL, tensor_cores=True), dtype, [other, code], ceilings)

    assert found == ([] if enough else ["no kernel multiplies on tensor cores"])


def test_a_ceiling_is_the_allocation_of_the_largest_form() -> None:
    where = place(CALL, DTYPE, GOOD)
    forms = [(where, replace(GOOD, registers=registers)) for registers in (17, 41, 32)]

    assert ceilings_of(forms) == {where: 48}


def test_ceilings_are_read_as_they_were_written(tmp_path: Path) -> None:
    ceilings = {
        Place("norm-768", "_norm_kernel", "bfloat16", "triton 3.6 sm_80"): 40,
        Place("norm-768", "_norm_kernel", "bfloat16", "triton 3.9 sm_90"): 48,
        Place("gate-768", "_gate_kernel", "float32", "triton 3.9 sm_90"): 56,
    }
    path = tmp_path / "registers.csv"
    assert read_ceilings(path) == {}

    write_ceilings(path, ceilings)

    assert read_ceilings(path) == ceilings
    assert path.read_text().splitlines() == [
        "call,kernel,dtype,triton 3.6 sm_80,triton 3.9 sm_90",
        "gate-768,_gate_kernel,float32,,56",
        "norm-768,_norm_kernel,bfloat16,40,48",
    ]


def test_a_call_becomes_machine_code() -> None:
    codes = compile_call(NORM, DTYPE, 90)

    assert [code.kernel for code in codes] == ["_add_layer_norm_kernel"]


def test_the_command_reports_problems_until_ceilings_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "registers.csv"
    monkeypatch.setattr(inspect_kernels, "COMPILED", [NORM])
    monkeypatch.setattr(inspect_kernels, "CEILINGS", path)
    # the ceiling of a call that is gone is dropped
    write_ceilings(path, {Place("gone-1", "_gone_kernel", "float32", "triton 3.6 sm_80"): 8})

    before = run("add_layer_norm", "--arch", "90")
    written = run("--write", str(path))
    after = run("--dtype", "bfloat16")

    assert (before.exit_code, written.exit_code, after.exit_code) == (1, 0, 0)
    line = "add_layer_norm-256 torch.bfloat16 sm_90: _add_layer_norm_kernel: has no"
    assert line in before.stdout
    assert "_add_layer_norm_kernel" in after.stdout
    ceilings = read_ceilings(path)
    assert {where.call for where in ceilings} == {"add_layer_norm-256"}
    assert {where.column[-5:] for where in ceilings} == {"sm_80", "sm_90"}


def test_the_command_refuses_an_op_that_has_no_call() -> None:
    refused = run("no_such_op")

    assert refused.exit_code == 2
    assert "no call of no_such_op is listed" in refused.output


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(inspect_kernels.main)
    return CliRunner().invoke(app, arguments)
