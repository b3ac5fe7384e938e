"""`make help` lists every target; a wrong Python is refused before anything is made."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


TARGETS = {
    "help", "setup", "demo", "serve", "wheels", "examples", "test", "test-engine", "test-kernels", "test-gpu",
    "gpu-report", "check", "docs",
    "bench-adopt", "bench-beam", "bench-encoder", "bench-generate", "bench-memory", "bench-ranks", "bench-serving",
    "bench-kernels", "tune-kernels", "install-backend", "clean"
}  # fmt: skip


def test_help_prints_every_target_from_its_own_comment() -> None:
    run = make("help", folder=PROJECT)

    printed = {line.split()[0]: line for line in run.stdout.splitlines()}
    assert printed.keys() >= TARGETS
    for target, line in printed.items():
        comment = line.split(maxsplit=1)[1]
        assert re.search(rf"^{target}:.*## {re.escape(comment)}$", makefile(), re.MULTILINE)


def test_setup_refuses_a_python_that_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    for name in ("Makefile", "pyproject.toml", "client/pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT / name, tmp_path / name)
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


def make(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def makefile() -> str:
    return (PROJECT / "Makefile").read_text()
