"""The least footprint: as brute force finds it, between the bound and greedy."""

import csv
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.memory.usage import Size, Usage, live_sizes
from varlen_tools import paper_records
from varlen_tools.bench_report import write_table
from varlen_tools.exact_plan import (
    OUTPUT,
    PAPER_SHAPES,
    greedy_footprint,
    least_footprint,
    paper_rows,
    random_rows,
)
from varlen_tools.setup_server import PROJECT


@st.composite
def usages(draw, most):
    return [
        Usage(f"v{i}", first, first + draw(st.integers(0, 4)), Size(fixed=draw(st.integers(1, 9))))
        for i, first in enumerate(draw(st.lists(st.integers(0, 6), min_size=1, max_size=most)))
    ]


def lifetimes_of(records):
    return [(record.first_op, record.last_op) for record in records]


def sizes_of(records):
    return [record.size.fixed for record in records]


def by_brute_force(lifetimes, sizes):
    """Return the least height below which offsets can be chosen so that no two records dispute a byte."""

    def fits(height):
        def place(index, placed):
            if index == len(sizes):
                return True
            first, last = lifetimes[index]
            for offset in range(height - sizes[index] + 1):
                end = offset + sizes[index]
                if all(
                    last < a or b < first or end <= begin or until <= offset
                    for (a, b), begin, until in placed
                ) and place(index + 1, [*placed, (lifetimes[index], offset, end)]):
                    return True
            return False

        return place(0, [])

    return next(height for height in range(max(sizes), sum(sizes) + 1) if fits(height))


@settings(deadline=None, max_examples=60)
@given(usages(most=5))
def test_it_is_what_brute_force_finds(records):
    lifetimes, sizes = lifetimes_of(records), sizes_of(records)

    least = least_footprint(lifetimes, sizes)

    assert least.is_proven
    assert least.footprint == by_brute_force(lifetimes, sizes)


@settings(deadline=None)
@given(usages(most=10), st.integers(1, 3000))
def test_it_lies_between_the_peak_of_live_bytes_and_greedy_however_short_the_search(records, nodes):
    least = least_footprint(lifetimes_of(records), sizes_of(records), nodes)

    bound = max(size.at(1, 1) for size in live_sizes(records))
    assert bound <= least.footprint <= greedy_footprint(records)


def test_a_search_that_ends_early_says_so():
    records = paper_records.usages(1, 200)

    cut = least_footprint(lifetimes_of(records), sizes_of(records), nodes=3)

    assert not cut.is_proven
    assert cut.footprint == greedy_footprint(records)


@pytest.mark.parametrize("batch, length", PAPER_SHAPES)
def test_for_the_paper_s_records_the_bound_is_reached(batch, length):
    records = paper_records.usages(batch, length)

    least = least_footprint(lifetimes_of(records), sizes_of(records))

    assert least.is_proven
    assert least.footprint == max(size.at(1, 1) for size in live_sizes(records))


def test_no_pair_of_live_records_fits_into_less():
    records = paper_records.usages(1, 200)
    least = least_footprint(lifetimes_of(records), sizes_of(records)).footprint
    for one, other in combinations(records, 2):
        if one.first_op <= other.last_op and other.first_op <= one.last_op:
            assert one.size.fixed + other.size.fixed <= least


def test_the_committed_table_is_what_comes_out(tmp_path):
    with (PROJECT / OUTPUT).open(newline="") as file:
        committed = list(csv.DictReader(file))

    write_table(tmp_path / "gap.csv", [*paper_rows(200_000), *random_rows(200, 200_000)])

    with (tmp_path / "gap.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == committed
