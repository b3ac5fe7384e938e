"""The engine answers each request exactly once, and its counters return to zero.

Tests of order call `step` on a virtual clock; tests of closing run the engine's own thread.
"""

import contextlib
import gc
import time
import weakref
from threading import Event, Lock, Thread
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.backend.fakes.engine_parts import Clock, FakeReply, HeldExecutor
from tests.backend.requests import request_of
from tests.backend.scheduling.one_shot import waiting
from tests.backend.scheduling.one_shot.waiting import cost_table
from varlen.config import PolicyName
from varlen.errors import (
    DeadlineError,
    EngineError,
    ModelFaultError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    VarlenError,
)
from varlen.scheduling.batch import BatchResult
from varlen.scheduling.engine import Engine
from varlen.scheduling.one_shot.one_shot import OneShotScheduler
from varlen.telemetry.metrics import Stats

SECONDS = 10.0


class FakeExecutor(HeldExecutor):
    """Returns the sum of each prompt's ids, or a failure.

    `poison` and `fault` are ids that fail; `fits` is the largest batch in tokens.
    """

    def __init__(self, poison=None, fits=10_000, slots=1, fault=None):
        super().__init__(slots)
        self.poison = poison
        self.fault = fault
        self.fits = fits
        self.batches = []
        self.normalize = []
        self.most_in_flight = 0

    def start(self, batch, completed):
        super().start(batch, completed)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def result_of(self, batch):
        rows = [sequence.prompt.token_ids.tolist() for sequence in batch.sequences]
        assert all(sequence.status == "running" for sequence in batch.sequences)
        self.batches.append(rows)
        self.normalize.append([sequence.options.normalize for sequence in batch.sequences])
        if sum(map(len, rows)) > self.fits:
            return BatchResult([], 1.0, failure="memory")
        if any(self.fault in row for row in rows):
            return BatchResult([], 1.0, failure="model")
        if any(self.poison in row for row in rows):
            return BatchResult([], 1.0, failure="batch")
        return BatchResult([np.array([sum(row)], dtype=np.float32) for row in rows], 1.0)


class ThreadedExecutor(FakeExecutor):
    """Completes batches in other threads, while the gate is open."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.gate = Event()
        self.gate.set()
        self.running = Event()
        self.lock = Lock()

    def start(self, batch, completed):
        with self.lock:
            super().start(batch, completed)
        Thread(target=self.finish, args=(batch,), daemon=True).start()

    def finish(self, batch):
        self.running.set()
        assert self.gate.wait(SECONDS)
        with self.lock:
            index = next(i for i, entry in enumerate(self.in_flight) if entry[0] is batch)
            entry = self.in_flight.pop(index)
        entry[1](batch, entry[2])


def make_scheduler(
    budget=8, kind=OneShotScheduler, max_requests=1000, max_tokens=10_000, slots=1, **settings
):
    """Return a scheduler with batches of `budget` tokens, by default in order of arrival."""
    costs = cost_table(lambda n, length: 1.0 + n * length, max_sequences=8, max_length=16)
    settings = {"policy": "token_budget", **settings}
    limits = {"max_queued_requests": max_requests, "max_queued_tokens": max_tokens}
    return waiting.make_scheduler(costs, budget, kind, slots, **limits, **settings)


class Bench:
    """An engine and its parts."""

    def __init__(self, executor=None, scheduler=None, *, is_padded=False, **settings):
        self.executor = executor or FakeExecutor()
        self.scheduler = scheduler or make_scheduler(slots=self.executor.slots, **settings)
        self.admission = self.scheduler._admission
        self.stats = Stats()
        self.clock = Clock()
        self.engine = Engine(
            self.scheduler, self.executor, self.stats, self.clock, is_padded=is_padded
        )

    def submit(self, *rows, reply=None, **options):
        reply = reply or FakeReply()
        self.engine.submit(request_of(*rows, **options), reply)
        return reply

    def step(self):
        """Fill the engine's slots, complete the batches, and process the results."""
        wake_at = self.engine.step()
        while self.executor.in_flight:
            self.executor.complete()
        self.engine._drain_inbox()
        return wake_at

    def run_all(self):
        self.step()
        while (wake_at := self.scheduler.wake_at(self.clock.now)) is not None:
            self.clock.now = max(self.clock.now, wake_at)
            self.step()


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def started():
    """Return a function that starts a bench's thread and closes it when the test ends."""
    benches = []

    def start(bench):
        benches.append(bench)
        bench.engine.start()
        return bench

    yield start
    for bench in benches:
        bench.executor.gate.set()
        if bench.engine._thread.is_alive():
            close_in_time(bench.engine)


def close_in_time(engine):
    closer = Thread(target=engine.close, daemon=True)
    closer.start()
    closer.join(SECONDS)
    assert not closer.is_alive(), "close() hangs"
    assert not engine._thread.is_alive()


def wait_for(replies):
    for index, reply in enumerate(replies):
        assert reply.answered.wait(SECONDS), f"request {index} was never answered"


def test_a_step_without_requests_does_nothing(bench):
    assert bench.step() is None
    assert bench.executor.batches == []


def test_rows_come_back_in_the_request_s_order(bench):
    reply = bench.submit([1], [2, 2], [3])

    assert bench.step() is None
    assert reply.only == [[1], [4], [3]]


def test_requests_share_a_batch_in_order_of_arrival(bench):
    replies = [bench.submit([1, 1]), bench.submit([2], [3]), bench.submit([4])]

    bench.step()

    assert bench.executor.batches == [[[1, 1], [2], [3], [4]]]
    assert [reply.only for reply in replies] == [[[2]], [[2], [3]], [[4]]]


def test_normalize_travels_with_its_sequences(bench):
    bench.submit([1], [2], normalize=True)
    bench.submit([3])

    bench.step()

    assert bench.executor.normalize == [[True, True, False]]


def test_a_request_over_several_batches_is_answered_with_its_last(bench):
    reply = bench.submit([1] * 5, [2] * 5, [3] * 5)

    bench.step()
    bench.step()
    assert reply.answers == []
    bench.step()
    assert reply.only == [[5], [10], [15]]


def test_requests_that_come_between_steps_join_the_queue(bench):
    first = bench.submit([1] * 8)
    bench.step()
    second = bench.submit([2])
    bench.step()

    assert (first.only, second.only) == ([[8]], [[2]])


def test_a_request_waits_until_its_last_sequence_is_taken(bench):
    bench.submit([1] * 5, [2] * 5)
    assert bench.admission.depth == (1, 10)

    bench.step()
    assert bench.admission.depth == (1, 5)
    bench.step()
    assert bench.admission.depth == (0, 0)


def test_a_refused_request_is_left_to_the_caller():
    bench = Bench(max_requests=1, max_tokens=10)
    first, second, third = bench.submit([1]), FakeReply(), FakeReply()

    with pytest.raises(QueueFullError):
        bench.submit([1], reply=second)
    with pytest.raises(RequestError):
        bench.submit([1] * 6, [1] * 5, reply=third)

    bench.run_all()
    assert (len(first.answers), second.answers, third.answers) == (1, [], [])


def test_a_batch_that_fails_fails_its_requests_only():
    bench = Bench(FakeExecutor(poison=13))
    good = bench.submit([1] * 8)
    bad, company = bench.submit([13]), bench.submit([2])
    later = bench.submit([3] * 8)

    bench.run_all()

    assert good.only == [[8]]
    assert isinstance(bad.only, EngineError)
    assert isinstance(company.only, EngineError)
    assert later.only == [[24]]
    assert bench.admission.depth == (0, 0)


def test_the_message_of_a_failure_has_no_details():
    bench = Bench(FakeExecutor(poison=13))
    reply = bench.submit([13])

    bench.step()

    message = "the model failed on the batch that held this request; the server's log says why"
    assert str(reply.only) == message


def test_a_part_that_fails_fails_its_request_once_and_the_rest_is_dropped():
    bench = Bench(FakeExecutor(poison=13))
    reply = bench.submit([1] * 8, [13] * 8, [2] * 8, [3] * 8)
    after = bench.submit([5])

    bench.run_all()

    assert isinstance(reply.only, EngineError)
    assert after.only == [[5]]
    # the single row passes; rows after the failure did not run
    assert [len(batch[0]) for batch in bench.executor.batches] == [1, 8, 8]
    assert bench.admission.depth == (0, 0)


def test_a_request_whose_first_part_failed_never_succeeds_with_its_second():
    bench = Bench(FakeExecutor(poison=13))
    reply = bench.submit([13] * 8, [1] * 8)

    bench.run_all()

    assert isinstance(reply.only, EngineError)


def test_a_batch_that_runs_out_of_memory_is_split_in_halves():
    bench = Bench(FakeExecutor(fits=3))
    replies = [bench.submit([n], [n, n]) for n in range(2)]

    bench.run_all()

    assert [reply.only for reply in replies] == [[[0], [0]], [[1], [2]]]
    assert bench.executor.batches == [
        [[0], [0, 0], [1], [1, 1]],
        [[0], [0, 0]],
        [[1], [1, 1]],
    ]
    drained = bench.stats.drain()
    assert drained.counts["varlen_split_batches_total"] == 1
    assert drained.counts["varlen_sequences_total"] == 4
    assert list(drained.observed["varlen_batch_sequences"]) == [2, 2]


def test_a_sequence_that_runs_out_of_memory_alone_fails_its_request_only():
    bench = Bench(FakeExecutor(fits=3))
    small, large, other = (
        bench.submit([1]),
        bench.submit([1], [2, 2, 2, 2], [3]),
        bench.submit([4, 4]),
    )

    bench.run_all()

    assert (small.only, other.only) == ([[1]], [[8]])
    message = "the server had too little memory to run this request; it may pass later"
    assert isinstance(large.only, EngineError)
    assert str(large.only) == message
    # once its request has failed, the third row does not run
    assert [[3]] not in bench.executor.batches
    assert bench.admission.depth == (0, 0)


def test_a_half_that_fails_otherwise_fails_its_requests_only():
    bench = Bench(FakeExecutor(poison=13, fits=2))
    replies = [bench.submit([1, 1]), bench.submit([13, 1])]

    bench.run_all()

    assert replies[0].only == [[2]]
    assert str(replies[1].only).startswith("the model failed on the batch")


def test_a_cancelled_request_does_not_run(bench):
    gone, waits = bench.submit([1], reply=FakeReply(cancelled=[True])), bench.submit([2])

    bench.step()

    assert isinstance(gone.only, RequestCancelled)
    assert str(gone.only) == "cancelled before it ran"
    assert bench.executor.batches == [[[2]]]
    assert waits.only == [[2]]


def test_a_batch_of_cancelled_requests_makes_room_for_the_next(bench):
    gone = [bench.submit([1] * 8, reply=FakeReply(cancelled=[True])) for _ in range(3)]
    waits = bench.submit([2])

    bench.step()

    assert all(isinstance(reply.only, RequestCancelled) for reply in gone)
    assert waits.only == [[2]]
    assert bench.admission.depth == (0, 0)


def test_a_request_cancelled_between_its_batches_stops_there(bench):
    reply = bench.submit([1] * 8, [2] * 8, [3] * 8, reply=FakeReply(cancelled=[False, True]))

    bench.run_all()

    assert isinstance(reply.only, RequestCancelled)
    assert bench.executor.batches == [[[1] * 8]]
    assert reply.asked == 2
    assert bench.admission.depth == (0, 0)


def test_cancellation_is_asked_once_a_batch(bench):
    reply = bench.submit([1], [2], [3])

    bench.step()

    assert reply.asked == 1


def test_the_wait_is_measured_to_the_first_batch(bench):
    bench.submit([1] * 8, [2] * 8)
    bench.clock.now += 2.5
    bench.step()
    bench.clock.now += 4.0
    bench.step()

    drained = bench.stats.drain()
    assert list(drained.observed["varlen_queue_wait_seconds"]) == [2.5]
    assert list(drained.observed["varlen_batch_tokens"]) == [8, 8]
    assert drained.counts["varlen_sequences_total"] == 2
    assert drained.counts["varlen_tokens_total"] == 16
    assert drained.counts["varlen_padding_tokens_total"] == 0


def test_tokens_that_pad_sequences_to_the_longest_are_counted():
    bench = Bench(is_padded=True)
    bench.submit([1] * 8, [2] * 3, [3] * 4)
    bench.run_all()

    counts = bench.stats.drain().counts
    assert counts["varlen_tokens_total"] == 15
    # the longest runs alone
    assert counts["varlen_padding_tokens_total"] == 1


def test_nothing_is_accepted_after_close(started):
    bench = started(Bench(ThreadedExecutor()))
    close_in_time(bench.engine)

    with pytest.raises(EngineError, match="being unloaded"):
        bench.submit([1])
    assert bench.admission.depth == (0, 0)


def test_closing_twice_is_harmless(started):
    bench = started(Bench(ThreadedExecutor()))

    close_in_time(bench.engine)
    close_in_time(bench.engine)


def test_closing_an_engine_that_never_started_returns(bench):
    bench.engine.close()

    assert not bench.engine._thread.is_alive()


def test_close_runs_what_is_queued(started):
    bench = Bench(ThreadedExecutor())
    bench.executor.gate.clear()
    replies = [bench.submit([n] * 3, [n] * 4) for n in range(20)]
    started(bench)
    assert bench.executor.running.wait(SECONDS)
    replies += [bench.submit([n]) for n in range(20)]
    closer = Thread(target=bench.engine.close, daemon=True)
    closer.start()
    bench.executor.gate.set()
    closer.join(SECONDS)

    assert not closer.is_alive(), "close() hangs"
    assert [reply.only for reply in replies[:20]] == [[[3 * n], [4 * n]] for n in range(20)]
    assert [reply.only for reply in replies[20:]] == [[[n]] for n in range(20)]
    assert bench.admission.depth == (0, 0)


def test_close_right_after_submit_loses_nothing(started):
    # the sentinel of close() may arrive at any point of the loop
    for _ in range(50):
        bench = started(Bench(ThreadedExecutor()))
        replies = [bench.submit([n]) for n in range(3)]

        close_in_time(bench.engine)

        assert [reply.only for reply in replies] == [[[0]], [[1]], [[2]]]


def test_close_while_others_submit_answers_or_refuses_each(started):
    bench = started(Bench(ThreadedExecutor(), budget=3))
    accepted, refused = [], []

    def submit():
        for n in range(200):
            reply = FakeReply()
            try:
                bench.submit([n], [n], reply=reply)
                accepted.append(reply)
            except EngineError:
                refused.append(reply)

    threads = [Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.005)
    close_in_time(bench.engine)
    for thread in threads:
        thread.join()

    assert all(len(reply.answers) == 1 for reply in accepted)
    assert all(not reply.answers for reply in refused)
    assert len(accepted) + len(refused) == 600
    assert bench.admission.depth == (0, 0)


class FailingScheduler(OneShotScheduler):
    """Raises once: in `update`, or in `schedule` before or after it has a batch."""

    when = None

    def schedule(self, now):
        if self.fails("before"):
            raise KeyError("scheduler")
        batch = super().schedule(now)
        if batch is not None and self.fails("after"):
            raise KeyError("scheduler")
        return batch

    def update(self, batch, result):
        events = super().update(batch, result)
        if self.fails("update"):
            raise KeyError("scheduler")
        return events

    def fails(self, when):
        if self.when != when:
            return False
        self.when = None
        return True


FAILURES = ["before", "after", "update"]


def failing_scheduler(when, **settings):
    scheduler = make_scheduler(9, kind=FailingScheduler, **settings)
    scheduler.when = when
    return scheduler


@pytest.mark.parametrize("when", FAILURES)
def test_a_scheduler_that_fails_fails_what_waits_and_the_engine_goes_on(started, when):
    bench = Bench(ThreadedExecutor(), scheduler=failing_scheduler(when))
    replies = [bench.submit([1] * 5, [1] * 5), bench.submit([2] * 5), bench.submit([3] * 5)]
    started(bench)

    wait_for(replies)
    assert all(isinstance(reply.only, EngineError) for reply in replies)
    later = bench.submit([4])
    wait_for([later])
    assert later.only == [[4]]
    assert bench.admission.depth == (0, 0)


@pytest.mark.parametrize(
    "method, poison", [("is_cancelled", None), ("send", None), ("finish", None), ("fail", 13)]
)
def test_a_reply_that_raises_harms_no_other_request_and_not_the_engine(started, method, poison):
    bench = Bench(ThreadedExecutor(poison=poison))
    broken = FakeReply(raises=(method,))
    before = bench.submit([1])
    bench.submit([13], reply=broken)
    company, behind = bench.submit([2]), bench.submit([3] * 8)
    started(bench)

    wait_for([before, company, behind])
    later = bench.submit([4])
    wait_for([later])

    assert later.only == [[4]]
    assert behind.only == [[24]]
    assert len(before.answers) == len(company.answers) == 1
    assert len(broken.answers) <= 1
    assert bench.engine._thread.is_alive()
    assert bench.admission.depth == (0, 0)


def test_a_reply_that_fails_to_say_whether_it_is_cancelled_is_answered(started):
    bench = Bench(ThreadedExecutor())
    broken = bench.submit([1], reply=FakeReply(raises=("is_cancelled",)))
    started(bench)

    wait_for([broken])
    assert len(broken.answers) == 1


def test_the_thread_survives_a_reply_that_raises_while_the_queue_is_failed(started):
    bench = Bench(ThreadedExecutor(), scheduler=failing_scheduler("before"))
    replies = [bench.submit([1], reply=FakeReply(raises=("fail",))), bench.submit([2])]
    started(bench)

    wait_for(replies)
    later = bench.submit([3])
    wait_for([later])
    assert later.only == [[3]]


ROWS = st.lists(st.lists(st.integers(0, 13), min_size=1, max_size=9), min_size=1, max_size=4)
POLICIES = st.sampled_from(get_args(PolicyName))
SLOTS = st.sampled_from([1, 2, 4])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), ROWS, st.lists(st.booleans(), max_size=3)),
        st.tuples(st.just("step"), st.none(), st.none()),
        st.tuples(st.just("complete"), st.integers(0, 3), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(
    actions=ACTIONS,
    slots=SLOTS,
    budget=st.integers(9, 20),
    max_requests=st.integers(1, 6),
    max_tokens=st.integers(10, 60),
    fits=st.integers(4, 30),
    policy=POLICIES,
    trigger=st.sampled_from(["hungry", "lazy"]),
)
def test_any_order_of_events_answers_each_request_once(
    actions, slots, budget, max_requests, max_tokens, fits, policy, trigger
):
    """Batches complete in any order; requests arrive, fail and are cancelled."""
    bench = Bench(
        FakeExecutor(poison=13, fits=fits, slots=slots),
        budget=budget,
        max_requests=max_requests,
        max_tokens=max_tokens,
        policy=policy,
        trigger=trigger,
    )
    accepted, refused = [], []
    for action, given_rows, cancelled in actions:
        if action == "step":
            bench.engine.step()
        elif action == "complete":
            if bench.executor.in_flight:
                bench.executor.complete(given_rows % len(bench.executor.in_flight))
        else:
            reply = FakeReply(cancelled=cancelled)
            try:
                bench.submit(*given_rows, reply=reply)
                accepted.append((given_rows, reply))
            except VarlenError:
                refused.append(reply)
        requests, tokens = bench.admission.depth
        assert requests <= max_requests
        assert tokens <= max_tokens
    bench.run_all()

    for rows, reply in accepted:
        answer = reply.only
        if isinstance(answer, list):
            assert answer == [[sum(row)] for row in rows]
            assert not any(13 in row for row in rows)
        else:
            assert isinstance(answer, (EngineError, RequestCancelled))
    assert all(not reply.answers for reply in refused)
    assert bench.admission.depth == (0, 0)
    assert all(
        len(batch) == 1 or sum(map(len, batch)) <= budget for batch in bench.executor.batches
    )


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_every_free_slot_is_filled_and_no_more(slots):
    bench = Bench(FakeExecutor(slots=slots))
    replies = [bench.submit([n] * 8) for n in range(6)]

    bench.engine.step()
    assert len(bench.executor.in_flight) == slots

    bench.executor.complete(slots - 1)
    bench.engine.step()
    assert len(bench.executor.batches) == slots + 1

    bench.run_all()
    assert [reply.only for reply in replies] == [[[8 * n]] for n in range(6)]
    assert bench.executor.most_in_flight == slots


def test_batches_that_complete_in_another_order_are_answered_as_they_come():
    bench = Bench(FakeExecutor(slots=2))
    slow, fast = bench.submit([1] * 8), bench.submit([2] * 8)
    bench.engine.step()

    bench.executor.complete(1)
    bench.engine.step()
    assert (slow.answers, fast.only) == ([], [[16]])

    bench.run_all()
    assert slow.only == [[8]]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_fault_of_the_device_fails_all_requests_and_refuses_later_ones(slots):
    bench = Bench(FakeExecutor(slots=slots, fault=13))
    good = bench.submit([1] * 8)
    bench.step()
    bench.engine.step()
    replies = [bench.submit([13] * 8), *(bench.submit([n] * 8) for n in range(6))]

    bench.run_all()

    assert good.only == [[8]]
    message = "the model has stopped after a fault of its device or workers and cannot run requests; reload it"
    assert all(
        str(reply.only) == message or reply.only == [[8 * n]] for n, reply in enumerate(replies, -1)
    )
    assert str(replies[0].only) == message
    assert not bench.engine.is_ready
    with pytest.raises(ModelFaultError, match="cannot run requests; reload it"):
        bench.submit([1])
    assert bench.admission.depth == (0, 0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(
            ROWS,
            st.lists(st.booleans(), max_size=2),
            st.sampled_from([None, "is_cancelled", "send", "finish", "fail"]),
        ),
        max_size=25,
    ),
    slots=SLOTS,
    policy=POLICIES,
    fails=st.sampled_from([None, *FAILURES]),
    fault=st.sampled_from([None, 12]),
)
def test_the_thread_answers_each_request_once_whatever_fails(
    started, requests, slots, policy, fails, fault
):
    executor = ThreadedExecutor(poison=13, slots=slots, fault=fault)
    scheduler = failing_scheduler(fails, slots=slots, policy=policy)
    bench = started(Bench(executor, scheduler=scheduler))
    replies = []
    for rows, cancelled, raises in requests:
        reply = FakeReply(cancelled=cancelled, raises=(raises,))
        try:
            replies.append(bench.submit(*rows, reply=reply))
        except ModelFaultError:
            assert fault

    close_in_time(bench.engine)

    # finish() may have raised; then no other method is called
    assert all(len(reply.answers) == 1 for reply in replies)
    assert bench.admission.depth == (0, 0)


def test_an_expired_request_is_answered_as_soon_as_something_happens():
    """It does not wait for its turn: other requests need its place in the queue."""
    bench = Bench(FakeExecutor())
    bench.submit([1] * 8)
    bench.engine.step()
    late = [bench.submit([2] * 8, deadline_seconds=1e6) for _ in range(500)]
    bench.engine.step()
    bench.clock.now += 2e6
    waits = bench.submit([3])

    bench.engine.step()

    assert all(isinstance(reply.only, DeadlineError) for reply in late)
    assert bench.admission.depth == (1, 1)
    bench.run_all()
    assert waits.only == [[3]]
    assert bench.executor.batches == [[[1] * 8], [[3]]]


def test_a_request_that_runs_when_its_deadline_passes_gets_its_answer():
    bench = Bench()
    reply = bench.submit([1] * 8, deadline_seconds=1e6)
    bench.engine.step()
    bench.clock.now += 2e6
    bench.engine.step()

    bench.run_all()

    assert reply.only == [[8]]


def test_answered_and_refused_requests_are_not_kept_alive():
    """Replies hold outputs, and each output may be a view of a whole batch."""
    bench = Bench(FakeExecutor(fault=13))
    replies = []
    gc.disable()
    try:
        for number in range(10):
            reply = FakeReply()
            replies.append(weakref.ref(reply))
            bench.submit([number], reply=reply, deadline_seconds=1e6)
        bench.run_all()
        bench.submit([13])
        bench.run_all()
        for _ in range(10):
            reply = FakeReply()
            replies.append(weakref.ref(reply))
            with contextlib.suppress(ModelFaultError):
                bench.submit([1], reply=reply)
        del reply
        assert [each() for each in replies] == [None] * 20
    finally:
        gc.enable()
