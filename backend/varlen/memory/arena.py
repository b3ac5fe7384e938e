"""The arena: memory of a model's intermediates, planned for each batch before it runs.

One per worker, on one device. Batches follow one another in it. It lies in a chunk: a fixed capacity, reserved up to
the largest plan. On a CPU that is `planner.HostPages`. On a GPU the capacity is one allocation, or address space too:
an address that was reserved stays valid, whatever is mapped there, so captured graphs stay valid too. Calls go to the
driver's own library.
Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from varlen.memory.planner import HOST_ALIGNMENT, Dims, HostPages, Layout, Pages, PlannedMemory

_SUCCESS, _OUT_OF_MEMORY = 0, 2
# Numbers of 4 bytes that keep what follows at an address of 16 bytes.
_ALIGNED = 4
# Memory that stays on one device, which reads and writes it.
_PINNED, _ON_DEVICE, _READ_AND_WRITE, _MINIMUM = 1, 1, 3, 0


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_data", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaMemory:
    """Memory of one GPU, mapped by the driver.

    Attributes:
        granularity: sizes and addresses are multiples of this, in bytes.
    """

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        """Open the driver.

        Args:
            driver: library of the driver; None loads it.

        Raises:
            OSError: there is no driver.
            RuntimeError: a call of it failed.
        """
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        self._device = device
        number = device.index or 0
        # the context of torch
        torch.zeros(1, device=device)
        location = _Location(_ON_DEVICE, number)
        self._properties = _Properties(_PINNED, 0, location, None, _Flags())
        self._access = _Access(location, _READ_AND_WRITE)
        size = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(self._properties),
            ctypes.c_int(_MINIMUM),
        )
        self.granularity = size.value

    def reserve(self, size: int) -> int:
        """Return the first of `size` addresses, at which nothing is mapped."""
        address, none = ctypes.c_uint64(), ctypes.c_uint64(0)
        arguments = ctypes.c_size_t(size), ctypes.c_size_t(0), none, none
        self._call("cuMemAddressReserve", ctypes.byref(address), *arguments)
        return address.value

    def free(self, address: int, size: int) -> None:
        """Give back addresses at which nothing is mapped."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def map(self, address: int, size: int) -> int:
        """Allocate memory at an address; return its handle.

        Raises:
            MemoryError: the GPU has too little.
        """
        handle, length = ctypes.c_uint64(), ctypes.c_size_t(size)
        none = ctypes.c_uint64(0)
        self._call(
            "cuMemCreate", ctypes.byref(handle), length, ctypes.byref(self._properties), none
        )
        try:
            at, begin = ctypes.c_uint64(address), ctypes.c_size_t(0)
            self._call("cuMemMap", at, length, begin, handle, none)
            one = ctypes.c_size_t(1)
            self._call("cuMemSetAccess", at, length, ctypes.byref(self._access), one)
        except BaseException:
            self._driver.cuMemRelease(handle)
            raise
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Release memory at an address, once nothing uses it any more."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def wait(self) -> None:
        """Wait until the GPU has run all that was started."""
        torch.cuda.synchronize(self._device)

    def tensor(self, address: int, size: int) -> Tensor:
        """Return the bytes at an address, `[size]` uint8."""
        return torch.as_tensor(_Bytes(address, size), device=self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call the driver.

        Raises:
            MemoryError: the GPU has too little memory.
            RuntimeError: the call failed for another reason.
        """
        result = getattr(self._driver, name)(*arguments)
        if result == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the GPU has too little memory")
        if result != _SUCCESS:
            raise RuntimeError(f"{name} failed with error {result} of the CUDA driver")


class _Bytes:
    """Bytes of a GPU as torch takes them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def moved(
    groups: Sequence[Mapping[str, npt.NDArray[Any]]], device: torch.device
) -> list[dict[str, Tensor]]:
    """Return arrays of int32 and fp32 on a device; one copy, without a wait."""
    if device.type == "cpu":
        return [{name: torch.from_numpy(array) for name, array in each.items()} for each in groups]
    arrays = [each for group in groups for each in group.values()]
    # the language Triton compiles a kernel again where the alignment of a pointer is another one
    sizes = [-(-each.size // _ALIGNED) * _ALIGNED for each in arrays]
    numbers = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    on_host = np.split(numbers.numpy(), np.cumsum(sizes)[:-1])
    for array, part in zip(arrays, on_host, strict=True):
        part[: array.size] = array.ravel().view(np.int32)
    # torch keeps pinned memory until the copy has run
    parts = torch.split_with_sizes(numbers.to(device, non_blocking=True), sizes)
    on_device = (
        (part if array.dtype == np.int32 else part.view(torch.float32))[: array.size].view(
            array.shape
        )
        for array, part in zip(arrays, parts, strict=True)
    )
    return [{name: next(on_device) for name in group} for group in groups]


# Memory of a GPU is reserved and released in larger steps: each takes four calls.
_GPU_STEP = 16 << 20


class Chunk(Pages, Protocol):
    """Memory for a batch's intermediates.

    Attributes:
        memory: `[capacity]` uint8, on its device. Only what is reserved may be touched.
    """

    memory: Tensor


class HostChunk(HostPages):
    """Pages of the host as a tensor."""

    def __init__(self, capacity: int) -> None:
        """Map address space; see `HostPages`."""
        super().__init__(capacity)
        self.memory = torch.from_numpy(self._bytes)


class DeviceChunk:
    """Memory of a GPU, allocated at once."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.reserved_bytes = capacity

    def reserve(self, size: int) -> None:
        """Do nothing: all of it is allocated."""

    def release(self, size: int) -> None:
        """Do nothing: graphs hold the addresses."""


class MappedChunk:
    """Address space of a GPU, with memory where plans reach."""

    def __init__(self, capacity: int, space: CudaMemory) -> None:
        """Reserve addresses for `capacity` bytes, and allocate no memory yet.

        Args:
            capacity: size of the largest plan, in bytes.
        """
        self._space = space
        self._step = -(-_GPU_STEP // space.granularity) * space.granularity
        size = self._steps(capacity) * self._step
        self._address = space.reserve(size)
        # memory of each step that has any, from the first one
        self._handles: list[int] = []
        self.memory = space.tensor(self._address, size)[:capacity]
        weakref.finalize(self, _free, space, self._address, size, self._step, self._handles)

    @property
    def reserved_bytes(self) -> int:
        return min(len(self._handles) * self._step, len(self.memory))

    def reserve(self, size: int) -> None:
        """Map memory for the first `size` bytes where there is none.

        Raises:
            MemoryError: the GPU has too little; what is mapped stays.
        """
        while len(self._handles) < self._steps(size):
            address = self._address + len(self._handles) * self._step
            self._handles.append(self._space.map(address, self._step))

    def release(self, size: int) -> None:
        if len(self._handles) > self._steps(size):
            self._space.wait()
            _unmap(self._space, self._address, self._step, self._handles, self._steps(size))

    def _steps(self, size: int) -> int:
        return -(-size // self._step)


def _unmap(space: CudaMemory, address: int, step: int, handles: list[int], kept: int) -> None:
    """Release the memory of all steps but the first ones."""
    while len(handles) > kept:
        handle = handles.pop()
        space.unmap(address + len(handles) * step, step, handle)


def _free(space: CudaMemory, address: int, size: int, step: int, handles: list[int]) -> None:
    """Release the memory of a chunk that no one holds, and its addresses."""
    space.wait()
    _unmap(space, address, step, handles, 0)
    space.free(address, size)


# Alignment of offsets in bytes; on a GPU, the alignment of its allocator.
_ALIGNMENT = {"cpu": HOST_ALIGNMENT, "cuda": 256}


def alignment_of(device: torch.device) -> int:
    """Return the alignment of offsets on a device, in bytes."""
    return _ALIGNMENT[device.type]


class Arena(PlannedMemory):
    """Memory for one engine's batches. One thread allocates at a time."""

    _pages: Chunk

    def __init__(
        self,
        layout: Layout,
        largest: Dims,
        device: torch.device,
        *,
        grows: bool = False,
        room: int = 0,
    ) -> None:
        """Reserve address space for the largest batch, or memory.

        Args:
            layout: plan of the program that runs here.
            grows: whether a GPU allocates memory as batches need it, not for the largest one at once. A CPU does.
            room: bytes that programs in `beside` need.

        Raises:
            MemoryError: the device has too little.
        """
        self.device = device
        super().__init__(layout, largest, partial(_new_chunk, device=device, grows=grows), room)

    def beside(self, layout: Layout, largest: Dims) -> Arena:
        """Return an arena in the same memory for another program, whose batches run between."""
        other = copy(self)
        other.layout, other.largest, other.max_tokens = layout, largest, largest["tokens"]
        other._largest_plan = layout.plan(largest)
        assert other._largest_plan.footprint <= self.capacity
        return other

    @property
    def memory(self) -> Tensor:
        """Everything that is allocated, `[reserved_bytes]` uint8."""
        return self._pages.memory[: self._pages.reserved_bytes]


def _new_chunk(capacity: int, device: torch.device, *, grows: bool) -> Chunk:
    if device.type != "cuda":
        return HostChunk(capacity)
    return MappedChunk(capacity, CudaMemory(device)) if grows else DeviceChunk(capacity, device)
