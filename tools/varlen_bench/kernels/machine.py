"""Where a benchmark runs: a GPU and its timer, or a stand-in that lets every line run on a CPU."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from varlen_bench.kernels.case import Call, Compile, Inputs
from varlen_bench.kernels.timing import GpuTimer, Timer, Timing, Verify, poison
from varlen_kernels import reference
from varlen_kernels.dispatch import kernels_for


class DeviceLostError(Exception):
    """An error has left the device unusable; the text says after what."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a benchmark needs of the machine.

    Attributes:
        gpu, driver: as nvidia-smi names them.
        device: where tensors are.
        timer: measures calls on it.
        kernels: ours for the device.
        compile: compiles a function for the shapes of its first call, most carefully.
        compile_model: the same for a whole model, less carefully: seconds instead of minutes.
    """

    gpu: str
    driver: str
    device: torch.device
    timer: Timer
    kernels: ModuleType
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

    Its torch.compile runs at "max-autotune" without CUDA graphs of its own, since everything here is
    captured in one by us; and for these shapes alone.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        driver=_driver(),
        device=device,
        timer=GpuTimer(device, samples),
        kernels=kernels_for(device),
        compile=partial(compile_static, mode="max-autotune-no-cudagraphs"),
        compile_model=partial(compile_static, mode="default"),
    )


def stand_in_machine() -> Machine:
    """Return a machine without a GPU whose times are made up; its torch.compile traces ops, and leaves models alone."""
    device = torch.device("cpu")
    return Machine(
        gpu="none (dry run)",
        driver="none",
        device=device,
        timer=StandInTimer(),
        kernels=reference,
        compile=partial(compile_static, backend="eager"),
        compile_model=lambda model: model,
    )


def compile_static(function: Callable[..., object], **how: Any) -> Callable[..., object]:
    """Return the function compiled for the shapes it is called with, what was compiled before forgotten."""
    # a function compiled for too many shapes would run uncompiled, in silence
    torch.compiler.reset()
    compiled: Callable[..., object] = torch.compile(function, dynamic=False, **how)
    return compiled


class StandInTimer:
    """A timer that runs each call and makes its time up: longer by a microsecond each time it is asked."""

    def __init__(self) -> None:
        self._asked = 0

    def num_sets(self, bytes_moved: int) -> int:  # noqa: ARG002  # a Timer
        """Return how many sets of inputs one pass needs."""
        return 2

    def graph(
        self,
        call: Call,
        sets: Sequence[Inputs],
        moved: int,  # noqa: ARG002
        *,
        verify: Verify | None = None,
    ) -> Timing:
        """Run the calls, and return a made-up time."""
        kept = [call(inputs) for inputs in sets]
        if verify is not None:
            poison(kept[0])
            verify(call(sets[0]))
        return self._made_up()

    def eager(self, call: Call, sets: Sequence[Inputs], moved: int) -> Timing:  # noqa: ARG002
        """Run the calls, and return a made-up time."""
        for inputs in sets:
            call(inputs)
        return self._made_up()

    def _made_up(self) -> Timing:
        self._asked += 1
        return Timing(10.0 + self._asked, 9.0 + self._asked, 11.0 + self._asked, 1)


class Budget:
    """The time a run may take; what does not fit is skipped and says so."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self.seconds = seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether that much is left."""
        return self._clock() + seconds < self._end


def _driver() -> str:
    """Return the version of the NVIDIA driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown"
