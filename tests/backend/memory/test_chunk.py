"""Host memory chunks: allocated on reserve, released from the end, bounded by capacity."""

import gc
import mmap
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.arena import HostChunk

MEGABYTE = 1 << 20
PAGE = resource.getpagesize()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.fixture(autouse=True)
def no_garbage_of_other_tests():
    """Collect garbage now: during a test it would seem memory of the chunk."""
    gc.collect()


def test_room_takes_no_memory_until_it_is_reserved():
    before = resident_bytes()

    chunk = HostChunk(512 * MEGABYTE)

    assert resident_bytes() - before < 16 * MEGABYTE
    chunk.reserve(128 * MEGABYTE)
    assert 112 * MEGABYTE < resident_bytes() - before < 144 * MEGABYTE
    assert chunk.reserved_bytes == 128 * MEGABYTE


def test_released_memory_is_returned_and_the_rest_keeps_its_bytes_and_its_place():
    chunk = HostChunk(512 * MEGABYTE)
    chunk.reserve(256 * MEGABYTE)
    chunk.memory[: 32 * MEGABYTE] = 7
    before, address = resident_bytes(), chunk.memory.data_ptr()

    chunk.release(32 * MEGABYTE)

    assert before - resident_bytes() > 192 * MEGABYTE
    assert chunk.memory.data_ptr() == address
    assert chunk.memory[: 32 * MEGABYTE].eq(7).all()
    chunk.reserve(256 * MEGABYTE)
    assert chunk.reserved_bytes == 256 * MEGABYTE
    chunk.memory[200 * MEGABYTE] = 1


def test_memory_is_returned_when_the_chunk_is_deleted():
    before = resident_bytes()
    chunk = HostChunk(256 * MEGABYTE)
    chunk.reserve(256 * MEGABYTE)

    del chunk

    assert resident_bytes() - before < 16 * MEGABYTE


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9 * MEGABYTE)), max_size=12))
def test_what_is_reserved_is_real_and_never_more_than_the_room(calls):
    capacity = 9 * MEGABYTE
    chunk = HostChunk(capacity)
    for grow, size in calls:
        (chunk.reserve if grow else chunk.release)(size)
        assert 0 <= chunk.reserved_bytes <= capacity
        if grow:
            assert chunk.reserved_bytes >= size
        chunk.memory[: chunk.reserved_bytes] = 1


def test_memory_begins_at_a_page():
    assert HostChunk(1).memory.data_ptr() % mmap.PAGESIZE == 0
    assert HostChunk(1).memory.dtype == torch.uint8


def test_more_room_than_there_are_addresses_is_a_memory_error():
    with pytest.raises(MemoryError, match="no address space for"):
        HostChunk(1 << 62)
