"""Limits on queued requests and tokens, and counters that return to zero."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backend.refusals import raises
from tests.backend.scheduling.one_shot.waiting import request_of
from tests.threads import run_in_threads
from varlen.errors import DeadlineError, QueueFullError, RequestError
from varlen.scheduling.admission import Admission, Work
from varlen.scheduling.batch import Batch, Forecast

NO_TIME = Forecast(0.0, 0.0)


def enter(admission, *lengths, forecast=NO_TIME, now=0.0, **options):
    admission.enter(request_of(*lengths, **options), forecast, now)


def test_counts_requests_and_their_tokens():
    admission = Admission(10, 100)

    enter(admission, 3, 4)
    enter(admission, 5)

    assert admission.depth == (2, 12)


def test_refuses_one_request_too_many():
    admission = Admission(1, 100)
    enter(admission, 3)

    message = "the queue is full: 1 requests wait, at most 1 may; try again later"
    with raises(QueueFullError, message):
        enter(admission, 3)
    assert admission.depth == (1, 3)


def test_refuses_tokens_past_the_cap():
    admission = Admission(10, 100)
    enter(admission, 60)

    message = "the queue is full: 60 tokens wait, the request has 41, at most 100 may wait; try again later"
    with raises(QueueFullError, message):
        enter(admission, 40, 1)
    assert admission.depth == (1, 60)
    enter(admission, 40)
    assert admission.depth == (2, 100)


def test_a_request_larger_than_the_whole_queue_is_the_caller_s_fault():
    admission = Admission(10, 100)

    message = "the request has 101 tokens; this model queues at most 100: send fewer rows at once"
    with raises(RequestError, message):
        enter(admission, 50, 51)
    assert admission.depth == (0, 0)


def test_a_request_that_waits_is_expected_to_run_in_a_full_batch():
    admission = Admission(10, 100)
    forecast = Forecast(seconds=1.0, batch_seconds=5.0)

    # nothing waits that could fill its batch
    enter(admission, 1, forecast=forecast, deadline_seconds=1.5)
    # one second of waiting work; at most as much joins it
    with pytest.raises(DeadlineError):
        enter(admission, 1, forecast=forecast, deadline_seconds=2.5)
    enter(admission, 1, forecast=forecast, deadline_seconds=3.5)


def test_room_comes_back_when_something_leaves():
    admission = Admission(1, 10)
    enter(admission, 10)

    admission.leave(Work(requests=0, tokens=4, seconds=0.0))
    with pytest.raises(QueueFullError):
        enter(admission, 1)
    admission.leave(Work(requests=1, tokens=6, seconds=0.0))

    enter(admission, 10)


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 10), st.integers(20, 80))
def test_caps_hold_and_counters_return_to_zero(lengths, max_requests, max_tokens):
    admission = Admission(max_requests, max_tokens)
    inside = []
    for length in lengths:
        fits = len(inside) < max_requests and sum(inside) + length <= max_tokens
        if fits:
            enter(admission, length)
            inside.append(length)
        else:
            with pytest.raises(QueueFullError):
                enter(admission, length)
            first = inside.pop(0)
            admission.leave(Work(requests=1, tokens=first, seconds=0.0))
        assert admission.depth == (len(inside), sum(inside))
    for length in inside:
        admission.leave(Work(requests=1, tokens=length, seconds=0.0))

    assert admission.depth == (0, 0)


def test_threads_that_enter_at_once_never_pass_the_cap():
    admission = Admission(50, 10_000)
    refused = []

    def enter_often(index):
        for _ in range(100):
            try:
                enter(admission, 1)
            except QueueFullError:
                refused.append(1)

    run_in_threads(4, enter_often)

    assert admission.depth == (50, 50)
    assert len(refused) == 350


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_work_in_flight_and_in_the_queue_is_shared_by_the_slots(slots):
    admission = Admission(10, 100, slots=slots)
    batches = [Batch((), None, 2.0, ""), Batch((), None, 4.0, "")]
    for batch in batches:
        admission.mark_running(batch, until=10.0 + batch.seconds)
    enter(admission, 5, forecast=Forecast(6.0, 6.0), now=10.0)

    def expected_milliseconds(now):
        """Return when the answer to a request that takes no time would come."""
        with pytest.raises(DeadlineError) as refused:
            enter(admission, 1, now=now, deadline_seconds=1e-9)
        return int(re.search(r"in about (\d+) ms", str(refused.value))[1])

    assert expected_milliseconds(10.0) == 12_000 // slots
    assert expected_milliseconds(13.0) == 7_000 // slots

    for batch in batches:
        admission.mark_ended(batch)
    admission.leave(Work(requests=1, tokens=5, seconds=6.0))
    enter(admission, 1, now=10.0, deadline_seconds=1e-9)


def test_a_request_that_takes_longer_than_its_part_of_the_machine_is_expected_later():
    admission = Admission(10, 100)
    enter(admission, 5, forecast=Forecast(1.0), now=0.0)
    slow = Forecast(1.0, least_seconds=8.0)

    with pytest.raises(DeadlineError, match="in about 9000 ms"):
        enter(admission, 5, forecast=slow, now=0.0, deadline_seconds=8.5)
    enter(admission, 5, forecast=slow, now=0.0, deadline_seconds=9.5)

    # another waits for its part only
    enter(admission, 5, forecast=Forecast(1.0), now=0.0, deadline_seconds=3.5)


def test_a_deadline_counts_from_the_arrival_of_the_request():
    admission = Admission(10, 100)
    request = replace(request_of(3, deadline_seconds=5.0), arrival=10.0)
    forecast = Forecast(2.0, 0.0)

    admission.enter(request, forecast, 12.0)

    message = "deadline missed: the answer is expected in about 4000 ms, the deadline is in 2000 ms"
    with raises(DeadlineError, message):
        admission.enter(request, forecast, 13.0)


def test_a_full_queue_admits_a_few_probes():
    admission = Admission(1, 100)
    enter(admission, 100)
    with pytest.raises(QueueFullError):
        enter(admission, 1)

    for _ in range(4):
        enter(admission, 1, probe=True)

    with pytest.raises(QueueFullError):
        enter(admission, 1, probe=True)
    assert admission.depth == (5, 104)


def test_predicts_the_seconds_of_the_queue_over_its_slots():
    admission = Admission(10, 100, slots=2)
    enter(admission, 1, forecast=Forecast(3.0, 1.0))
    assert admission.queued_seconds == 1.5

    admission.leave(Work(1, 1, 3.0))
    assert admission.queued_seconds == 0.0
