"""Splitting a batch into sub-batches of whole sequences and nearly equal cost."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.execution.split import split_batch

HIDDEN = 64


def cost(length):
    return length * (length + 2 * HIDDEN)


lengths_of_a_batch = st.lists(st.integers(1, 512), min_size=1, max_size=40)


@given(lengths_of_a_batch, st.integers(1, 8))
def test_every_sequence_is_in_exactly_one_sub_batch_shortest_first(lengths, cores):
    sub_batches = split_batch(lengths, cores, HIDDEN)

    assert sorted(index for part in sub_batches for index in part) == list(range(len(lengths)))
    for part in sub_batches:
        assert part == sorted(part, key=lambda i: (lengths[i], i))
        assert part
    assert len(sub_batches) <= cores


@given(lengths_of_a_batch, st.integers(2, 8))
def test_a_batch_is_split_only_if_the_heaviest_sub_batch_beats_all_cores_on_the_whole(
    lengths, cores
):
    sub_batches = split_batch(lengths, cores, HIDDEN)

    if len(sub_batches) > 1:
        heaviest = max(sum(cost(lengths[i]) for i in part) for part in sub_batches)
        assert heaviest <= sum(map(cost, lengths)) / cores**0.6


@given(st.lists(st.integers(1, 512), min_size=2, max_size=8))
def test_two_sub_batches_are_within_seven_sixths_of_the_best_possible(lengths):
    sub_batches = split_batch(lengths, 2, HIDDEN)

    if len(sub_batches) == 2:
        heaviest = max(sum(cost(lengths[i]) for i in part) for part in sub_batches)
        total = sum(map(cost, lengths))
        sums = (
            sum(cost(length) for length, side in zip(lengths, sides, strict=True) if side)
            for sides in product((0, 1), repeat=len(lengths))
        )
        best = min(max(part, total - part) for part in sums)
        # Graham 1969: longest first is at most 4/3 - 1/(3 cores) of the best
        assert heaviest <= best * 7 / 6 + 1e-9


@pytest.mark.parametrize("lengths, cores", [([500], 4), ([500, 3], 2), ([9, 9, 9], 1)], ids=str)
def test_a_batch_that_cannot_be_split_evenly_stays_whole(lengths, cores):
    assert split_batch(lengths, cores, HIDDEN) == [
        sorted(range(len(lengths)), key=lengths.__getitem__)
    ]


def test_equal_sequences_are_split_equally():
    assert sorted(map(len, split_batch([100] * 12, 4, HIDDEN))) == [3, 3, 3, 3]
