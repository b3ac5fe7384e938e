"""Queue order: arrival for equal requests, fairness by served work otherwise, and deadlines."""

import math
from itertools import count, pairwise
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.backend.scheduling.one_shot.waiting import state_of
from varlen.scheduling.one_shot.queue import RequestQueue


def lengths(sequences):
    return [each.num_tokens for each in sequences]


def serve_all(queue, at_once=1):
    """Run all sequences, `at_once` at a time; return requests in order of completion."""
    order = []
    while queue:
        batch = queue.first(at_once)
        queue.remove(batch)
        order += dict.fromkeys(each.request for each in batch if each.request not in order)
    return order


@given(st.lists(st.sampled_from([True, False, None]), max_size=60), st.integers(0, 9))
def test_requests_of_one_row_and_one_priority_are_served_in_order_of_arrival(actions, priority):
    """The order holds whatever is served or dropped between arrivals."""
    queue, numbers, served = RequestQueue(), count(1), []
    for serve in actions:
        if serve and queue:
            batch = queue.first(2)
            queue.remove(batch)
            served += [each.request for each in batch]
        elif serve is None and queue:
            queue.discard(queue.first(1)[0].request)
        queue.add(state_of(next(numbers), priority=priority))
    served += serve_all(queue)

    assert [request.sequences[0].num_tokens for request in served] == sorted(
        request.sequences[0].num_tokens for request in served
    )


@given(
    st.lists(st.integers(1, 9), max_size=9),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=9),
)
@example([9, 9], [(1, 0), (9, 0), (1, 0), (1, 0), (1, 0), (2, 0)])
def test_what_was_served_before_does_not_change_an_order(served, waiting):
    orders = []
    for earlier in ([], served):
        queue = RequestQueue()
        for rows in earlier:
            queue.add(state_of(*[1] * rows))
        serve_all(queue, at_once=2)
        requests = [state_of(*[1] * rows, priority=priority) for rows, priority in waiting]
        for request in requests:
            queue.add(request)
        rows = []
        while queue:
            batch = queue.first(1)
            queue.remove(batch)
            rows.append(requests.index(batch[0].request))
        orders.append(rows)

    assert orders[0] == orders[1]


def test_requests_are_counted_from_their_arrival_in_the_order_in_which_they_are_queued():
    queue = RequestQueue()
    for arrival in (3.0, 1.0, 5.0):
        queue.add(state_of(1, arrival=arrival))

    # the second one was tokenized after the first
    assert [queue.arrivals_since(time) for time in (2.0, 4.0, 6.0)] == [3, 1, 0]


def test_only_recent_arrivals_are_remembered():
    queue = RequestQueue()
    for _ in range(1100):
        request = state_of(1)
        queue.add(request)
        queue.discard(request)

    assert queue.arrivals_since(0.0) == 1024


def test_equal_requests_of_many_rows_are_not_interleaved():
    queue = RequestQueue()
    requests = [state_of(*[1] * 64) for _ in range(10)]
    for request in requests:
        queue.add(request)

    assert serve_all(queue, at_once=64) == requests


def test_one_row_passes_nearly_all_of_a_crowd_of_large_requests():
    """A single row does not wait for all of 57,600 queued rows."""
    queue = RequestQueue()
    for _ in range(900):
        queue.add(state_of(*[1] * 64))
    single = state_of(7)
    queue.add(single)

    served = 0
    while single.sequences[0] not in (window := queue.first(64)):
        served += queue.remove(window)

    assert served < 20


def test_a_large_request_is_not_overtaken_for_ever():
    """It waits for the rows that it found, and as many as its own."""
    queue = RequestQueue()
    for _ in range(10):
        queue.add(state_of(1))
    large = state_of(*[2] * 64)
    queue.add(large)

    passed = 0
    while lengths(queue.first(1)) == [1]:
        queue.remove(queue.first(1))
        queue.add(state_of(1))
        passed += 1
        assert passed <= 10 + 64
    assert queue.first(1)[0].request is large


def test_a_short_request_passes_the_last_rows_of_a_large_one():
    """Rows that have run do not count as work that has passed their request."""
    queue = RequestQueue("tokens")
    large = state_of(*[100] * 64)
    queue.add(large)
    for _ in range(63):
        queue.add(state_of(10))
        assert lengths(queue.first(2)) == [10, 100]
        queue.remove(queue.first(2))
    queue.add(state_of(10))

    assert lengths(queue.first(2)) == [10, 100]


@given(
    st.lists(st.integers(1, 60), max_size=10),
    st.integers(1, 60),
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
)
def test_nothing_new_passes_once_what_was_found_and_the_own_size_have_been_served(
    found, own, coming
):
    """The bound on overtaking in an order by tokens: one arrives whenever one has run."""
    queue = RequestQueue("tokens")
    for length in found:
        queue.add(state_of(length))
    watched = state_of(own)
    queue.add(watched)

    served, too_late = 0, []
    for length in coming:
        newcomer = state_of(length)
        queue.add(newcomer)
        if served >= sum(found) + own:
            too_late.append(newcomer)
        (first,) = queue.first(1)
        queue.remove([first])
        served += first.num_tokens
    order = serve_all(queue)
    if watched in order:
        assert all(order.index(watched) < order.index(each) for each in too_late if each in order)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40))
def test_short_requests_are_served_sooner_than_in_order_of_arrival(lengths):
    queue = RequestQueue("tokens")
    requests = [state_of(length) for length in lengths]
    for request in requests:
        queue.add(request)

    place = {request: number for number, request in enumerate(serve_all(queue))}

    for earlier, later in pairwise(requests):
        if earlier.request.num_tokens <= later.request.num_tokens:
            # both have found the same, but for the earlier one
            assert place[earlier] < place[later]


def test_by_tokens_a_short_request_passes_long_ones():
    queue = RequestQueue("tokens")
    for length in (500, 400, 5):
        queue.add(state_of(length))

    assert lengths(queue) == [5, 500, 400]


def test_by_tokens_large_requests_of_short_rows_count_as_a_whole():
    queue = RequestQueue("tokens")
    queue.add(state_of(50))
    queue.add(state_of(*[10] * 32))
    queue.add(state_of(60))

    assert lengths(queue) == [50, 60, *[10] * 32]


def test_waiting_tokens_are_those_of_sequences_that_wait():
    queue = RequestQueue()
    several, single = state_of(1, 2, 3), state_of(40)
    queue.add(several)
    queue.add(single)
    assert queue.waiting_tokens == 46

    queue.remove(several.sequences[:2])
    assert queue.waiting_tokens == 43
    queue.discard(single)
    assert queue.waiting_tokens == 3


@pytest.mark.parametrize("rows", [1, 64])
def test_priority_counts_as_a_shorter_queue(rows):
    queue = RequestQueue()
    for _ in range(100):
        queue.add(state_of(*[1] * rows))
    urgent = state_of(*[2] * rows, priority=9)
    queue.add(urgent)

    assert serve_all(queue, at_once=rows).index(urgent) == pytest.approx(10, abs=1)


def test_mixed_priorities_of_many_rows():
    """Inserting 600 such requests, half at priority 9, once took minutes."""
    queue = RequestQueue()
    for number in range(600):
        queue.add(state_of(*[1] * 64, priority=9 * (number % 2)))

    order = serve_all(queue, at_once=64)

    urgent = [place for place, request in enumerate(order) if request.request.options.priority]
    assert len(order) == 600
    assert fmean(urgent) < 180


def test_what_misses_its_deadline_otherwise_goes_first():
    queue = RequestQueue()
    queue.add(state_of(1))
    queue.add(state_of(2, deadline=5.0), latest_start=4.0)
    queue.add(state_of(3, deadline=3.0), latest_start=2.0)

    queue.promote(1.0)
    assert lengths(queue) == [1, 2, 3]
    assert (queue.next_promotion, queue.is_urgent) == (2.0, False)
    queue.promote(2.0)
    assert lengths(queue) == [3, 1, 2]
    assert queue.is_urgent
    queue.promote(4.0)
    assert lengths(queue) == [3, 2, 1]
    assert queue.next_promotion == math.inf


def test_an_earlier_deadline_is_promoted_with_a_later_one_that_has_to_start():
    """A long request must start before a short one with an earlier deadline."""
    queue = RequestQueue()
    queue.add(state_of(1))
    queue.add(state_of(500, deadline=6.0), latest_start=1.0)
    queue.add(state_of(2, deadline=5.0), latest_start=4.9)

    queue.promote(1.0)

    assert lengths(queue) == [2, 500, 1]


def test_first_looks_and_removes_nothing():
    queue = RequestQueue()
    queue.add(state_of(1, 2))
    queue.add(state_of(3))

    assert lengths(queue.first(2)) == [1, 2]
    assert lengths(queue.first(9)) == [1, 2, 3]
    assert len(queue) == 2


@given(st.lists(st.integers(1, 4), max_size=10), st.data())
def test_remove_takes_these_and_moves_only_their_requests(rows, data):
    queue = RequestQueue()
    for number in rows:
        queue.add(state_of(*range(1, number + 1)))
    held = list(queue)
    batch = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []

    left = queue.remove(batch)

    kept = [each for each in held if each not in batch]
    touched = {each.request for each in batch}
    now = list(queue)
    assert [each for each in now if each.request not in touched] == [
        each for each in kept if each.request not in touched
    ]
    for request in touched:
        assert [each for each in now if each.request is request] == [
            each for each in kept if each.request is request
        ]
    assert len(queue) == len({each.request for each in kept})
    assert left == len(rows) - len(queue)


def test_a_discarded_request_leaves_with_all_that_waits():
    queue = RequestQueue()
    gone, stays = state_of(1, 2, 3), state_of(4)
    queue.add(gone)
    queue.add(stays)
    queue.remove([gone.sequences[0]])

    queue.discard(gone)
    queue.discard(gone)
    assert list(queue) == list(stays.sequences)
    queue.promote(math.inf)


def test_a_request_that_has_been_served_is_not_remembered_for_its_deadline():
    """A served request once stayed in the deadline list and promoted its neighbours."""
    queue = RequestQueue()
    served = state_of(1, deadline=100.0)
    queue.add(served, latest_start=10.0)
    queue.remove(queue.first(1))
    queue.add(state_of(2))
    queue.add(state_of(3, deadline=99.0), latest_start=98.0)

    queue.promote(10.0)

    assert lengths(queue) == [2, 3]
    assert queue.next_promotion == 98.0
    queue.remove(queue.first(2))
    assert (queue.next_promotion, queue.promote(98.0)) == (math.inf, False)
