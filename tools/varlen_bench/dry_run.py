"""Compile what launchers launch for a GPU that is not here, and run nothing.

A stand-in replaces Triton's driver. The compiler of Triton needs no GPU, so a launcher called on CPU tensors gets the
machine code of the GPU. All use of Triton's private interfaces is in this file; it fits versions 3.6 to 3.9.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

# Most shared memory that one program may ask for, by compute capability, in bytes.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_MEMORY_LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}

# A number of its own for each dry run: Triton keeps what it compiled by device.
_devices = count(1000)


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled kernel.

    Attributes:
        arch: the compute capability, such as 90.
        num_warps, shared_bytes: of one program.
        ptx: the assembly that the machine code was made of.
        cubin: the machine code.
        cached: whether it came from the compiler's cache on disk.
    """

    kernel: str
    arch: int
    num_warps: int
    shared_bytes: int
    ptx: str
    cubin: bytes
    cached: bool


@contextmanager
def dry_run(arch: int) -> Iterator[list[Compilation]]:
    """Compile what launchers launch on CPU tensors inside the context; yield the growing list of compilations.

    Each dry run compiles anew, from the cache if it can.

    Raises:
        ValueError: `arch` is not in SHARED_MEMORY_LIMITS.
        RuntimeError: Triton interprets kernels in this process, and compiles none.
    """
    if arch not in SHARED_MEMORY_LIMITS:
        raise ValueError(f"arch is {arch}; allowed: {', '.join(map(str, SHARED_MEMORY_LIMITS))}")
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled")
    compiled: list[Compilation] = []

    # the names are Triton's: it calls by keyword
    def listener(
        *,
        src: object,  # noqa: ARG001
        metadata: Mapping[str, object],
        metadata_group: Mapping[str, str],
        times: object,  # noqa: ARG001
        cache_hit: bool,
    ) -> None:
        compiled.append(_compilation(metadata, metadata_group, cached=cache_hit))

    drivers = triton.runtime.driver
    driver_before, listener_before = drivers._active, knobs.compilation.listener
    drivers.set_active(_StandInDriver(arch))
    knobs.compilation.listener = listener
    try:
        yield compiled
    finally:
        # not reset_active(), which fails without a GPU
        drivers._active = driver_before
        knobs.compilation.listener = listener_before


def _compilation(
    metadata: Mapping[str, object], files: Mapping[str, str], *, cached: bool
) -> Compilation:
    target = metadata["target"]
    shared, warps = metadata["shared"], metadata["num_warps"]
    assert isinstance(target, GPUTarget)
    assert isinstance(shared, int)
    assert isinstance(warps, int)
    paths = {Path(name).suffix: Path(path) for name, path in files.items()}
    return Compilation(
        kernel=str(metadata["name"]),
        arch=int(target.arch),
        num_warps=warps,
        shared_bytes=shared,
        ptx=paths[".ptx"].read_text(),
        cubin=paths[".cubin"].read_bytes(),
        cached=cached,
    )


class _StandInDriver:
    """The part of a CUDA driver that a launch needs; the launch does nothing."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self._device = next(_devices)
        self.utils = _StandInUtils(arch)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:  # noqa: ARG002
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:  # noqa: ARG002
        return divmod(self._arch, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:  # noqa: ARG002
        return lambda *arguments: None  # noqa: ARG005


class _StandInUtils:
    """The part of the driver that a compiled kernel needs before its first launch."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002
        return {"max_shared_mem": SHARED_MEMORY_LIMITS[self._arch], "multiprocessor_count": 132}

    def load_binary(self, *arguments: object) -> tuple[None, int, int, int, int]:  # noqa: ARG002
        """Return a module, a function, its registers, its spills, and the most threads of a program."""
        # without a module there is nothing to unload when the kernel is dropped
        return (None, 0, 0, 0, 1024)
