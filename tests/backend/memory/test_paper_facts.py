"""What is published about TurboTransformers' allocator, reproduced by our planner under its rules."""

import pytest

from varlen.memory.planner import plan
from varlen.memory.usage import conflicts, live_sizes
from varlen_tools.show_plan import paper_records

ONE_CHUNK = [1 << 62]


def make_plan(batch, length, chunks=()):
    usages = paper_records.usages(batch, length)
    masks = conflicts([[(usage.first_op, usage.last_op)] for usage in usages])
    return plan([usage.size.fixed for usage in usages], masks, chunks=chunks)


def test_from_200_to_240_tokens_one_chunk_is_added():
    short = make_plan(1, 200)
    long = make_plan(1, 240, short.chunks)

    assert short.chunks == (2_949_120, 2_097_152)
    assert long.chunks == (2_949_120, 2_097_152, 2_097_152)


def test_without_history_the_plan_of_200_tokens_is_the_one_it_was():
    make_plan(1, 240, make_plan(1, 200).chunks)

    assert make_plan(1, 200).chunks == (2_949_120, 2_097_152)


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
    usages = paper_records.usages(batch, length)
    masks = conflicts([[(usage.first_op, usage.last_op)] for usage in usages])
    sizes = [usage.size.fixed for usage in usages]

    assert sum(sizes) == total
    assert max(size.at({}) for size in live_sizes(usages)) == peak_live
    assert plan(sizes, masks, chunks=ONE_CHUNK).footprint == one_chunk
    assert sum(make_plan(batch, length).chunks) == chunks


def test_the_streams_are_the_published_ones():
    assert paper_records.lengths(50, 250)[:6] == [221, 103, 199, 232, 112, 15]
    assert paper_records.lengths(50, 250)[-2:] == [116, 85]
    assert paper_records.lengths(150, 500)[:6] == [437, 202, 393, 460, 220, 25]
