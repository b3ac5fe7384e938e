"""`make help` lists every target; a wrong Python is refused before anything is made."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


TARGETS = {
    "help", "setup", "demo", "serve", "wheels", "bundle", "examples", "test", "test-all", "test-engine", "test-kernels",
    "test-gpu", "gpu-report", "check", "docs",
    "bench-adapters", "bench-adopt", "bench-beam", "bench-encoder", "bench-generate", "bench-memory", "bench-ranks",
    "bench-serving", "bench-kernels", "tune-kernels", "install-backend", "clean"
}  # fmt: skip


def test_help_prints_every_target_from_its_own_comment() -> None:
    run = make("help", folder=PROJECT)

    printed = {line.split()[0]: line for line in run.stdout.splitlines()}
    assert printed.keys() >= TARGETS
    for target, line in printed.items():
        comment = line.split(maxsplit=1)[1]
        assert re.search(rf"^{target}:.*## {re.escape(comment)}$", makefile(), re.MULTILINE)


def test_setup_refuses_a_python_that_is_not_supported(tmp_path: Path) -> None:
    copy_project(tmp_path)
    too_new = tmp_path / "python3.13"
    # Runs what it is given after `-c`, as a Python of another version would see itself.
    too_new.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "sys.version_info, sys.executable = (3, 13, 0), 'python3.13'\n"
        "exec(sys.argv[2])\n"
    )
    too_new.chmod(0o755)

    run = make("setup", f"PYTHON={too_new}", folder=tmp_path)

    assert run.returncode != 0
    assert "python3.13 is Python 3.13; varlen supports 3.10, 3.11 and 3.12" in run.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("target", sorted(TARGETS - {"help"}))
def test_every_target_can_be_planned(target: str) -> None:
    run = make("--dry-run", target, folder=PROJECT)

    assert run.returncode == 0, run.stderr


def test_each_test_is_in_one_of_two_tiers() -> None:
    usual, rest = (
        [
            line
            for line in make("--dry-run", target, folder=PROJECT).stdout.splitlines()
            if "-m pytest" in line
        ]
        for target in ("test", "test-all")
    )

    # the oldest Triton comes after
    assert [line.replace("-m 'not full'", "-m full") for line in usual] == rest[: len(usual)]
    assert "-m full" in rest[0]


# A Python of an environment that has no torch and does not reach an index of torch.
NO_INDEX = """\
#!/bin/sh
echo "$@" >> {log}
case "$*" in
*--index-url*)
    printf 'WARNING: retrying\nERROR: first\nERROR: No space left\n[notice] a new pip\n' >&2
    exit 1
    ;;
*"import torch"*) exit 1 ;;
esac
"""


def test_without_the_index_of_torch_for_cpus_pip_takes_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    copy_project(tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(NO_INDEX.format(log=log))
    python.chmod(0o755)

    stamp = ".venv/serve.stamp"
    run = make(stamp, f"PYTHON={sys.executable}", "TORCH_INDEX=https://torch", folder=tmp_path)

    assert run.returncode == 0, run.stderr
    assert "setup: no torch from https://torch: ERROR: No space left\n" in run.stdout
    assert "setup: pip takes its own, which may have CUDA" in run.stdout
    _, of_torch, of_ops, *at_once = log.read_text().splitlines()
    assert "--index-url https://torch" in of_torch
    assert of_torch.endswith(" torch")
    assert "--index-url" not in of_ops
    assert of_ops.endswith(" torch numba")
    # ops are compiled beside the rest, which may have ended before they begin
    [of_varlen] = [line for line in at_once if "compile_all --common" not in line]
    assert of_varlen.endswith(" --editable ./client --editable .[serve]")


def test_an_empty_index_leaves_torch_to_pip(tmp_path: Path) -> None:
    copy_project(tmp_path)

    planned = make("--dry-run", "demo", "TORCH_INDEX=", folder=tmp_path).stdout
    for_cpus = make("--dry-run", "demo", "TORCH_INDEX=https://torch", folder=tmp_path).stdout

    assert "test -z ''" in planned
    assert "--index-url 'https://torch'" in for_cpus


@pytest.mark.parametrize(
    "levels, compiled, checked",
    [("", "--only", ""), ("all", "--only --all", "--all-levels"), ("avx2", "--only avx2", "")],
)
def test_wheels_have_the_code_of_this_cpu_or_of_chosen_levels(
    levels: str, compiled: str, checked: str
) -> None:
    planned = make("--dry-run", "wheels", f"LEVELS={levels}", folder=PROJECT).stdout

    assert re.search(rf"-m varlen_kernels.cpu.compile_all {compiled} *$", planned, re.MULTILINE)
    assert re.search(rf"check_wheel.py {checked} *dist/varlen-", planned)


def test_a_release_is_built_of_all_levels_and_of_what_the_tests_compiled() -> None:
    release = (PROJECT / ".github/workflows/release.yml").read_text()
    tests = (PROJECT / ".github/workflows/ci.yml").read_text()

    assert "make wheels LEVELS=all" in release
    assert all("name: compiled-ops" in workflow for workflow in (release, tests))


def copy_project(folder: Path) -> None:
    """Copy what `make` reads."""
    (folder / "client").mkdir()
    for name in ("Makefile", "pyproject.toml", "client/pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT / name, folder / name)


def make(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def makefile() -> str:
    return (PROJECT / "Makefile").read_text()
