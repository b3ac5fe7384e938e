"""Every submitted request is answered exactly once, on every path, and what waits is counted right.

By hand (`step`) on a virtual clock where order matters, with the engine's own thread where closing does.
"""

import time
from collections import deque
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from varlen.config import EngineConfig
from varlen.costs.model import CostModel
from varlen.engine import Engine
from varlen.errors import (
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    VarlenError,
)
from varlen.metrics import Stats
from varlen.request import Prompt, Request, RequestOptions
from varlen.scheduling.admission import Admission
from varlen.scheduling.scheduler import Scheduler

SECONDS = 10.0


def request(*rows, normalize=False):
    """Return a request whose rows hold these token ids."""
    sequences = tuple(Prompt(np.array(row, dtype=np.int32)) for row in rows)
    return Request(sequences, RequestOptions(normalize=normalize))


class FakeModel:
    """Answers the sum of a sequence's ids; fails where it is told to, and where a batch has more tokens than fit."""

    def __init__(self, poison=None, answers_missing=0, fits=10_000):
        self.poison = poison
        self.fits = fits
        self.answers_missing = answers_missing
        self.batches = []
        self.normalize = []
        self.gate = Event()
        self.gate.set()
        self.running = Event()

    def run(self, sequences, options):
        self.running.set()
        assert self.gate.wait(SECONDS)
        self.batches.append([sequence.token_ids.tolist() for sequence in sequences])
        self.normalize.append([each.normalize for each in options])
        if sum(sequence.num_tokens for sequence in sequences) > self.fits:
            raise MemoryError("too little memory on the host")
        if any(self.poison in sequence.token_ids for sequence in sequences):
            raise ZeroDivisionError("poison")
        answers = [np.array([s.token_ids.sum()], dtype=np.float32) for s in sequences]
        return answers[: len(answers) - self.answers_missing]


class FakeReply:
    """Keeps every answer it is given; may claim to be cancelled, or raise."""

    def __init__(self, cancelled=(), raises=()):
        self.answers = []
        self.answered = Event()
        self.asked = 0
        self._cancelled = deque(cancelled)
        self._raises = raises

    def is_cancelled(self):
        assert not self.answers, "asked after the answer"
        self.asked += 1
        if "is_cancelled" in self._raises:
            raise OSError("is_cancelled")
        return self._cancelled.popleft() if self._cancelled else False

    def succeed(self, rows):
        self._take("succeed", [row.tolist() for row in rows])

    def fail(self, error):
        self._take("fail", error)

    def _take(self, how, answer):
        self.answers.append(answer)
        self.answered.set()
        if how in self._raises:
            raise OSError(how)

    @property
    def only(self):
        assert len(self.answers) == 1, self.answers
        return self.answers[0]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_scheduler(budget=8, kind=Scheduler, **settings):
    """Return a scheduler of batches to `budget` tokens; in order of arrival unless the settings name a policy."""
    costs = CostModel.of_function(
        lambda n, length: 1.0 + n * length, "packed", max_sequences=8, max_length=16
    )
    return kind(EngineConfig(**{"policy": "token_budget", **settings}), costs, budget)


class Bench:
    """An engine and what it stands on."""

    def __init__(self, budget=8, max_requests=1000, max_tokens=10_000, model=None, scheduler=None):
        self.model = model or FakeModel()
        self.admission = Admission(max_requests, max_tokens)
        self.stats = Stats()
        self.clock = Clock()
        self.engine = Engine(
            self.model,
            scheduler or make_scheduler(budget),
            self.admission,
            self.stats,
            self.clock,
        )

    def submit(self, *rows, reply=None, normalize=False):
        reply = reply or FakeReply()
        self.engine.submit(request(*rows, normalize=normalize), reply)
        return reply

    def run_all(self):
        while (start := self.engine.step()) is not None:
            self.clock.now = max(self.clock.now, start)


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
        bench.model.gate.set()
        if bench.engine.is_alive():
            close_in_time(bench.engine)


def close_in_time(engine):
    closer = Thread(target=engine.close, daemon=True)
    closer.start()
    closer.join(SECONDS)
    assert not closer.is_alive(), "close() hangs"
    assert not engine.is_alive()


def wait_for(replies):
    for index, reply in enumerate(replies):
        assert reply.answered.wait(SECONDS), f"request {index} was never answered"


def test_a_step_without_requests_does_nothing(bench):
    assert bench.engine.step() is None
    assert bench.model.batches == []


def test_rows_come_back_in_the_request_s_order(bench):
    reply = bench.submit([1], [2, 2], [3])

    assert bench.engine.step() is None
    assert reply.only == [[1], [4], [3]]


def test_requests_share_a_batch_in_order_of_arrival(bench):
    replies = [bench.submit([1, 1]), bench.submit([2], [3]), bench.submit([4])]

    bench.engine.step()

    assert bench.model.batches == [[[1, 1], [2], [3], [4]]]
    assert [reply.only for reply in replies] == [[[2]], [[2], [3]], [[4]]]


def test_normalize_travels_with_its_sequences(bench):
    bench.submit([1], [2], normalize=True)
    bench.submit([3])

    bench.engine.step()

    assert bench.model.normalize == [[True, True, False]]


def test_a_request_over_several_batches_is_answered_with_its_last(bench):
    reply = bench.submit([1] * 5, [2] * 5, [3] * 5)

    assert bench.engine.step() == bench.clock.now
    assert bench.engine.step() == bench.clock.now
    assert reply.answers == []
    assert bench.engine.step() is None
    assert reply.only == [[5], [10], [15]]


def test_requests_that_come_between_steps_join_the_queue(bench):
    first = bench.submit([1] * 8)
    bench.engine.step()
    second = bench.submit([2])
    bench.engine.step()

    assert (first.only, second.only) == ([[8]], [[2]])


def test_a_request_waits_until_its_last_sequence_is_taken(bench):
    bench.submit([1] * 5, [2] * 5)
    assert bench.admission.depth == (1, 10)

    bench.engine.step()
    assert bench.admission.depth == (1, 5)
    bench.engine.step()
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
    bench = Bench(model=FakeModel(poison=13))
    good = bench.submit([1] * 8)
    bad, company = bench.submit([13]), bench.submit([2])
    later = bench.submit([3] * 8)

    bench.run_all()

    assert good.only == [[8]]
    assert isinstance(bad.only, EngineError)
    assert isinstance(company.only, EngineError)
    assert later.only == [[24]]
    assert bench.admission.depth == (0, 0)


def test_a_failure_tells_the_caller_no_details():
    bench = Bench(model=FakeModel(poison=13))
    reply = bench.submit([13])

    bench.engine.step()

    message = "the model failed on the batch that held this request; the server's log says why"
    assert str(reply.only) == message


def test_a_part_that_fails_fails_its_request_once_and_the_rest_is_dropped():
    bench = Bench(model=FakeModel(poison=13))
    reply = bench.submit([1] * 8, [13] * 8, [2] * 8, [3] * 8)
    after = bench.submit([5])

    bench.run_all()

    assert isinstance(reply.only, EngineError)
    assert after.only == [[5]]
    # what was queued of it behind the failure did not run
    assert [len(batch[0]) for batch in bench.model.batches] == [8, 8, 1]
    assert bench.admission.depth == (0, 0)


def test_a_request_whose_first_part_failed_never_succeeds_with_its_second():
    bench = Bench(model=FakeModel(poison=13))
    reply = bench.submit([13] * 8, [1] * 8)

    bench.run_all()

    assert isinstance(reply.only, EngineError)


def test_a_batch_that_finds_no_memory_runs_in_halves():
    bench = Bench(model=FakeModel(fits=3))
    replies = [bench.submit([n], [n, n]) for n in range(2)]

    bench.run_all()

    assert [reply.only for reply in replies] == [[[0], [0]], [[1], [2]]]
    assert bench.model.batches == [
        [[0], [0, 0], [1], [1, 1]],
        [[0], [0, 0]],
        [[1], [1, 1]],
    ]
    drained = bench.stats.drain()
    assert drained.counts["varlen_split_batches_total"] == 1
    assert drained.counts["varlen_sequences_total"] == 4
    assert list(drained.observed["varlen_batch_sequences"]) == [4]


def test_a_sequence_that_finds_no_memory_alone_fails_its_request_only():
    bench = Bench(model=FakeModel(fits=3))
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
    assert [[3]] not in bench.model.batches
    assert bench.admission.depth == (0, 0)


def test_a_half_that_fails_otherwise_fails_its_requests_only():
    bench = Bench(model=FakeModel(poison=13, fits=2))
    replies = [bench.submit([1, 1]), bench.submit([13, 1])]

    bench.run_all()

    assert replies[0].only == [[2]]
    assert str(replies[1].only).startswith("the model failed on the batch")


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_model_that_answers_too_few_leaves_nobody_waiting(started, missing):
    bench = started(Bench(model=FakeModel(answers_missing=missing)))
    bench.model.gate.clear()
    first = bench.submit([9])
    assert bench.model.running.wait(SECONDS)
    replies = [first, *(bench.submit([n]) for n in range(3))]

    bench.model.gate.set()

    wait_for(replies)
    close_in_time(bench.engine)
    assert all(len(reply.answers) == 1 for reply in replies)


def test_a_cancelled_request_does_not_run(bench):
    gone, waits = bench.submit([1], reply=FakeReply(cancelled=[True])), bench.submit([2])

    bench.engine.step()

    assert isinstance(gone.only, RequestCancelled)
    assert str(gone.only) == "cancelled before it ran"
    assert bench.model.batches == [[[2]]]
    assert waits.only == [[2]]


def test_a_batch_of_cancelled_requests_makes_room_for_the_next(bench):
    gone = [bench.submit([1] * 8, reply=FakeReply(cancelled=[True])) for _ in range(3)]
    waits = bench.submit([2])

    bench.engine.step()

    assert all(isinstance(reply.only, RequestCancelled) for reply in gone)
    assert waits.only == [[2]]
    assert bench.admission.depth == (0, 0)


def test_a_request_cancelled_between_its_batches_stops_there(bench):
    reply = bench.submit([1] * 8, [2] * 8, [3] * 8, reply=FakeReply(cancelled=[False, True]))

    bench.run_all()

    assert isinstance(reply.only, RequestCancelled)
    assert bench.model.batches == [[[1] * 8]]
    assert reply.asked == 2
    assert bench.admission.depth == (0, 0)


def test_cancellation_is_asked_once_a_batch(bench):
    reply = bench.submit([1], [2], [3])

    bench.engine.step()

    assert reply.asked == 1


def test_the_wait_is_measured_to_the_first_batch(bench):
    bench.submit([1] * 8, [2] * 8)
    bench.clock.now += 2.5
    bench.engine.step()
    bench.clock.now += 4.0
    bench.engine.step()

    drained = bench.stats.drain()
    assert list(drained.observed["varlen_queue_wait_seconds"]) == [2.5]
    assert list(drained.observed["varlen_batch_tokens"]) == [8, 8]
    assert drained.counts["varlen_sequences_total"] == 2
    assert drained.counts["varlen_tokens_total"] == 16
    assert drained.counts["varlen_padding_tokens_total"] == 0


def test_nothing_is_accepted_after_close(started):
    bench = started(Bench())
    close_in_time(bench.engine)

    with pytest.raises(EngineError, match="being unloaded"):
        bench.submit([1])
    assert bench.admission.depth == (0, 0)


def test_closing_twice_is_harmless(started):
    bench = started(Bench())

    close_in_time(bench.engine)
    close_in_time(bench.engine)


def test_closing_an_engine_that_never_started_returns(bench):
    bench.engine.close()

    assert not bench.engine.is_alive()


def test_close_runs_what_is_queued(started):
    bench = Bench()
    bench.model.gate.clear()
    replies = [bench.submit([n] * 3, [n] * 4) for n in range(20)]
    started(bench)
    assert bench.model.running.wait(SECONDS)
    replies += [bench.submit([n]) for n in range(20)]
    closer = Thread(target=bench.engine.close, daemon=True)
    closer.start()
    bench.model.gate.set()
    closer.join(SECONDS)

    assert not closer.is_alive(), "close() hangs"
    assert [reply.only for reply in replies[:20]] == [[[3 * n], [4 * n]] for n in range(20)]
    assert [reply.only for reply in replies[20:]] == [[[n]] for n in range(20)]
    assert bench.admission.depth == (0, 0)


def test_close_right_after_submit_loses_nothing(started):
    # the sentinel of close() may be met at any point of the loop
    for _ in range(50):
        bench = started(Bench())
        replies = [bench.submit([n]) for n in range(3)]

        close_in_time(bench.engine)

        assert [reply.only for reply in replies] == [[[0]], [[1]], [[2]]]


def test_close_while_others_submit_answers_or_refuses_each(started):
    bench = started(Bench(budget=3))
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


class FailingScheduler(Scheduler):
    """Raises when it is first asked for a batch, before or after it has taken one."""

    when = None

    def take(self, now):
        when, self.when = self.when, None
        if when == "before":
            raise KeyError("scheduler")
        taken = super().take(now)
        if when == "after":
            raise KeyError("scheduler")
        return taken


def failing_scheduler(when):
    scheduler = make_scheduler(9, kind=FailingScheduler)
    scheduler.when = when
    return scheduler


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_that_fails_fails_what_waits_and_the_engine_goes_on(started, when):
    bench = Bench(scheduler=failing_scheduler(when))
    replies = [bench.submit([1] * 5, [1] * 5), bench.submit([2] * 5), bench.submit([3] * 5)]
    started(bench)

    wait_for(replies)
    assert all(isinstance(reply.only, EngineError) for reply in replies)
    later = bench.submit([4])
    wait_for([later])
    assert later.only == [[4]]
    assert bench.admission.depth == (0, 0)


@pytest.mark.parametrize(
    "method, poison", [("is_cancelled", None), ("succeed", None), ("fail", 13)]
)
def test_a_reply_that_raises_harms_no_other_request_and_not_the_engine(started, method, poison):
    bench = Bench(model=FakeModel(poison=poison))
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
    assert bench.engine.is_alive()
    assert bench.admission.depth == (0, 0)


def test_a_reply_that_fails_to_say_whether_it_is_cancelled_is_answered(started):
    bench = Bench()
    broken = bench.submit([1], reply=FakeReply(raises=("is_cancelled",)))
    started(bench)

    wait_for([broken])
    assert len(broken.answers) == 1


def test_the_thread_survives_a_reply_that_raises_while_the_queue_is_failed(started):
    bench = Bench(scheduler=failing_scheduler("before"))
    replies = [bench.submit([1], reply=FakeReply(raises=("fail",))), bench.submit([2])]
    started(bench)

    wait_for(replies)
    later = bench.submit([3])
    wait_for([later])
    assert later.only == [[3]]


ROWS = st.lists(st.lists(st.integers(0, 13), min_size=1, max_size=9), min_size=1, max_size=4)
POLICIES = st.sampled_from(["none", "fifo", "token_budget", "dp"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), ROWS, st.lists(st.booleans(), max_size=3)),
        st.tuples(st.just("step"), st.none(), st.none()),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=150)
@given(
    actions=ACTIONS,
    budget=st.integers(9, 20),
    max_requests=st.integers(1, 6),
    max_tokens=st.integers(10, 60),
    fits=st.integers(4, 30),
    policy=POLICIES,
    trigger=st.sampled_from(["hungry", "lazy"]),
)
def test_any_order_of_events_answers_each_request_once(
    actions, budget, max_requests, max_tokens, fits, policy, trigger
):
    bench = Bench(
        max_requests=max_requests,
        max_tokens=max_tokens,
        model=FakeModel(poison=13, fits=fits),
        scheduler=make_scheduler(budget, policy=policy, trigger=trigger),
    )
    accepted, refused = [], []
    for action, rows, cancelled in actions:
        if action == "step":
            bench.engine.step()
            continue
        reply = FakeReply(cancelled=cancelled)
        try:
            bench.submit(*rows, reply=reply)
            accepted.append((rows, reply))
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
    assert all(len(batch) == 1 or sum(map(len, batch)) <= budget for batch in bench.model.batches)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.lists(
        st.tuples(
            ROWS, st.lists(st.booleans(), max_size=2), st.sampled_from([None, "is_cancelled"])
        ),
        max_size=25,
    ),
    budget=st.integers(9, 20),
    policy=POLICIES,
    fails=st.sampled_from([None, "before", "after"]),
)
def test_the_thread_answers_each_request_once_whatever_fails(
    started, requests, budget, policy, fails
):
    scheduler = failing_scheduler(fails) if fails else make_scheduler(budget, policy=policy)
    bench = started(Bench(model=FakeModel(poison=13), scheduler=scheduler))
    replies = []
    for rows, cancelled, raises in requests:
        reply = FakeReply(cancelled=cancelled, raises=(raises,))
        replies.append(bench.submit(*rows, reply=reply))

    close_in_time(bench.engine)

    assert all(len(reply.answers) == 1 for reply in replies)
    assert bench.admission.depth == (0, 0)
