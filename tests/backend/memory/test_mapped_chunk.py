"""Memory of a GPU that is mapped as plans need it, on a fake driver."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.arena import CudaMemory, MappedChunk

from .address_space import FakeSpace

MEGABYTE = 1 << 20
STEP = 16 * MEGABYTE
OUT_OF_MEMORY, INVALID = 2, 1


@given(sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 100 * MEGABYTE)), max_size=20))
def test_memory_is_mapped_from_the_start_up_to_the_last_plan(sizes):
    space = FakeSpace()
    chunk = MappedChunk(100 * MEGABYTE, space)
    address = chunk.memory.data_ptr()
    assert chunk.reserved_bytes == 0
    steps = 0
    for is_release, size in sizes:
        wanted = -(-size // STEP)
        waits = space.waits
        if is_release:
            chunk.release(size)
            # what the device still reads is not unmapped
            assert space.waits == waits + (wanted < steps)
            steps = min(steps, wanted)
        else:
            chunk.reserve(size)
            assert space.waits == waits
            steps = max(steps, wanted)
        assert space.mapped_steps(STEP) == [*range(steps)]
        assert chunk.reserved_bytes == min(steps * STEP, 100 * MEGABYTE)
        assert chunk.memory.data_ptr() == address

    del chunk
    assert not space.mapped
    assert not space.reserved


def test_a_plan_that_finds_too_little_memory_leaves_what_is_mapped():
    space = FakeSpace(most=3 * STEP)
    chunk = MappedChunk(100 * MEGABYTE, space)

    with pytest.raises(MemoryError):
        chunk.reserve(60 * MEGABYTE)

    assert space.mapped_steps(STEP) == [0, 1, 2]
    chunk.reserve(3 * STEP)
    chunk.release(0)
    assert not space.mapped


@pytest.mark.parametrize("granularity", [2 * MEGABYTE, 12 * MEGABYTE, 32 * MEGABYTE])
def test_steps_are_multiples_of_the_granularity(granularity):
    space = FakeSpace(granularity=granularity)

    MappedChunk(100 * MEGABYTE, space).reserve(1)

    assert all(size % granularity == 0 and size >= STEP for size, _ in space.history)


class Driver:
    """The calls of the driver's library, and what they got.

    Attributes:
        calls: names and numbers.
        failing: results of calls that fail, by name.
    """

    def __init__(self):
        self.calls = []
        self.failing = {}
        self.properties = None

    def __getattr__(self, name):
        def call(*arguments):
            numbers = [each.value for each in arguments if hasattr(each, "value")]
            self.calls.append((name, *numbers))
            if name in self.failing:
                return self.failing[name]
            first = getattr(arguments[0], "_obj", None)
            match name:
                case "cuMemGetAllocationGranularity":
                    first.value = 2 * MEGABYTE
                    self.properties = arguments[1]._obj
                case "cuMemAddressReserve":
                    first.value = 7 << 40
                case "cuMemCreate":
                    first.value = 99
                    assert arguments[2]._obj is self.properties
                case "cuMemSetAccess":
                    access = arguments[2]._obj
                    numbers += [access.location.type, access.location.id, access.flags]
                    self.calls[-1] = (name, *numbers)
            return 0

        return call


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def memory(driver, monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    return CudaMemory(torch.device("cuda", 3), driver)


def test_memory_is_created_mapped_and_made_accessible_for_its_device(memory, driver):
    properties = driver.properties
    assert memory.granularity == 2 * MEGABYTE
    # pinned, without handles for others, on device 3
    assert (properties.type, properties.handle_types) == (1, 0)
    assert (properties.location.type, properties.location.id) == (1, 3)
    # as the driver's header lays it out
    assert ctypes.sizeof(properties) == 32
    driver.calls.clear()

    address = memory.reserve(64 * MEGABYTE)
    handle = memory.map(address + STEP, STEP)
    memory.unmap(address + STEP, STEP, handle)
    memory.free(address, 64 * MEGABYTE)

    assert (address, handle) == (7 << 40, 99)
    assert driver.calls == [
        ("cuMemAddressReserve", 64 * MEGABYTE, 0, 0, 0),
        ("cuMemCreate", STEP, 0),
        ("cuMemMap", address + STEP, STEP, 0, 99, 0),
        ("cuMemSetAccess", address + STEP, STEP, 1, 1, 3, 3),
        ("cuMemUnmap", address + STEP, STEP),
        ("cuMemRelease", 99),
        ("cuMemAddressFree", address, 64 * MEGABYTE),
    ]


def test_too_little_memory_and_other_errors_are_told_apart(memory, driver):
    driver.failing = {"cuMemCreate": OUT_OF_MEMORY}
    with pytest.raises(MemoryError, match="cuMemCreate: the GPU has too little memory"):
        memory.map(0, STEP)
    driver.failing = {"cuMemMap": INVALID}
    driver.calls.clear()
    with pytest.raises(RuntimeError, match="cuMemMap failed with error 1 of the CUDA driver"):
        memory.map(0, STEP)

    # what was created is released
    assert driver.calls[-1] == ("cuMemRelease", 99)
