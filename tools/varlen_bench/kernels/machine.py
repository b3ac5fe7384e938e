"""The machine of a run: a GPU and its timer, or a stand-in on which every line runs on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from varlen_bench.harness.machine import gpu_driver
from varlen_bench.kernels.peers import Compile, Function
from varlen_bench.kernels.timing import GpuTimer, StandInTimer, Timer
from varlen_bench.ops.call import kernels


class DeviceLostError(Exception):
    """An error has left the device unusable; the text names what came before."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a benchmark needs of the machine.

    Attributes:
        kernels: our ops in the form for the device.
        compile: compiles a function for the shapes of its first call, with a search for the best kernels.
        compile_model: compiles a model without that search: seconds instead of minutes.
    """

    gpu: str
    driver: str
    device: torch.device
    timer: Timer
    kernels: SimpleNamespace
    compile: Compile
    compile_model: Compile

    def stop_if_lost(self, after: str) -> None:
        """Raise DeviceLostError if an error has left the device unusable for the rest of the process."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(f"the GPU cannot be used any more, after {after}") from error


def gpu_machine(samples: int) -> Machine:
    """Return the first CUDA GPU.

    Its torch.compile makes no CUDA graphs of its own, since ours capture all calls.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        driver=gpu_driver(),
        device=device,
        timer=GpuTimer(device, samples),
        kernels=kernels("fused"),
        compile=partial(compile_static, mode="max-autotune-no-cudagraphs"),
        compile_model=partial(compile_static, mode="default"),
    )


def stand_in_machine() -> Machine:
    """Return a machine without a GPU and with invented times; it traces what is compiled, but no models."""
    return Machine(
        gpu="none (dry run)",
        driver="none",
        device=torch.device("cpu"),
        timer=StandInTimer(),
        kernels=kernels("reference"),
        compile=partial(compile_static, backend="eager"),
        compile_model=lambda model: model,
    )


def compile_static(function: Function, **how: Any) -> Function:
    """Return the function compiled for the shapes of its calls; earlier compilations are forgotten."""
    # torch silently stops compiling a function after too many shapes
    torch.compiler.reset()
    compiled: Function = torch.compile(function, dynamic=False, **how)
    return compiled


class Budget:
    """The time of a run; what does not fit is skipped."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self.seconds = seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether more than `seconds` are left."""
        return self._clock() + seconds < self._end
