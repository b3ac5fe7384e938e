"""The arena: regions, its size limit, and out-of-memory errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.arena import Arena, alignment_of
from varlen.memory.planner import HighWater, Layout, Size, Usage, fold, memory_errors

CPU = torch.device("cpu")
WIDE = 4096
# a chain of results, each read by the next op
CHAIN = [Usage(f"v{op}", op, op + 1, Size(tokens=row)) for op, row in enumerate([96, 288, 96, 384])]
# three results live at once; greedy by size plans them worse for few sequences
MIXED = [
    Usage("a", 0, 2, Size(tokens=96)),
    Usage("b", 1, 3, Size(sequences=1000)),
    Usage("c", 2, 4, Size(tokens=40)),
    Usage("d", 4, 5, Size(sequences=700)),
    Usage("e", 5, 6, Size(tokens=120)),
]


def dims(tokens, sequences):
    return {"tokens": tokens, "sequences": sequences}


def make_arena(usages=CHAIN, max_tokens=500):
    return Arena(Layout(fold(usages), alignment_of(CPU)), dims(max_tokens, max_tokens), CPU)


@given(st.integers(1, 500))
def test_a_region_lies_inside_the_arena(tokens):
    arena = make_arena()

    region = arena.allocate(dims(tokens, 1))

    begin, end = arena.memory.data_ptr(), arena.memory.data_ptr() + len(arena.memory)
    start = region.memory.data_ptr()
    assert begin <= start <= start + len(region.memory) <= end
    assert start % 64 == 0


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_batch_within_the_largest_always_fits(most, tokens):
    tokens = min(tokens, most)
    layout = Layout(fold(MIXED), 64)
    arena = make_arena(MIXED, most)

    for sequences in {1, tokens // 2 or 1, tokens}:
        region = arena.allocate(dims(tokens, sequences))
        for buffer, offset in zip(layout.buffers, region.offsets, strict=True):
            assert offset + buffer.size.at(dims(tokens, sequences)) <= len(region.memory)
    assert arena.capacity == layout.plan(dims(most, most)).footprint


def test_programs_of_one_arena_share_its_memory():
    small, large = Layout(fold(CHAIN), 64), Layout(fold(MIXED), 64)
    sizes = [layout.plan(dims(300, 300)).footprint for layout in (small, large)]
    assert sizes[0] < sizes[1]
    arena = Arena(small, dims(300, 300), CPU, room=sizes[1])

    regions = [
        each.allocate(dims(300, 300)) for each in (arena, arena.beside(large, dims(300, 300)))
    ]

    assert arena.capacity == sizes[1]
    assert [len(region.memory) for region in regions] == sizes
    assert len({region.memory.data_ptr() for region in regions}) == 1
    # of the last batch of both
    assert arena.use().footprint_bytes == sizes[1]
    assert arena.use().reserved_bytes >= sizes[1]


def test_a_plan_that_reaches_too_far_gives_way_to_the_one_of_the_largest_batch():
    layout = Layout(fold(MIXED), 64)
    ceiling = layout.plan(dims(300, 300))
    wasteful = type(ceiling)(tuple(2 * each for each in ceiling.offsets), ceiling.footprint * 2, 1)
    layout.plan = lambda batch: ceiling if batch["tokens"] == 300 else wasteful
    arena = Arena(layout, dims(300, 300), CPU)

    region = arena.allocate(dims(10, 2))

    assert region.offsets == ceiling.offsets != wasteful.offsets


@pytest.mark.parametrize(
    "batch, message", [(dims(501, 1), "501 tokens"), (dims(9, 501), "501 sequences")], ids=str
)
def test_a_batch_larger_than_the_largest_is_refused(batch, message):
    with pytest.raises(ValueError, match=f"a batch of {message}; the arena holds 500"):
        make_arena().allocate(batch)


def test_what_it_holds_is_that_of_the_last_batch():
    arena = make_arena()
    assert arena.use().reserved_bytes == arena.use().footprint_bytes == 0

    arena.allocate(dims(150, 2))
    arena.allocate(dims(10, 1))

    use, plan = arena.use(), arena.layout.plan(dims(10, 1))
    assert (use.footprint_bytes, use.peak_live_bytes) == (plan.footprint, plan.peak_live)
    assert use.reserved_bytes == len(arena.memory) >= 150 * 480


def test_memory_of_long_batches_is_returned_after_many_short_ones():
    usages = [Usage("x", 0, 1, Size(tokens=WIDE))]
    arena = make_arena(usages, max_tokens=10_000)
    arena.allocate(dims(10_000, 1))
    largest = arena.use().reserved_bytes

    held = []
    for _ in range(256):
        arena.allocate(dims(100, 1))
        held.append(arena.use().reserved_bytes)

    assert largest >= 10_000 * WIDE
    assert held[100] == largest
    assert held[-1] == 2 << 20


def test_batches_of_changing_size_move_nothing_and_take_nothing_new():
    arena = make_arena()
    arena.allocate(dims(500, 500))
    held, address = arena.use().reserved_bytes, arena.memory.data_ptr()

    for tokens in [1, 499, 20, 500] * 200:
        arena.allocate(dims(tokens, 1))
        assert arena.use().reserved_bytes == held
        assert arena.memory.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_view_has_the_shape_and_dtype_asked_for(dtype):
    view = make_arena().allocate(dims(7, 1)).view(1, (7, 3), dtype)

    assert (view.shape, view.dtype) == ((7, 3), dtype)
    assert view.is_contiguous()
    assert view.data_ptr() % 64 == 0


def test_two_arenas_share_nothing():
    one, other = make_arena(), make_arena()
    for arena, value in ((one, 1), (other, 2)):
        arena.allocate(dims(500, 1))
        arena.memory.fill_(value)

    assert one.memory.eq(1).all()
    assert other.memory.eq(2).all()


def test_a_released_arena_holds_nothing_until_the_next_batch():
    arena = make_arena(max_tokens=50_000)
    region = arena.allocate(dims(20_000, 1))
    reserved = arena.use().reserved_bytes

    arena.release()

    assert arena.use().reserved_bytes == 0
    assert arena.allocate(dims(20_000, 1)).memory.data_ptr() == region.memory.data_ptr()
    assert arena.use().reserved_bytes == reserved


def test_memory_that_ran_out_on_the_host_is_a_memory_error():
    with pytest.raises(MemoryError, match="too little memory on the host"), memory_errors():
        torch.empty(1 << 60, dtype=torch.uint8)


def test_memory_that_ran_out_on_a_gpu_is_a_memory_error():
    with pytest.raises(MemoryError, match="too little memory on the GPU"), memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_another_fault_stays_what_it_is():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), memory_errors():
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 10))
def test_the_largest_footprint_of_each_window_is_kept(footprints, window):
    high_water = HighWater(window)
    for done, footprint in enumerate(footprints, start=1):
        kept = high_water.add(footprint)
        if done % window:
            assert kept is None
        else:
            assert kept == max(footprints[done - window : done])


def test_the_largest_batch_fits_as_the_only_part():
    arena = make_arena()

    (region,) = arena.allocate_several([arena.largest])

    # the part ends within a page
    assert len(region.memory) == arena.capacity
    assert arena.capacity % 4096
    assert arena.allocate_several([arena.largest, arena.largest]) == []
