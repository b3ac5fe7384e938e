"""Usage records: folding, conflicts and the bound, each against a count by brute force."""

from hypothesis import given
from hypothesis import strategies as st

from varlen.memory.usage import Size, Usage, conflicts, fold, live_sizes

from .plan_checker import peak_live

SIZES = st.builds(
    Size, st.sampled_from([0, 64, 192]), st.sampled_from([0, 64]), st.sampled_from([0, 8])
)


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


@given(usages(), st.integers(1, 50), st.integers(1, 50))
def test_the_bound_is_the_peak_of_live_bytes_for_every_batch(records, tokens, sequences):
    bound = max((size.at(tokens, sequences) for size in live_sizes(records)), default=0)

    assert bound == peak_live(records, [usage.size.at(tokens, sequences) for usage in records])


def test_a_size_grows_with_tokens_and_sequences():
    assert Size(per_token=10, per_sequence=3, fixed=7).at(tokens=5, sequences=2) == 63
