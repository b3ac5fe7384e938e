"""The least footprint: as brute force finds it, between the bound and greedy."""

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.memory.usage import Size, Usage, live_sizes
from varlen_tools import paper_records
from varlen_tools.bench_report import write_table
from varlen_tools.exact_plan import (
    DEFAULT_NODES,
    OUTPUT,
    PAPER_SHAPES,
    Least,
    encoder_rows,
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


def live_bytes(lifetimes, sizes):
    """Return what is live at each op."""
    ops = range(max(last for _, last in lifetimes) + 1)
    pairs = list(zip(lifetimes, sizes, strict=True))
    return [sum(size for (first, last), size in pairs if first <= op <= last) for op in ops]


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


def test_the_least_plan_may_need_more_than_the_peak_of_live_bytes():
    # random records this small hardly ever do: without these, no search has to go through all orders
    lifetimes = [(7, 7), (1, 5), (4, 7), (0, 1), (1, 3), (0, 0), (2, 6)]
    sizes = [2, 1, 2, 2, 1, 2, 1]

    least = least_footprint(lifetimes, sizes)

    assert max(live_bytes(lifetimes, sizes)) == 4
    assert least == Least(5, is_proven=True)
    assert by_brute_force(lifetimes, sizes) == 5


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


def test_our_encoders_need_no_byte_more_than_is_live_folded_or_not():
    for row in encoder_rows(nodes=1):
        assert row["is_proven"] == "true"
        assert row["greedy_bytes"] == row["folded_bytes"] == row["peak_live_bytes"]


def test_the_committed_table_is_what_comes_out(tmp_path):
    with (PROJECT / OUTPUT).open(newline="") as file:
        committed = list(csv.DictReader(file))
    nodes = DEFAULT_NODES
    # as many random programs as a test has time for; the table has the same ones first
    table = [*paper_rows(nodes), *encoder_rows(nodes), *random_rows(40, nodes)]

    write_table(tmp_path / "gap.csv", table)

    with (tmp_path / "gap.csv").open(newline="") as file:
        some = {row["records"]: row for row in csv.DictReader(file)}
    assert some == {row["records"]: row for row in committed if row["records"] in some}
    assert len(some) == len(table)
