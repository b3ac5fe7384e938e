"""The machine of a run, a GPU or a fake, and its rows."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer

from varlen_bench.harness.command import Run
from varlen_bench.harness.machine import gpu_driver
from varlen_bench.harness.rows import Cell
from varlen_bench.kernels.peers import Compile, Function
from varlen_bench.kernels.timing import FakeTimer, GpuTimer, Timer
from varlen_bench.ops.call import kernels
from varlen_kernels.tuning import capability_text


class DeviceLostError(Exception):
    """The device is unusable after an error; the text names the last call."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The device of a run, its timer and its compilers.

    Attributes:
        capability: compute capability, such as "sm_90".
        compile: compiles a function for the shapes of its first call and searches for the best kernels.
        compile_model: compiles a model without that search, in seconds instead of minutes.
    """

    gpu: str
    capability: str
    driver: str
    device: torch.device
    timer: Timer
    kernels: ModuleType
    compile: Compile
    compile_model: Compile

    def stop_if_lost(self, after: str) -> None:
        """Raise DeviceLostError if an error has made the device unusable for this process."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(f"the GPU is unusable after {after}") from error


def finds_gpu(command: str, hint: str = "") -> bool:
    """Return whether there is a GPU; print that the command is skipped if not."""
    if torch.cuda.is_available():
        return True
    print(f"{command}: skipped, torch finds no CUDA GPU{hint}")
    return False


def gpu_machine(samples: int) -> Machine:
    """Return the first CUDA GPU.

    torch.compile makes no CUDA graphs here, because the timer captures all calls.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        capability=capability_text(torch.cuda.get_device_capability(device)),
        driver=gpu_driver(),
        device=device,
        timer=GpuTimer(device, samples),
        kernels=kernels("fused"),
        compile=partial(compile_static, mode="max-autotune-no-cudagraphs"),
        compile_model=partial(compile_static, mode="default"),
    )


def fake_machine() -> Machine:
    """Return a CPU machine with made-up times; torch.compile only traces functions."""
    return Machine(
        gpu="none (dry run)",
        capability="none",
        driver="none",
        device=torch.device("cpu"),
        timer=FakeTimer(),
        kernels=kernels("reference"),
        compile=partial(compile_static, backend="eager"),
        compile_model=lambda model: model,
    )


def compile_static(function: Function, **how: Any) -> Function:
    """Return the function compiled for the shapes of its calls."""
    # torch silently stops compiling a function after too many shapes
    torch.compiler.reset()
    compiled: Function = torch.compile(function, dynamic=False, **how)
    return compiled


class Budget:
    """The time limit of a run; calls that do not fit are skipped."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self.seconds = seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - self._clock())

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether more than `seconds` are left."""
        return self._clock() + seconds < self._end

    @property
    def spent_note(self) -> str:
        """Note of a call that is skipped because no time is left."""
        return f"skipped: the budget of {self.seconds:.0f} s is spent"


class GpuRun(Run):
    """A run whose rows and BENCH line name the GPU."""

    def __init__(
        self,
        context: typer.Context,
        module: str,
        machine: Machine,
        *,
        output: Path | None,
        revision: str,
        packages: Sequence[str] = ("torch", "triton", "transformers", "varlen"),
    ) -> None:
        """Start a run of `varlen_bench.` + `module` on a GPU."""
        threads = torch.get_num_threads()
        name = f"varlen_bench.{module}"
        super().__init__(
            context, name, threads=threads, packages=packages, output=output, revision=revision
        )
        self._columns = {"gpu": machine.gpu, "driver": machine.driver}

    def append(self, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Append rows to the CSV, each after the columns of the GPU."""
        super().append([{**self._columns, **row} for row in rows])

    def finish(self, name: str, figures: Mapping[str, Cell]) -> None:
        """Print where rows are, and the BENCH line with the name of the GPU."""
        super().finish(name, {"gpu": self._columns["gpu"].replace(" ", "_"), **figures})
