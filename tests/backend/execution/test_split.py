"""A batch is shared out whole sequence by whole sequence, evenly, or not at all."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.execution.split import share_out

HIDDEN = 64


def cost(length):
    return length * (length + 2 * HIDDEN)


lengths_of_a_batch = st.lists(st.integers(1, 512), min_size=1, max_size=40)


@given(lengths_of_a_batch, st.integers(1, 8))
def test_every_sequence_is_in_exactly_one_share_in_ascending_order(lengths, cores):
    shares = share_out(lengths, cores, HIDDEN)

    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) and share for share in shares)
    assert len(shares) <= cores


@given(lengths_of_a_batch, st.integers(2, 8))
def test_a_batch_is_shared_out_only_if_the_heaviest_share_beats_all_cores_on_the_whole(
    lengths, cores
):
    shares = share_out(lengths, cores, HIDDEN)

    if len(shares) > 1:
        heaviest = max(sum(cost(lengths[i]) for i in share) for share in shares)
        assert heaviest <= sum(map(cost, lengths)) / cores**0.6


@given(st.lists(st.integers(1, 512), min_size=2, max_size=8))
def test_two_shares_are_within_seven_sixths_of_the_best_possible(lengths):
    shares = share_out(lengths, 2, HIDDEN)

    if len(shares) == 2:
        heaviest = max(sum(cost(lengths[i]) for i in share) for share in shares)
        total = sum(map(cost, lengths))
        sums = (
            sum(cost(length) for length, side in zip(lengths, sides, strict=True) if side)
            for sides in product((0, 1), repeat=len(lengths))
        )
        best = min(max(part, total - part) for part in sums)
        # Graham 1969: longest first is at most 4/3 - 1/(3 cores) of the best
        assert heaviest <= best * 7 / 6 + 1e-9


@pytest.mark.parametrize("lengths, cores", [([500], 4), ([500, 3], 2), ([9, 9, 9], 1)], ids=str)
def test_a_batch_that_cannot_be_shared_evenly_stays_whole(lengths, cores):
    assert share_out(lengths, cores, HIDDEN) == [list(range(len(lengths)))]


def test_equal_sequences_are_shared_equally():
    assert sorted(map(len, share_out([100] * 12, 4, HIDDEN))) == [3, 3, 3, 3]
