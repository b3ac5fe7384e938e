"""Plans: no two live buffers overlap, whatever the sizes, lifetimes, chunks and rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.planner import Place, Rules, plan
from varlen.memory.usage import Size, Usage, conflicts

from .plan_checker import overlaps, peak_live

FAR = 1 << 40
RULES = st.builds(
    Rules,
    alignment=st.sampled_from([1, 32, 64, 256]),
    growth_percent=st.sampled_from([100, 120, 200]),
    least_bytes=st.sampled_from([1, 1000, 2 << 20]),
    order=st.sampled_from(["opened", "smallest_first", "largest_first"]),
)
CHUNKS = st.lists(st.integers(1, 20_000), max_size=4)


@st.composite
def usages(draw):
    """Draw usages, in the order of their first op."""
    firsts = sorted(draw(st.lists(st.integers(0, 12), max_size=12)))
    return [
        Usage(
            f"v{i}", first, first + draw(st.integers(0, 6)), Size(fixed=draw(st.integers(1, 5000)))
        )
        for i, first in enumerate(firsts)
    ]


def make_plan(records, **arguments):
    masks = conflicts([[(record.first_op, record.last_op)] for record in records])
    return plan([record.size.fixed for record in records], masks, **arguments)


def flat(places):
    return [place.chunk * FAR + place.offset for place in places]


@given(usages(), CHUNKS, RULES)
def test_live_buffers_never_overlap(records, chunks, rules):
    made = make_plan(records, chunks=chunks, rules=rules)

    assert overlaps(records, flat(made.places), [record.size.fixed for record in records]) == []


@given(usages(), CHUNKS, RULES)
def test_every_buffer_is_aligned_and_inside_its_chunk(records, chunks, rules):
    made = make_plan(records, chunks=chunks, rules=rules)

    assert len(made.places) == len(records)
    for record, (chunk, offset) in zip(records, made.places, strict=True):
        assert offset % rules.alignment == 0
        assert offset >= 0
        assert offset + record.size.fixed <= made.extents[chunk] <= made.chunks[chunk]


@given(usages(), CHUNKS, RULES)
def test_no_footprint_is_below_the_peak_of_live_bytes(records, chunks, rules):
    made = make_plan(records, chunks=chunks, rules=rules)

    assert made.footprint >= peak_live(records, [record.size.fixed for record in records])


@given(usages(), CHUNKS, RULES)
def test_chunks_at_hand_stay_and_new_ones_are_used(records, chunks, rules):
    made = make_plan(records, chunks=chunks, rules=rules)

    assert made.chunks[: len(chunks)] == tuple(chunks)
    for size, extent in list(zip(made.chunks, made.extents, strict=True))[len(chunks) :]:
        assert size >= rules.least_bytes
        assert extent > 0


@given(usages(), CHUNKS, RULES)
def test_the_same_question_has_the_same_answer(records, chunks, rules):
    first = make_plan(records, chunks=chunks, rules=rules)

    make_plan(records[:3], rules=rules)

    assert make_plan(records, chunks=chunks, rules=rules) == first


@given(usages())
def test_in_one_chunk_without_end_no_other_is_opened(records):
    made = make_plan(records, chunks=[FAR])

    assert made.chunks == (FAR,)
    assert made.footprint == made.extents[0]


def test_a_gap_that_fits_best_is_taken_before_a_wider_one_and_the_tail():
    # live together at op 1: a wall, then gaps of 30 and 20 that are left by buffers dead by then
    lifetimes = [[(0, 1)], [(0, 0)], [(0, 1)], [(0, 0)], [(0, 1)], [(1, 1)]]
    sizes = [50, 30, 29, 20, 19, 18]

    made = plan(sizes, conflicts(lifetimes), chunks=[1000])

    ends = [place.offset + size for place, size in zip(made.places, sizes, strict=True)]
    assert made.places[3].offset == ends[2]
    assert made.places[5].offset == made.places[3].offset


@pytest.mark.parametrize(
    "order, chunk", [("opened", 0), ("smallest_first", 1), ("largest_first", 2)]
)
def test_chunks_are_tried_in_the_order_asked_for(order, chunk):
    made = plan([10], [0], chunks=[200, 100, 300], rules=Rules(order=order))

    assert made.places == (Place(chunk, 0),)
    assert made.footprint == 10


@pytest.mark.parametrize(
    "size, chunk", [(1, 2 << 20), (2_457_600, 2_949_120), (2_000_001, 2_400_032)]
)
def test_a_new_chunk_is_a_fifth_larger_in_steps_and_has_two_megabytes_at_least(size, chunk):
    assert plan([size], [0]).chunks == (chunk,)


def test_nothing_to_plan_takes_nothing():
    made = plan([], [])

    assert (made.places, made.chunks, made.footprint) == ((), (), 0)
