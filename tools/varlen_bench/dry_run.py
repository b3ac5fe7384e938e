"""Compile kernels for a GPU that this machine does not have, or skip every launch.

A fake driver replaces Triton's. Triton's compiler needs no GPU, so a launcher called on CPU tensors compiles for the
GPU of the fake driver. Only this file uses private interfaces of Triton; it supports versions 3.6 to 3.9.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

# Largest shared memory of one program in bytes, by compute capability.
# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_MEMORY_LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}

# Each dry run has a new device number, because Triton caches compiled kernels by device.
_device_numbers = count(1000)


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled kernel.

    Attributes:
        arch: compute capability, such as 90.
        num_warps, shared_bytes: warps and shared memory of one program.
        ptx: assembly before the last compiler stage.
        cached: whether it came from the cache on disk.
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
    """Compile launches on CPU tensors inside the context; yield the growing list of compilations.

    Each dry run compiles every kernel again; the cache on disk is used.

    Raises:
        ValueError: `arch` is not in SHARED_MEMORY_LIMITS.
        RuntimeError: TRITON_INTERPRET is set, so Triton compiles nothing.
    """
    if arch not in SHARED_MEMORY_LIMITS:
        raise ValueError(f"arch is {arch}; allowed: {', '.join(map(str, SHARED_MEMORY_LIMITS))}")
    compiled: list[Compilation] = []

    # Triton passes its arguments by keyword
    def listener(
        *,
        metadata: Mapping[str, Any],
        metadata_group: Mapping[str, str],
        cache_hit: bool,
        **_: object,
    ) -> None:
        files = {Path(name).suffix: Path(path) for name, path in metadata_group.items()}
        compilation = Compilation(
            kernel=metadata["name"],
            arch=metadata["target"].arch,
            num_warps=metadata["num_warps"],
            shared_bytes=metadata["shared"],
            ptx=files[".ptx"].read_text(),
            cubin=files[".cubin"].read_bytes(),
            cached=cache_hit,
        )
        compiled.append(compilation)

    listener_before = knobs.compilation.listener
    with _fake_driver(arch):
        knobs.compilation.listener = listener
        try:
            yield compiled
        finally:
            knobs.compilation.listener = listener_before


@contextmanager
def no_launches() -> Iterator[None]:
    """Let launchers on CPU tensors return at once: kernels are neither compiled nor launched.

    Raises:
        RuntimeError: TRITON_INTERPRET is set.
    """
    before = JITFunction.run
    # which GPU it is has no influence on the candidate launches
    with _fake_driver(max(SHARED_MEMORY_LIMITS)):
        JITFunction.run = lambda *_, **__: None
        try:
            yield
        finally:
            JITFunction.run = before


@contextmanager
def _fake_driver(arch: int) -> Iterator[None]:
    """Replace Triton's driver inside the context."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled")
    drivers = triton.runtime.driver
    before = drivers._active
    drivers.set_active(_FakeDriver(arch))
    try:
        yield
    finally:
        # reset_active() fails without a GPU
        drivers._active = before


class _FakeDriver:
    """The methods of Triton's CUDA driver that a launch calls; the launch does nothing.

    It is also its own `utils`, which a compiled kernel calls before its first launch.
    """

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self._device = next(_device_numbers)
        self.utils = self

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

    def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002
        return {"max_shared_mem": SHARED_MEMORY_LIMITS[self._arch], "multiprocessor_count": 132}

    def load_binary(self, *arguments: object) -> tuple[None, int, int, int, int]:  # noqa: ARG002
        """Return module, function, registers, spills, and the largest number of threads."""
        # without a module, Triton unloads nothing when it deletes the kernel
        return (None, 0, 0, 0, 1024)
