"""`make test-gpu` collects its tests on a bare GPU machine, and adapts to what is installed."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from varlen_bench import gpu_tests
from varlen_bench.gpu_tests import KERNELS, LOST_GPU, SERVED_SHAPES, main, suites

from .bare_machine import run_on_bare_machine

pytestmark = pytest.mark.full


def test_a_bare_machine_collects_every_gpu_test_of_the_kernels(tmp_path: Path) -> None:
    # all suites in one process, to import torch once
    paths = (*KERNELS.paths, *SERVED_SHAPES.paths, *LOST_GPU.paths)

    run = run_on_bare_machine(
        tmp_path, "-m", "varlen_bench.gpu_tests", "--collect-only", "-q", *paths
    )

    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    names = re.findall(r"^(tests/kernels/\w+)/\S+::", run.stdout, re.MULTILINE)
    # the tests that are interpreted elsewhere, and the calls of the benchmark
    assert names.count("tests/kernels/triton") > 900
    assert names.count("tests/kernels/gpu") > 60
    assert f"{len(names)} tests collected" in run.stdout


def importable(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: name in names or None)


def test_processes_are_started_only_where_xdist_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_tests, "cpu_count", lambda: 10)
    importable(monkeypatch)
    alone = KERNELS.command("-v")
    importable(monkeypatch, "xdist")

    assert "--numprocesses" not in alone
    assert alone[-2:] == ["-v", "tests/kernels/triton"]
    assert KERNELS.command()[-5:-1] == ["--numprocesses", "10", "--dist", "worksteal"]
    # at the sizes of a server, tests need the memory of the GPU
    assert "4" in SERVED_SHAPES.command()
    # a test that hangs the GPU has it for itself
    assert "--numprocesses" not in LOST_GPU.command()


def test_server_tests_run_only_beside_a_server_and_its_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_tests, "SERVER_FOLDER", tmp_path / "server")
    importable(monkeypatch, "grpc", "tritonclient")
    without_server = suites()
    (tmp_path / "server").mkdir()
    with_both = suites()
    importable(monkeypatch, "grpc")

    assert without_server == suites() == [KERNELS, SERVED_SHAPES, LOST_GPU]
    assert [each.name for each in with_both] == ["kernels", "served shapes", "server", "lost GPU"]


@pytest.mark.parametrize(
    "arguments, statuses, expected, ran",
    [
        ([], [0, 0, 0], 0, [KERNELS.paths, SERVED_SHAPES.paths, LOST_GPU.paths]),
        ([], [1, 0, 0], 1, [KERNELS.paths, SERVED_SHAPES.paths, LOST_GPU.paths]),
        # no test of one suite has the name that -k asks for
        (["-k", "pool"], [0, 5, 5], 0, [KERNELS.paths, SERVED_SHAPES.paths, LOST_GPU.paths]),
        (["-v", "tests/kernels/a.py", "tests/b.py"], [2], 2, [("tests/kernels/a.py", "tests/b.py")]),
    ],
    ids=["all", "one fails", "one is empty", "chosen"],
)  # fmt: skip
def test_all_suites_run_and_a_failure_is_reported(
    arguments: list[str],
    statuses: list[int],
    expected: int,
    ran: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=statuses[len(commands) - 1])

    monkeypatch.setattr(gpu_tests, "SERVER_FOLDER", tmp_path / "no server")
    monkeypatch.setattr(gpu_tests.subprocess, "run", run)

    assert main(arguments) == expected
    assert [tuple(word for word in c if word.startswith("tests/")) for c in commands] == ran
    assert all("gpu" in command for command in commands)
