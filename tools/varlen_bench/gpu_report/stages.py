"""The stages of a GPU report, the most important first."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from varlen_bench.gpu_report.bounded import Stage
from varlen_bench.gpu_report.served_models import DeviceType
from varlen_bench.gpu_tests import KERNELS, LOST_GPU, SERVED_SHAPES, Suite
from varlen_bench.kernels.encoder import ENCODER
from varlen_tools.bundle import bundle_name

_ROOT, _SOURCES = Path(__file__).resolve().parents[3], ("kernels", "backend", "client", "tools")
# Limits of a rehearsal, which may run on a busy machine.
_REHEARSAL_LONGER = 20
# What `make bundle` writes by default.
BUNDLE = Path("dist", bundle_name())
# A benchmark's own budget ends this much before its limit, for its tables and its exit.
_MARGIN_SECONDS = 8
_PASSES = 50
_TUNED_GROUPS = "attention,layernorm,softmax,beam"
_ROW_GROUPS = "layernorm,softmax,activation,pooling,embedding,rmsnorm"
_METRICS = (
    "gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread"
)


class Call(str, Enum):
    """What one run of the command does. Each fits into ten minutes."""

    FIGURES = "figures"
    SERVER = "server"
    TESTS = "tests"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a report.

    Attributes:
        revision: a commit id, if there is no git.
        device: device of the stages with a server; "cpu" for a rehearsal.
        bundle: file of `make bundle` with the server.
    """

    folder: Path
    revision: str = ""
    device: DeviceType = "cuda"
    bundle: Path = BUNDLE

    def rows(self, name: str) -> Path:
        """Return the CSV of "kernels", "smoke" or a name in `measure`."""
        return self.folder / f"{name}.csv"

    @property
    def served(self) -> Path:
        """Folder of a server's models and answers, which is no file of the report."""
        return self.folder / "served"

    @property
    def tuning(self) -> Path:
        """Launches that were tuned."""
        return self.folder / "tuning.json"


def all_stages(files: Files) -> dict[Call, list[Stage]]:
    """Return the stages of each call, the most important first."""
    smoke = _module("gpu_report.smoke")
    environment = Stage("environment", 10, lambda _: _module("gpu_report.environment"))
    compiling = Stage(
        "compile", 25, lambda s: _module("gpu_report.compile", "--budget", _budget(s))
    )
    figures = [
        environment,
        compiling,
        Stage("smoke", 25, lambda _: [*smoke, *_rows("smoke", files)], checks=True),
        _figures("dependent_launch", 38, files, checks=True),
        # a model that generates compiles at its first load, and the stages that measure it do not wait for that
        _figures("first_loads", 38, files),
        _figures("decode", 33, files),
        _figures("ahead", 36, files),
        _figures("overlap", 30, files, checks=True),
        _figures("serve", 44, files),
        _benchmark("paged", 22, "paged", files),
        _benchmark("encoder", 60, ENCODER, files),
        Stage(
            "tune",
            30,
            lambda s: _module(
                "tune_kernels",
                *("--only", _TUNED_GROUPS, "--dtypes", "bf16", "--passes", "20"),
                *("--budget", _budget(s), "--output", str(files.tuning)),
            ),
        ),
        _benchmark("encoder as tuned", 45, ENCODER, files, tuned=True),
        _benchmark("attention", 36, "attention", files),
        _benchmark("rows", 30, _ROW_GROUPS, files),
        _benchmark("beam", 30, "beam", files),
        _figures("load", 28, files),
        _figures("products", 15, files),
    ]
    tests = [
        environment,
        compiling,
        _tests("kernel tests", 270, KERNELS),
        _tests("tests of served shapes", 120, SERVED_SHAPES),
        Stage(
            "memcheck",
            60,
            # without the caching allocator, an access behind a tensor is an error
            lambda _: ["compute-sanitizer", "--error-exitcode", "9", *smoke, "--dtypes", "bf16"],
            checks=True,
            missing=_program("compute-sanitizer"),
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
        Stage(
            "profiler",
            60,
            lambda _: [
                *("ncu", "--clock-control", "none", "--csv", "--kernel-name", "regex:_kernel$"),
                *("--log-file", str(files.folder / "profiler.csv"), "--launch-count", "40"),
                *("--metrics", _METRICS, *_module("gpu_report.profiled")),
            ],
            missing=_program("ncu"),
        ),
    ]
    server = [
        environment,
        _served("models", 50, files),
        _served("server", 125, files, checks=True),
        _served("judge", 35, files, checks=True),
        _served("eight", 35, files, checks=True),
        _served("peers", 35, files),
    ]
    lost = [environment, _tests("lost GPU", 360, LOST_GPU)]
    return {Call.FIGURES: figures, Call.SERVER: server, Call.TESTS: tests, Call.LOST: lost}


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"varlen_bench.{name}", *arguments]


def _tests(name: str, seconds: float, suite: Suite) -> Stage:
    # a line for each test, so that a stage that is cut off tells what it did
    command = suite.command("-v", "--tb=short", "-p", "no:cacheprovider")
    return Stage(name, seconds, lambda _: command, checks=True)


def _benchmark(
    name: str, seconds: float, groups: str, files: Files, *, tuned: bool = False
) -> Stage:
    def command(limit: float) -> list[str]:
        options = ["--quick", "--only", groups, "--passes", str(_PASSES)]
        options += ["--budget", _budget(limit), *_rows("kernels", files)]
        return _module("kernels", *options, *(["--tuning", str(files.tuning)] if tuned else []))

    def missing() -> str:
        return "" if not tuned or files.tuning.is_file() else "no launch was tuned"

    return Stage(name, seconds, command, missing=missing)


def _figures(name: str, seconds: float, files: Files, *, checks: bool = False) -> Stage:
    def command(limit: float) -> list[str]:
        return _module("gpu_report.measure", name, "--budget", _budget(limit), *_rows(name, files))

    return Stage(name.replace("_", " "), seconds, command, checks=checks)


def _served(name: str, seconds: float, files: Files, *, checks: bool = False) -> Stage:
    """Return a stage of a real server, of the bundle or of this Python's environment."""
    has_client = name in {"server", "eight"}
    if files.device == "cpu":
        seconds *= _REHEARSAL_LONGER

    def command(limit: float) -> list[str]:
        python = files.served / "environment/bin/python"
        options = ["--budget", _budget(limit), "--served", str(files.served)]
        options += ["--device", files.device, *_rows(name, files)]
        options += ["--bundle", str(files.bundle)] if files.bundle.is_file() else []
        words = _module("gpu_report.measure", name, *options)
        return [str(python), *words[1:]] if has_client and python.exists() else words

    def missing() -> str:
        # the bundle is unpacked beside the models
        if name == "models":
            is_there = (
                files.bundle.is_file() or Path(sys.executable).with_name("tritonserver").exists()
            )
            return "" if is_there else f"there is no server and no {files.bundle}: make bundle"
        needed = files.served / ("answers.json" if name == "judge" else "models")
        return "" if needed.exists() else f"there is no {needed.name}"

    # the environment of the bundle has no benchmarks
    environment = {"PYTHONPATH": os.pathsep.join(str(_ROOT / each) for each in _SOURCES)}
    return Stage(name, seconds, command, checks=checks, missing=missing, environment=environment)


def _rows(name: str, files: Files) -> list[str]:
    revision = ["--revision", files.revision] if files.revision else []
    return ["--output", str(files.rows(name)), *revision]


def _budget(seconds: float) -> str:
    return str(max(1, int(seconds) - _MARGIN_SECONDS))


def _program(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"{name} is not installed"
