"""Ops are compiled ahead for chosen levels; a first start compiles what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ci.scripts import PROJECT
from varlen_kernels.cpu import compile_all as command
from varlen_kernels.cpu.calls import machine_code
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.compile_all import common_ops, compile_missing
from varlen_kernels.cpu.native.target_cpu import LEVELS
from varlen_kernels.functions import ENTRIES

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="ops are compiled")
_OPS = ("run_alone", "run_shared")


def compile_all(kernels, *arguments):
    """Return the finished command, run with a copy of the kernels."""
    return subprocess.run(
        [sys.executable, "-m", "varlen_kernels.cpu.compile_all", *arguments],
        env=os.environ | {"PYTHONPATH": str(kernels)},
        cwd=kernels,
        capture_output=True,
        text=True,
        check=False,
    )


def copy_kernels(target):
    """Copy the kernels without compiled code; return the folder of code, which is empty."""
    shutil.copytree(
        PROJECT / "kernels", target, ignore=lambda *_: ["code", "__pycache__"], dirs_exist_ok=True
    )
    code = target / "varlen_kernels/cpu/code"
    code.mkdir()
    return code


@pytest.mark.full
def test_the_levels_of_a_wheel_are_compiled_with_progress_and_other_code_is_removed(tmp_path):
    code = copy_kernels(tmp_path)
    (code / "attend-avx2-of_other_sources.o").touch()

    done = compile_all(tmp_path, "avx2", "avx512", "--ops", ",".join(_OPS), "--only")

    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    begins = {line.partition(":")[0] for line in lines}
    assert begins == {
        f"level {place} of 2 ({level}), op {number} of 2"
        for place, level in ((1, "avx2"), (2, "avx512"))
        for number in (0, 1, 2)
    }
    assert last.startswith("compiled 2 ops for avx2, avx512 in ")
    names = {path.name.rpartition("-")[0] for path in code.iterdir()}
    assert names == {f"{op}-{level}" for op in _OPS for level in ("avx2", "avx512")}


def test_the_common_ops_are_those_of_one_level():
    done = compile_all(PROJECT / "kernels", "--all", "--common")

    assert done.returncode == 2
    assert f"--common takes one level, not {len(LEVELS)}" in done.stderr


@pytest.mark.full
def test_an_op_that_does_not_exist_is_named(tmp_path):
    done = compile_all(PROJECT / "kernels", "avx2", "--ops", "attention")

    assert done.returncode == 1
    assert "there is no op attention; allowed: activate, " in done.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of code."""
    monkeypatch.setattr(machine_code, "BESIDE", tmp_path)
    monkeypatch.setattr(machine_code, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(command, "usable_cores", lambda: 2)
    monkeypatch.setattr(command, "free_memory", lambda: 2 << 30)
    return tmp_path


def test_what_is_stored_is_not_compiled_again(folder):
    for name in _OPS[1:]:
        level = machine_code.target_cpu().level
        (folder / machine_code.file_name(name, level)).touch()

    # one function is compiled as fast here
    compile_missing(_OPS, lambda: pytest.fail("another process"))


@pytest.mark.full
def test_a_first_start_compiles_what_is_missing_in_other_processes(folder, tmp_path, monkeypatch):
    # the processes import the copy, and store beside it
    code = copy_kernels(tmp_path / "kernels")
    monkeypatch.syspath_prepend(tmp_path / "kernels")

    compile_missing(_OPS, lambda: sys.executable)

    level = machine_code.target_cpu().level
    assert {path.name for path in code.glob("*.o")} == {
        machine_code.file_name(op, level) for op in _OPS
    }


def test_a_first_start_goes_on_where_the_cache_cannot_be_read(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "exists", refuse)

    compile_missing(_OPS, lambda: pytest.fail("another process"))


def test_a_first_start_goes_on_where_no_process_can_be_started(folder, caplog):
    compile_missing(_OPS, lambda: str(folder / "no_python"))

    assert "ops are compiled on one core: " in caplog.text


def test_a_first_start_goes_on_where_the_processes_take_too_long(folder, monkeypatch, caplog):
    script = folder / "python"
    # a process of its own holds its error output open
    script.write_text("#!/bin/sh\nsleep 600 &\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(command, "_MOST_SECONDS", 0.2)

    compile_missing(_OPS, lambda: str(script))

    assert "ops are compiled on one core: " in caplog.text
    assert "timed out" in caplog.text


@pytest.mark.parametrize("others, count", [(0, 3), (1, 2), (5, 1)])
def test_as_many_processes_compile_as_there_is_memory_for(monkeypatch, others, count):
    monkeypatch.setattr(command, "usable_cores", lambda: 16)
    monkeypatch.setattr(command, "free_memory", lambda: 1700 << 20)

    assert command._process_count(others) == count


def test_a_first_start_without_memory_for_processes_compiles_by_itself(folder, monkeypatch):
    monkeypatch.setattr(command, "free_memory", lambda: 1 << 30)

    compile_missing(_OPS, lambda: pytest.fail("another process"))


@pytest.mark.parametrize(
    "level, attend", [("avx2", "attend"), ("avx512_bf16", "attend_bf16")], ids=str
)
def test_common_ops_exist_and_are_of_the_default_dtype(level, attend):
    ops = common_ops(level)

    assert {*ENTRIES} >= {*ops}
    assert attend in ops
    assert len(ops) == len({op.removesuffix("_bf16") for op in ops})
