"""What is published about TurboTransformers' allocator, reproduced by our planner under the paper's rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backend.memory.plan_checker import overlaps
from varlen.memory.planner import Size, Usage, conflicts, live_sizes, plan
from varlen_bench.paper_plan import Place, bert_usages, lengths, plan_chunks

# Chunks lie this far apart for the checker, which knows offsets only.
FAR = 1 << 40
USAGES = st.lists(
    st.builds(
        lambda first, ops, size: Usage("v", first, first + ops, Size(fixed=size)),
        st.integers(0, 12),
        st.integers(0, 6),
        st.integers(1, 5000),
    ),
    max_size=12,
)


@given(USAGES, st.lists(st.integers(1, 20_000), max_size=4))
def test_live_buffers_never_overlap_and_lie_inside_their_chunks(usages, chunks):
    made = plan_chunks(usages, chunks)

    sizes = [usage.size.fixed for usage in usages]
    assert overlaps(usages, [c * FAR + offset for c, offset in made.places], sizes) == []
    assert made.chunks[: len(chunks)] == tuple(chunks)
    assert all(extent > 0 for extent in made.extents[len(chunks) :])
    for size, (chunk, offset) in zip(sizes, made.places, strict=True):
        assert offset + size <= made.extents[chunk] <= made.chunks[chunk]


def test_chunks_are_tried_in_the_order_in_which_they_were_opened():
    usage = Usage("v", 0, 0, Size(fixed=150))

    assert plan_chunks([usage], [100, 200, 300]).places == (Place(1, 0),)


@pytest.mark.parametrize(
    "size, chunk", [(1, 2 << 20), (2_457_600, 2_949_120), (2_000_001, 2_400_032)]
)
def test_a_new_chunk_is_a_fifth_larger_in_steps_and_has_two_megabytes_at_least(size, chunk):
    assert plan_chunks([Usage("v", 0, 0, Size(fixed=size))]).chunks == (chunk,)


@pytest.mark.parametrize(
    "batch, length, total, peak_live, one_chunk, chunks",
    [
        (1, 40, 1_758_304, 860_320, 860_320, 2_097_152),
        (1, 100, 4_962_544, 2_150_800, 2_150_800, 4_194_304),
        (1, 200, 11_838_944, 4_378_400, 4_916_000, 5_046_272),
        (1, 240, 15_127_104, 5_714_880, 5_899_200, 7_733_248),
        # published as 32 bytes more: 1.2 as a float of 32 bits is a little over
        (4, 500, 175_943_360, 72_584_000, 72_584_000, 79_718_400),
        (20, 500, 879_704_512, 362_920_000, 362_920_000, 398_592_000),
    ],
)
def test_bounds_and_footprints_of_bert_base(batch, length, total, peak_live, one_chunk, chunks):
    usages = bert_usages(batch, length)
    masks = conflicts([[(usage.first_op, usage.last_op)] for usage in usages])
    sizes = [usage.size.fixed for usage in usages]

    assert sum(sizes) == total
    assert max(size.at({}) for size in live_sizes(usages)) == peak_live
    assert plan(sizes, masks, 1).footprint == one_chunk
    assert sum(plan_chunks(usages).chunks) == chunks


def test_the_streams_are_the_published_ones():
    assert lengths(50, 250)[:6] == [221, 103, 199, 232, 112, 15]
    assert lengths(50, 250)[-2:] == [116, 85]
    assert lengths(150, 500)[:6] == [437, 202, 393, 460, 220, 25]
