"""Exceeded limits of machine code are reported; ceilings are stored in a CSV."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from varlen_bench import inspect_kernels
from varlen_bench.inspect_kernels import (
    CeilingKey,
    ceiling_key,
    lowest_ceilings,
    problems,
    read_ceilings,
    write_ceilings,
)
from varlen_bench.machine_code import MachineCode
from varlen_bench.ops.compiled import CompiledCall

pytestmark = pytest.mark.full

DTYPE = torch.bfloat16
NORM = CompiledCall("add_layer_norm", "256", {"tokens": 8, "hidden": 256}, dtypes=(DTYPE,))
CALL = replace(NORM, narrow_loads=2)
GOOD = MachineCode(
    kernel="_norm_kernel",
    arch=90,
    num_warps=4,
    registers=40,
    stack_bytes=0,
    shared_bytes=1024,
    instructions=400,
    wide_loads=5,
    narrow_loads=2,
    wide_stores=1,
    narrow_stores=0,
    mma=0,
    wgmma=0,
    barriers=0,
)
CEILINGS = {
    "registers": {ceiling_key(CALL, DTYPE, replace(GOOD, arch=arch)): 40 for arch in (80, 90)}
}


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"stack_bytes": 48}, "registers spill: 48 bytes of stack"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory; sm_90 has 232448"),
        ({"shared_bytes": 166913, "arch": 80}, "166913 bytes of shared memory; sm_80 has 166912"),
        ({"narrow_loads": 3}, "3 loads under 128 bits; allowed: 2"),
        ({"wide_loads": 0}, "no load of 128 bits"),
        ({"registers": 41}, "41 registers; its ceiling is 40"),
        ({"instructions": 449}, "449 instructions; its ceiling is 448"),
    ],
    ids=str,
)
def test_each_exceeded_limit_is_reported(change: dict[str, int], problem: str) -> None:
    code = replace(GOOD, **change)  # type: ignore[arg-type]

    ceilings = {**CEILINGS, "instructions": dict.fromkeys(CEILINGS["registers"], 448)}
    assert problems(CALL, DTYPE, [GOOD], ceilings) == []
    assert problems(CALL, DTYPE, [code], ceilings) == [f"_norm_kernel: {problem}"]


def test_a_call_without_a_load_limit_may_have_narrow_loads() -> None:
    code = replace(GOOD, wide_loads=0, narrow_loads=99)

    assert problems(replace(CALL, narrow_loads=None), DTYPE, [code], CEILINGS) == []


def test_a_missing_ceiling_and_a_missing_kernel_are_reported() -> None:
    (no_ceiling,) = problems(CALL, torch.float32, [GOOD], CEILINGS)

    assert "python -m varlen_bench.inspect_kernels --write" in no_ceiling
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
def test_16_bit_kernels_must_use_the_tensor_cores_of_their_gpu(
    dtype: torch.dtype, arch: int, mma: int, wgmma: int, enough: bool
) -> None:
    other = replace(GOOD, arch=arch)
    code = replace(other, mma=mma, wgmma=wgmma)
    ceilings = {"registers": {ceiling_key(CALL, dtype, code): 40}}

    found = problems(replace(CALL, tensor_cores=True), dtype, [other, code], ceilings)

    assert found == ([] if enough else ["no kernel uses tensor cores"])


def test_a_ceiling_is_the_largest_count_rounded_up_to_eight() -> None:
    key = ceiling_key(CALL, DTYPE, GOOD)
    codes = [(key, replace(GOOD, registers=registers)) for registers in (17, 41, 32)]

    assert lowest_ceilings("registers", codes) == {key: 48}


def test_a_ceiling_of_instructions_leaves_little_room() -> None:
    key = ceiling_key(CALL, DTYPE, GOOD)
    codes = [(key, replace(GOOD, instructions=count)) for count in (400, 449)]

    assert lowest_ceilings("instructions", codes) == {key: 512}


def test_ceilings_are_read_as_they_were_written(tmp_path: Path) -> None:
    ceilings = {
        CeilingKey("norm-768", "_norm_kernel", "bfloat16", "triton 3.6 sm_80"): 40,
        CeilingKey("norm-768", "_norm_kernel", "bfloat16", "triton 3.9 sm_90"): 48,
        CeilingKey("gate-768", "_gate_kernel", "float32", "triton 3.9 sm_90"): 56,
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


def test_the_command_reports_problems_until_ceilings_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "registers.csv"
    monkeypatch.setattr(inspect_kernels, "COMPILED", [NORM])
    monkeypatch.setattr(inspect_kernels, "CEILINGS", path)
    # the ceiling of a call that is no longer listed is dropped
    write_ceilings(path, {CeilingKey("gone-1", "_gone_kernel", "float32", "triton 3.6 sm_80"): 8})

    before = run("add_layer_norm")
    written = run("--write", str(path))
    after = run()
    rejected = run("no_such_op")

    assert rejected.exit_code == 2
    assert "no call of no_such_op is listed" in rejected.output
    assert (before.exit_code, written.exit_code, after.exit_code) == (1, 0, 0)
    line = "add_layer_norm-256 torch.bfloat16 sm_90: _norm_kernel: no register ceiling"
    assert line in before.stdout
    assert "_norm_kernel" in after.stdout
    ceilings = read_ceilings(path)
    assert {key.call for key in ceilings} == {"add_layer_norm-256"}
    assert {key.column[-5:] for key in ceilings} == {"sm_80", "sm_90"}
    assert read_ceilings(path.with_name("instructions.csv")).keys() == ceilings.keys()


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(inspect_kernels.main)
    return CliRunner().invoke(app, arguments)
