"""Programmatic dependent launch: a kernel starts while the one before it still runs.

The launcher passes `dependent_launch()`, and the kernel calls `wait_for_kernels` before its first access to memory. The
GPU then starts programs while the last ones of the kernel before still run, which hides most of the time that a start
takes. GPUs have it from sm_90 on. Elsewhere, and in the interpreter, nothing is compiled for it.
Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_ARCH = 90


@triton.jit
def wait_for_kernels(DEPENDENT: tl.constexpr):
    """Wait for the kernel before this one, then allow the next one to start.

    Every program calls it before it reads, writes or returns: then the end of a kernel means that all kernels before it
    have ended.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


def dependent_launch() -> dict[str, bool]:
    """Return launch arguments for a kernel that calls `wait_for_kernels`.

    They depend on the current device.
    """
    if knobs.runtime.interpret or not _is_supported(
        triton.runtime.driver.active.get_current_device()
    ):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@cache
def _is_supported(device: int) -> bool:  # noqa: ARG001  # the key: the driver knows the current device
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= _FIRST_ARCH)
