"""Fair order: ranks of requests, and of the tenants that send them."""

from hypothesis import given
from hypothesis import strategies as st

from varlen.scheduling.admission import RANK_UNIT, FairShare

_SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=8)
# tenant, size, weight
_ENTRIES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(1, 10)), max_size=10
)


@given(_SIZES)
def test_a_request_waits_at_most_for_what_it_found(sizes):
    share = FairShare()
    ranks = [share.enter("", size) for size in sizes]

    for number, rank in enumerate(ranks):
        assert rank <= RANK_UNIT * sum(sizes[: number + 1])


@given(st.integers(1, 50), st.integers(1, 8), st.integers(1, 3))
def test_requests_of_one_size_are_served_in_order_of_arrival(size, count, patience):
    share = FairShare(patience)

    ranks = [share.enter("", size) for _ in range(count)]

    assert ranks == [RANK_UNIT * size * (number + 1) for number in range(count)]


def test_a_small_request_counts_its_size_for_each_large_one():
    share = FairShare()
    for _ in range(4):
        share.enter("", 12_800)

    assert share.enter("", 20) == RANK_UNIT * (4 * 20 + 20)


def test_patience_lets_others_pass_for_longer():
    ranks = []
    for patience in (1, 2):
        share = FairShare(patience)
        for _ in range(9):
            share.enter("", 10)
        ranks.append(share.enter("", 1000))

    # nine others of its size would take 9,000
    assert ranks == [RANK_UNIT * (90 + 1000), RANK_UNIT * (180 + 1000)]


def test_a_weight_divides_what_others_count():
    share = FairShare()
    for _ in range(8):
        share.enter("", 100)

    assert share.enter("", 100, weight=8) == RANK_UNIT * (100 + 100)


def test_a_tenant_waits_for_others_as_if_each_had_one_request():
    share = FairShare()
    for _ in range(100):
        share.enter("busy", 10)

    assert share.enter("quiet", 10) == RANK_UNIT * (10 + 10)
    # its next one has a turn after that
    assert share.enter("quiet", 10) == RANK_UNIT * (20 + 20)
    assert share.enter("third", 10) == RANK_UNIT * (2 * 10 + 10)


@given(_ENTRIES, st.integers(0, 1000))
def test_what_was_served_before_does_not_change_an_order(entries, served):
    fresh, used = FairShare(), FairShare()
    used.enter("before", served)
    used.serve("before", served)
    used.leave("before")

    ranks = [[share.enter(*entry) for entry in entries] for share in (fresh, used)]

    assert [rank + RANK_UNIT * served for rank in ranks[0]] == ranks[1]


@given(_ENTRIES)
def test_nothing_is_kept_of_requests_that_have_left(entries):
    share = FairShare()
    for entry in entries:
        share.enter(*entry)
    for tenant, work, _ in entries:
        share.serve(tenant, work)
        share.leave(tenant)

    total = sum(work for _, work, _ in entries)
    assert share.enter("new", 7) == RANK_UNIT * (total + 7)


@given(_ENTRIES, st.integers(1, 50))
def test_the_part_before_a_request_follows_from_its_rank(entries, own):
    share = FairShare()
    for tenant, size, weight in entries:
        share.enter(tenant, size, weight)
    waiting = sum(size for _, size, _ in entries)

    part = share.part_before("a", own)

    # nothing was served, and a patience of 1 never passes the work that waits
    before = share.enter("a", own) - RANK_UNIT * own
    assert part == (before / (RANK_UNIT * waiting) if waiting else 1)
    assert part <= 1
