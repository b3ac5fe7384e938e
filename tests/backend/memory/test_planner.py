"""Memory plans: live buffers never overlap, for any sizes, lifetimes and alignment."""

from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.planner import Size, Usage, conflicts, plan

from .plan_checker import overlaps, peak_live

ALIGNMENTS = st.sampled_from([1, 32, 64, 256])


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


def make_plan(records, alignment):
    masks = conflicts([[(record.first_op, record.last_op)] for record in records])
    return plan([record.size.fixed for record in records], masks, alignment)


@given(usages(), ALIGNMENTS)
def test_live_buffers_never_overlap(records, alignment):
    made = make_plan(records, alignment)

    assert overlaps(records, made.offsets, [record.size.fixed for record in records]) == []


@given(usages(), ALIGNMENTS)
def test_every_buffer_is_aligned_and_inside_the_footprint(records, alignment):
    made = make_plan(records, alignment)

    assert len(made.offsets) == len(records)
    for record, offset in zip(records, made.offsets, strict=True):
        assert offset % alignment == 0
        assert 0 <= offset <= made.footprint - record.size.fixed


@given(usages(), ALIGNMENTS)
def test_no_footprint_is_below_the_peak_of_live_bytes(records, alignment):
    made = make_plan(records, alignment)

    assert made.footprint >= peak_live(records, [record.size.fixed for record in records])


@given(usages(), ALIGNMENTS)
def test_the_same_question_has_the_same_answer(records, alignment):
    first = make_plan(records, alignment)

    make_plan(records[:3], alignment)

    assert make_plan(records, alignment) == first


def test_a_gap_that_fits_best_is_taken_before_a_wider_one_and_the_tail():
    # at op 1, dead buffers leave gaps of 30 and 20 bytes between live ones
    lifetimes = [[(0, 1)], [(0, 0)], [(0, 1)], [(0, 0)], [(0, 1)], [(1, 1)]]
    sizes = [50, 30, 29, 20, 19, 18]

    made = plan(sizes, conflicts(lifetimes), 1)

    assert made.offsets[3] == made.offsets[2] + sizes[2]
    assert made.offsets[5] == made.offsets[3]


def test_a_gap_that_fits_best_is_taken_before_a_wider_one_behind_it():
    # at op 1, dead buffers leave gaps of 30 and 28 + 27 bytes between live ones
    lifetimes = [[(0, 1)], [(0, 0)], [(0, 1)], [(0, 0)], [(0, 0)], [(0, 1)], [(1, 1)]]
    sizes = [50, 30, 29, 28, 27, 26, 25]

    made = plan(sizes, conflicts(lifetimes), 1)

    assert made.offsets[6] == made.offsets[1]


def test_the_largest_buffer_is_placed_first():
    # in the order of time, the last one would find too little space before the second
    made = plan([10, 20, 30], conflicts([[(0, 0)], [(0, 1)], [(1, 1)]]), 1)

    assert made.footprint == 50


def test_nothing_to_plan_takes_nothing():
    made = plan([], [], 64)

    assert (made.offsets, made.footprint) == ((), 0)
