"""Partitions by dynamic programming: the article's example, brute force, and batch limits."""

import math
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.costs.batch_shape import BatchLimits, BatchShape
from varlen.scheduling.partition import cut_in_order, partition, seconds_of_batches

from .waiting import cost_table

ANY = BatchLimits(max_sequences=64, max_tokens=1 << 20, execution="padded")

# The article's five lengths at a cost of c0 + sequences * longest: c0, best batch sizes, total cost.
ARTICLE = [
    (0, [1, 1, 1, 1, 1], 227),
    (5, [2, 1, 1, 1], 248),
    (15, [2, 2, 1], 284),
    (30, [2, 3], 327),
    (60, [2, 3], 387),
    (200, [5], 585),
]


@pytest.mark.parametrize("fixed, sizes, total", ARTICLE, ids=[f"c0={row[0]}" for row in ARTICLE])
def test_the_article_s_five_lengths(fixed, sizes, total):
    # just above 0, since costs are positive
    costs = cost_table(lambda n, length: fixed + n * length + 1e-9, "padded")

    found, seconds = partition([17, 18, 52, 63, 77], costs, ANY, pressure=math.inf)

    assert found == sizes
    assert sum(seconds) == pytest.approx(total)


def set_partitions(items):
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for mates in combinations(rest, size):
            left = [item for item in rest if item not in mates]
            yield from ([[first, *mates], *others] for others in set_partitions(left))


class Table:
    """Costs from an array that grows with the number of sequences and their length."""

    def __init__(self, seconds, execution):
        self._seconds = seconds
        self.execution = execution

    def seconds(self, shape):
        columns = (shape.sequences, shape.tokens, shape.squares, shape.longest)
        return float(self.seconds_of(*(np.array([float(value)]) for value in columns))[0])

    def seconds_of(self, sequences, tokens, squares, longest):
        if self.execution == "packed":
            sequences, longest = tokens**2 / np.maximum(squares, 1), squares / np.maximum(tokens, 1)
        last = self._seconds.shape[0] - 1
        n = np.clip(np.rint(sequences), 0, last).astype(int)
        return self._seconds[n, np.clip(np.rint(longest), 0, last).astype(int)]


@st.composite
def tables(draw, execution, most=8):
    """Draw a table that grows by random steps."""
    seconds = np.zeros((most + 1, most + 1))
    for n in range(1, most + 1):
        for length in range(1, most + 1):
            below = max(seconds[n - 1, length], seconds[n, length - 1])
            seconds[n, length] = below + draw(st.integers(0, 6)) + (below == 0)
    return Table(seconds, execution)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), tables("padded"))
def test_no_partition_of_any_kind_takes_less_time(lengths, costs):
    lengths.sort()

    _, seconds = partition(lengths, costs, ANY, pressure=math.inf)

    cost = lru_cache(lambda *batch: costs.seconds(BatchShape.of([lengths[i] for i in batch])))
    least = min(
        sum(cost(*batch) for batch in batches)
        for batches in set_partitions(tuple(range(len(lengths))))
    )
    assert sum(seconds) == pytest.approx(least)


def cuts(count):
    """Yield the batch sizes of every way to cut `count` sequences."""
    for inner in range(count):
        for bounds in combinations(range(1, count), inner):
            edges = [0, *bounds, count]
            yield [end - begin for begin, end in pairwise(edges)]


def cut(lengths, sizes):
    edges = accumulate(sizes, initial=0)
    return [lengths[begin:end] for begin, end in pairwise(edges)]


def objective(lengths, sizes, costs, pressure):
    total, waiting = 0.0, len(lengths)
    for size, seconds in zip(sizes, seconds_of_batches(cut(lengths, sizes), costs), strict=True):
        total += seconds * (waiting + pressure)
        waiting -= size
    return total


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    costs=st.sampled_from(["packed", "padded"]).flatmap(tables),
    max_sequences=st.integers(1, 8),
    max_tokens=st.integers(8, 40),
    pressure=st.floats(0, 50),
)
def test_no_other_cuts_have_a_lower_objective(lengths, costs, max_sequences, max_tokens, pressure):
    limits = BatchLimits(max_sequences, max_tokens, costs.execution)

    sizes, seconds = partition(lengths, costs, limits, pressure=pressure)

    def allowed(sizes):
        begin = 0
        for size in sizes:
            batch = lengths[begin : begin + size]
            if not limits.allow(size, sum(batch), max(batch)):
                return False
            begin += size
        return True

    assert allowed(sizes)
    assert sum(sizes) == len(lengths)
    assert seconds == pytest.approx(seconds_of_batches(cut(lengths, sizes), costs))
    least = min(
        objective(lengths, other, costs, pressure) for other in cuts(len(lengths)) if allowed(other)
    )
    assert objective(lengths, sizes, costs, pressure) == pytest.approx(least)


def test_without_pressure_short_ones_need_not_wait_for_the_long_one():
    costs = cost_table(lambda n, length: 10 + n * length, "packed")
    limits = BatchLimits(64, 4096)

    assert partition([1, 1, 1, 500], costs, limits, pressure=0.0)[0] == [3, 1]
    assert partition([1, 1, 1, 500], costs, limits, pressure=math.inf)[0] == [4]


def test_a_request_of_many_rows_waits_for_its_last_and_gains_nothing_from_two_batches():
    costs = cost_table(lambda n, length: 10 + n * length, "packed")
    limits = BatchLimits(64, 4096)

    assert partition([1, 1, 1, 500], costs, limits, pressure=0.0, ends=[0, 0, 0, 1])[0] == [4]
    # three rows of one request, then another request
    assert partition([1, 1, 1, 500], costs, limits, pressure=0.0, ends=[0, 0, 1, 1])[0] == [3, 1]


def test_packed_sequences_may_come_in_any_order():
    costs = cost_table()
    limits = BatchLimits(2, 600)

    for order in permutations([10, 200, 400]):
        sizes, _ = partition(order, costs, limits, pressure=5.0)
        assert sum(sizes) == 3


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1, 10),
    st.integers(50, 200),
    st.sampled_from(["packed", "padded"]),
)
def test_cuts_in_order_are_full_and_within_limits(lengths, max_sequences, max_tokens, execution):
    limits = BatchLimits(max_sequences, max_tokens, execution)

    sizes = cut_in_order(lengths, limits)

    assert sum(sizes) == len(lengths)
    begin = 0
    for size in sizes:
        batch, more = lengths[begin : begin + size], lengths[begin : begin + size + 1]
        assert limits.allow(size, sum(batch), max(batch))
        if len(more) > size:
            assert not limits.allow(size + 1, sum(more), max(more))
        begin += size
