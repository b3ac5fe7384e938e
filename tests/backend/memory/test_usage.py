"""Usage records: folding, conflicts and the lower bound, each checked by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.planner import Size, Usage, conflicts, fold, live_sizes

from .plan_checker import peak_live

DIMS = ["tokens", "sequences", "blocks"]
SIZES = st.builds(
    lambda fixed, per: Size(fixed, **per),
    st.sampled_from([0, 8]),
    st.dictionaries(st.sampled_from(DIMS), st.sampled_from([0, 64, 192])),
)
BATCHES = st.fixed_dictionaries({name: st.integers(0, 50) for name in DIMS})


@st.composite
def usages(draw):
    firsts = sorted(draw(st.lists(st.integers(0, 15), max_size=14)))
    return [
        Usage(f"v{i}", first, first + draw(st.integers(0, 5)), draw(SIZES))
        for i, first in enumerate(firsts)
    ]


def live_together(one, other):
    return bool(
        set(range(one.first_op, one.last_op + 1)) & set(range(other.first_op, other.last_op + 1))
    )


@given(usages())
def test_folding_keeps_every_usage_once(records):
    folded = [usage for buffer in fold(records) for usage in buffer.usages]

    assert sorted(usage.name for usage in folded) == sorted(usage.name for usage in records)


@given(usages())
def test_usages_of_one_buffer_have_its_size_and_are_never_live_together(records):
    for buffer in fold(records):
        assert {usage.size for usage in buffer.usages} == {buffer.size}
        assert buffer.lifetimes == sorted(buffer.lifetimes)
        for i, usage in enumerate(buffer.usages):
            assert not any(live_together(usage, other) for other in buffer.usages[:i])


@given(usages())
def test_there_are_no_more_buffers_of_a_size_than_usages_live_at_once(records):
    buffers = fold(records)
    for size in {usage.size for usage in records}:
        same = [usage for usage in records if usage.size == size]
        most = peak_live(same, [1] * len(same))
        assert sum(buffer.size == size for buffer in buffers) == most


@given(usages())
def test_buffers_conflict_exactly_if_some_of_their_usages_are_live_together(records):
    buffers = fold(records)
    masks = conflicts([buffer.lifetimes for buffer in buffers])
    for i, one in enumerate(buffers):
        for j, other in enumerate(buffers):
            together = any(live_together(a, b) for a in one.usages for b in other.usages)
            assert bool(masks[i] >> j & 1) == (together and i != j)


@given(usages(), BATCHES)
def test_the_bound_is_the_peak_of_live_bytes_for_every_batch(records, dims):
    bound = max((size.at(dims) for size in live_sizes(records)), default=0)

    assert bound == peak_live(records, [usage.size.at(dims) for usage in records])


def test_a_size_grows_with_every_dimension_it_names():
    assert Size(7, tokens=10, sequences=3).at({"tokens": 5, "sequences": 2, "blocks": 9}) == 63


@given(SIZES, SIZES, BATCHES, st.integers(0, 5))
def test_sums_and_multiples_of_sizes_have_their_values(one, other, dims, factor):
    assert (one + other).at(dims) == one.at(dims) + other.at(dims)
    assert (one + factor).at(dims) == one.at(dims) + factor
    assert (one * factor).at(dims) == one.at(dims) * factor


@given(SIZES, SIZES, st.lists(BATCHES, max_size=5))
def test_a_size_that_is_never_below_another_is_below_it_for_no_batch(one, other, batches):
    if one.is_never_below(other):
        assert all(one.at(dims) >= other.at(dims) for dims in batches)


def test_equal_sizes_are_one_whatever_the_order_of_their_names():
    assert Size(1, a=2, b=3) == Size(1, b=3, a=2, c=0)
    assert len({Size(1, a=2, b=3), Size(1, b=3, a=2, c=0)}) == 1


def test_refuses_a_product_of_two_dimensions():
    with pytest.raises(ValueError, match="is not linear; allowed: one symbolic axis"):
        Size(tokens=1) * Size(sequences=1)


def test_refuses_a_size_that_shrinks_as_a_batch_grows():
    with pytest.raises(ValueError, match="allowed: numbers from 0"):
        Size(tokens=1, sequences=-1)
