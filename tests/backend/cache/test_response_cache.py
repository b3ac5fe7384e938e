"""The response cache: entries that it keeps, and runs that equal requests share.

Most tests use a virtual clock and a fake engine driven by hand; the last ones use many threads.
"""

import gc
import math
import random
import tracemalloc
import weakref
from collections import Counter, OrderedDict
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.fakes.engine_parts import Clock, FakeReply
from tests.backend.requests import prompt_of, request_of
from tests.threads import run_in_threads
from varlen.cache.response_cache import ENTRY_BYTES, CacheUse, JoinLimits, ResponseCache
from varlen.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    VarlenError,
)
from varlen.request.request import Prompt, Request, Vectors

SECONDS = 10.0
WIDTH = 4
# bytes of one entry of the fake engine
SIZE = 4 * WIDTH + ENTRY_BYTES
ANY = JoinLimits(max_flight_tokens=1000, max_requests=1000, max_tokens=100_000)


def answer(sequence, normalize, run=0):
    """Return the engine's answer, which identifies the inputs and the run."""
    kind = -1 if sequence.type_ids is None else sequence.type_ids.sum()
    values = [sequence.token_ids.sum(), kind, normalize, run]
    return np.array(values, dtype=np.float32)


def succeed(reply, rows):
    """Answer like the engine: a part that cannot be sent fails the request."""
    try:
        for row, output in enumerate(rows):
            reply.send(row, output)
    except Exception:
        reply.fail(EngineError("the answer could not be delivered; the server's log says why"))
    else:
        reply.finish()


class FakeEngine:
    """An engine that holds requests until a test runs or fails them."""

    def __init__(self):
        self.refusal = None
        self.flights = []
        self.runs = 0
        self.on_submit = lambda: None

    def submit(self, request, reply):
        refusal, self.refusal = self.refusal, None
        self.on_submit()
        if refusal is not None:
            raise refusal
        self.flights.append((request, reply))

    @property
    def waiting(self):
        """Token ids of the waiting requests, by flight."""
        return [[s.token_ids.tolist() for s in request.prompts] for request, _ in self.flights]

    def run(self, index=0):
        """Answer a request like the engine, unless it is cancelled."""
        request, reply = self.flights.pop(index)
        if reply.is_cancelled():
            reply.fail(RequestCancelled("cancelled before it ran"))
            return
        rows = []
        for sequence in request.prompts:
            self.runs += 1
            rows.append(answer(sequence, request.options.normalize, self.runs))
        succeed(reply, rows)

    def run_all(self):
        while self.flights:
            self.run()

    def fail(self, error, index=0):
        _, reply = self.flights.pop(index)
        reply.fail(error)


class CacheReply(FakeReply):
    """A reply that fails unless rows arrive in order; see `answer` for their contents."""

    def send(self, row, output):
        assert row == len(self.outputs), "rows in order"
        super().send(row, output)

    @property
    def sums(self):
        """The first value of each row, which is the sum of its ids."""
        assert isinstance(self.only, list), self.only
        return [row[0] for row in self.only]

    @property
    def runs(self):
        """The run that produced each row."""
        return [row[3] for row in self.only]


class Bench:
    """A cache and its parts."""

    def __init__(self, entries=100, joins=ANY, **limits):
        self.engine = FakeEngine()
        self.clock = Clock()
        limits = {"max_bytes": entries * SIZE} | limits
        self.cache = ResponseCache(self.engine.submit, joins, self.clock, **limits)

    def ask(self, *rows, reply=None, **given):
        reply = reply or CacheReply()
        self.cache.submit(request_of(*rows, **given), reply)
        return reply

    def get(self, *rows, **given):
        """Submit a request, run the engine as needed, and return the reply."""
        reply = self.ask(*rows, **given)
        self.engine.run_all()
        return reply

    def is_idle(self):
        return holds_nothing(self.cache)

    def seconds_left(self):
        """Return the time until the deadline of each request in the engine."""
        now = self.clock.now
        return [request.deadline(now) - now for request, _ in self.engine.flights]


def holds_nothing(cache):
    """Return whether no state of answered requests is left."""
    flights = cache._flights
    return (flights._by_key, flights._followers, flights._follower_tokens) == ({}, 0, 0)


@pytest.fixture
def bench():
    return Bench()


# Entries


def test_an_answer_is_given_again_without_running(bench):
    first = bench.get([1, 2], [3])
    second = bench.ask([1, 2], [3])

    assert first.sums == second.sums == [3, 3]
    assert first.runs == second.runs == [1, 2]
    assert bench.engine.runs == 2


def test_a_request_that_is_known_in_part_runs_the_rest_in_its_order(bench):
    bench.get(7)
    reply = bench.ask(5, 7, 6)

    assert bench.engine.waiting == [[[5], [6]]]
    assert reply.answers == []
    bench.engine.run()
    assert reply.sums == [5, 7, 6]
    assert bench.cache.use() == CacheUse(3 * SIZE, 3, hits=1, misses=3)


def test_what_the_engine_sees_is_the_request_itself_where_nothing_is_known(bench):
    bench.ask([1, 2], [3], normalize=True, priority=4, deadline_seconds=2.0)

    [(seen, _)] = bench.engine.flights
    assert [s.token_ids.tolist() for s in seen.prompts] == [[1, 2], [3]]
    assert (seen.options.normalize, seen.options.priority, seen.options.deadline_seconds) == (
        True,
        4,
        2.0,
    )


@pytest.mark.parametrize(
    "one, other",
    [
        (([1, 2],), ([2, 1],)),
        (([1],), ([1, 0],)),
        (([1, 2], [3]), ([1], [2, 3])),
    ],
)
def test_other_tokens_are_another_answer(bench, one, other):
    bench.get(*one)
    before = bench.engine.runs

    bench.get(*other)

    assert bench.engine.runs == before + len(other)


def test_ids_do_not_run_on_in_types(bench):
    bench.get([1, 1])
    bench.get([1], types=[1])

    assert bench.engine.runs == 2


def test_all_that_the_answer_depends_on_tells_keys_apart(bench):
    variants = [
        {},
        {"normalize": True},
        {"types": [0, 1]},
        {"types": [1, 0]},
        {"types": [1, 1], "normalize": True},
    ]
    for variant in variants:
        bench.get([5, 6], **variant)

    assert bench.engine.runs == len(variants)
    for run, variant in enumerate(variants, start=1):
        assert bench.get([5, 6], **variant).runs == [run]


def test_tokens_that_are_read_and_vectors_that_are_returned_tell_keys_apart(bench):
    ids = np.array([5, 6], dtype=np.int32)
    places = [None, *(np.array(kept, dtype=np.int32) for kept in ([], [0], [1]))]
    payloads = [Vectors(kept, num_keys) for num_keys in (1, 2) for kept in places]
    requests = [Request((Prompt(ids, payload=payload),)) for payload in payloads]
    for request in requests * 2:
        bench.cache.submit(request, CacheReply())
        bench.engine.run_all()

    assert bench.engine.runs == len(requests)


def test_requests_share_answers_only_with_requests_of_their_salt(bench):
    salts = ["", "a", "b", "\0", "\ud800"]
    runs = {salt: bench.get([5, 6], [5, 6], cache_salt=salt).runs for salt in salts}

    assert runs == {salt: [run, run] for run, salt in enumerate(salts, start=1)}
    assert {salt: bench.get([5, 6], [5, 6], cache_salt=salt).runs for salt in salts} == runs


def test_a_request_does_not_join_an_equal_one_of_another_salt(bench):
    bench.ask([5, 6], cache_salt="a")
    bench.ask([5, 6], cache_salt="b")

    assert len(bench.engine.flights) == 2


def test_types_of_zero_are_no_types(bench):
    bench.get([5, 6])

    assert bench.get([5, 6], types=[0, 0]).runs == [1]


def test_what_the_answer_does_not_depend_on_is_not_in_the_key(bench):
    bench.get([5, 6])

    assert bench.get([5, 6], priority=9, deadline_seconds=0.001).runs == [1]


def test_a_slice_of_ids_has_the_key_of_its_copy(bench):
    bench.get([1, 2, 3])
    every_other = Prompt(np.array([1, 0, 2, 0, 3], dtype=np.int32)[::2])
    reply = CacheReply()

    bench.cache.submit(Request((every_other,)), reply)

    assert reply.runs == [1]


def test_kept_answers_are_read_only(bench):
    for reply in (bench.get(1), bench.ask(1)):
        [array] = reply.outputs[0]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    assert bench.ask(1).sums == [1]


def test_what_the_engine_does_to_its_arrays_later_does_not_show(bench):
    reply = bench.ask(1)
    _, flight = bench.engine.flights.pop()
    batch = np.ones((8, WIDTH), dtype=np.float32)

    succeed(flight, [batch[0]])
    batch[:] = 7

    assert reply.only == bench.ask(1).only == [[1] * WIDTH]


def test_answers_of_two_dimensions_keep_their_shape(bench):
    reply = bench.ask(1)
    _, flight = bench.engine.flights.pop()
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)

    succeed(flight, [rows.T])

    for found in (reply, bench.ask(1)):
        np.testing.assert_array_equal(found.only[0], rows.T)


def test_the_least_recently_used_goes_first():
    bench = Bench(entries=2)
    bench.get(1)
    bench.get(2)
    bench.get(1)
    bench.get(3)

    assert bench.get(1).runs == [1]
    assert bench.get(2).runs == [4]
    assert bench.cache.use().evictions == 2


def test_an_answer_larger_than_the_cache_is_given_and_not_kept():
    bench = Bench(max_bytes=SIZE - 1)

    assert bench.get(1).runs == [1]
    assert bench.get(1).runs == [2]
    assert bench.cache.use() == CacheUse(misses=2)


def test_an_answer_is_given_until_it_is_too_old():
    bench = Bench(max_seconds=60.0)
    bench.get(1)
    bench.clock.now += 59.0
    assert bench.get(1).runs == [1]
    # a hit does not extend its age limit
    bench.clock.now += 2.0
    assert bench.get(1).runs == [2]
    assert bench.cache.use() == CacheUse(SIZE, 1, hits=1, misses=2, evictions=1)


@pytest.mark.parametrize("count, width", [(1000, 1), (1400, 1), (3000, 384), (6_000, 1)])
def test_the_bytes_that_are_counted_are_enough(count, width):
    class Instant:
        def submit(self, request, reply):
            succeed(reply, [np.zeros(width, dtype=np.float32) for _ in request.prompts])

    cache = ResponseCache(Instant().submit, ANY, Clock(), max_bytes=2**40)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        cache.submit(request_of(number), CacheReply())
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    held = cache.use().held_bytes
    assert held == count * (4 * width + ENTRY_BYTES)
    assert held / 2 < taken <= held


TEXTS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.lists(TEXTS, min_size=1, max_size=5)),
        st.tuples(st.just("wait"), st.integers(1, 30)),
    ),
    max_size=60,
)


class Model:
    """Model of the cache for comparison: a dict in order of use."""

    def __init__(self, entries, max_seconds):
        self.entries, self.max_seconds = entries, max_seconds
        self.kept = OrderedDict()
        self.runs = 0

    def get(self, texts, now):
        found = {}
        for text in texts:
            run, since = self.kept.get(text, (None, None))
            if run is not None and now - since > self.max_seconds:
                del self.kept[text]
                run = None
            if run is not None:
                self.kept.move_to_end(text)
                found[text] = run
        for text in dict.fromkeys(texts):
            if text not in found:
                self.runs += 1
                found[text] = self.runs
                while len(self.kept) >= self.entries:
                    self.kept.popitem(last=False)
                self.kept[text] = (self.runs, now)
        return [found[text] for text in texts]


@settings(max_examples=300)
@given(STEPS, st.integers(1, 8), st.sampled_from([20.0, float("inf")]))
def test_it_keeps_what_a_plain_dict_in_order_of_use_would(steps, entries, max_seconds):
    bench = Bench(entries, max_seconds=max_seconds)
    model = Model(entries, max_seconds)
    rows = 0
    for action, what in steps:
        if action == "wait":
            bench.clock.now += what
            continue
        rows += len(what)

        assert bench.get(*what).runs == model.get(what, bench.clock.now)

        use = bench.cache.use()
        assert use.entries == len(model.kept)
        assert use.held_bytes == use.entries * SIZE <= entries * SIZE
        assert use.misses == model.runs
        assert use.hits + use.misses + use.joined == rows
    assert bench.is_idle()


# Sharing


def test_equal_sequences_of_one_request_run_once(bench):
    reply = bench.ask([1, 2], [3], [1, 2])

    assert bench.engine.waiting == [[[1, 2], [3]]]
    bench.engine.run()
    assert reply.runs == [1, 2, 1]
    assert bench.cache.use() == CacheUse(2 * SIZE, 2, joined=1, misses=2)


def test_a_request_waits_for_its_equal_that_came_before(bench):
    first, second = bench.ask(1, 2), bench.ask(2, 3)

    assert bench.engine.waiting == [[[1], [2]], [[3]]]
    bench.engine.run(1)
    assert second.answers == []
    bench.engine.run()
    assert (first.runs, second.runs) == ([2, 3], [3, 1])
    assert bench.is_idle()


def test_a_request_that_comes_after_the_answer_joins_nothing(bench):
    bench.get(1)
    bench.ask(1)

    assert bench.cache.use().joined == 0


@pytest.mark.parametrize(
    "leader, follower, joins",
    [
        ({}, {}, True),
        ({"priority": 3}, {"priority": 3}, True),
        ({"priority": 3}, {"priority": 2}, True),
        ({"priority": 2}, {"priority": 3}, False),
        ({"deadline_seconds": 1.0}, {}, True),
        ({}, {"deadline_seconds": 1.0}, False),
        ({"deadline_seconds": 1.0}, {"deadline_seconds": 1.0}, True),
        ({"deadline_seconds": 1.0}, {"deadline_seconds": 0.5}, False),
        ({"deadline_seconds": 1.0, "priority": 1}, {"priority": 2}, False),
        ({"priority": 2}, {"deadline_seconds": 1.0, "priority": 1}, False),
    ],
)
def test_a_more_urgent_request_does_not_join_a_less_urgent_one(bench, leader, follower, joins):
    first = bench.ask(1, **leader)
    bench.clock.now += 0.1
    second = bench.ask(1, **follower)

    assert len(bench.engine.flights) == (1 if joins else 2)
    bench.engine.run(-1)
    assert second.sums == [1]
    assert len(first.answers) == (1 if joins else 0)
    bench.engine.run_all()
    assert first.sums == [1]
    assert bench.is_idle()


def test_later_requests_join_the_one_that_is_more_urgent(bench):
    slow, fast = bench.ask(1), bench.ask(1, priority=5)
    third = bench.ask(1, priority=4)

    assert len(bench.engine.flights) == 2
    bench.engine.run(1)
    assert fast.runs == third.runs == [1]
    bench.engine.run()
    assert slow.runs == [2]


def test_a_request_of_more_than_a_batch_is_not_joined():
    bench = Bench(joins=JoinLimits(3, 1000, 1000))
    bulk = bench.ask([1], [2, 2], [3])
    small = bench.ask([1])

    assert bench.engine.waiting == [[[1], [2, 2], [3]], [[1]]]
    bench.engine.run(1)
    assert small.sums == [1]
    bench.engine.run()
    assert bulk.sums == [1, 4, 3]


def test_a_single_sequence_is_joined_however_long():
    bench = Bench(joins=JoinLimits(3, 1000, 1000))
    bench.ask([1] * 10)
    bench.ask([1] * 10)

    assert len(bench.engine.flights) == 1


@pytest.mark.parametrize("joins", [JoinLimits(1000, 2, 1000), JoinLimits(1000, 1000, 4)])
def test_the_number_of_joined_requests_is_limited(joins):
    bench = Bench(joins=joins)
    replies = [bench.ask([1, 1]) for _ in range(4)]

    assert len(bench.engine.flights) == 2
    bench.engine.run()
    assert [len(reply.answers) for reply in replies] == [1, 1, 1, 0]
    bench.engine.run()
    assert bench.is_idle()
    # others may join again
    bench.ask([2, 2])
    bench.ask([2, 2])
    assert len(bench.engine.flights) == 1


# Followers and their leaders


def test_followers_of_a_refused_leader_restart(bench):
    followers = []

    def join():
        # during the engine's `submit`
        bench.engine.on_submit = lambda: None
        followers.extend([bench.ask(1), bench.ask(1, 3)])

    bench.engine.on_submit = join
    bench.engine.refusal = QueueFullError("full")
    leader = CacheReply()

    with pytest.raises(QueueFullError):
        bench.ask(1, 2, reply=leader)

    assert leader.answers == []
    bench.engine.run_all()
    assert [reply.sums for reply in followers] == [[1], [1, 3]]
    assert leader.answers == []
    assert bench.is_idle()
    # a sequence counts once, even if it restarts
    use = bench.cache.use()
    assert (use.hits, use.joined, use.misses) == (0, 2, 3)


def test_followers_of_a_refused_restart_restart_too(bench):
    bench.ask(1)
    early, late = bench.ask(1), CacheReply()

    def join():
        bench.engine.on_submit = lambda: None
        bench.ask(1, reply=late)

    bench.engine.on_submit = join
    bench.engine.refusal = QueueFullError("full")
    bench.engine.fail(DeadlineError("late"))

    assert isinstance(early.only, QueueFullError)
    bench.engine.run()
    assert late.sums == [1]
    assert bench.is_idle()


def test_a_follower_whose_restart_is_refused_fails(bench):
    followers = []

    def join():
        bench.engine.on_submit = refuse_next
        followers.extend([bench.ask(1), bench.ask(1)])

    def refuse_next():
        bench.engine.on_submit = lambda: None
        raise QueueFullError("still full")

    bench.engine.on_submit = join
    bench.engine.refusal = RequestError("too large")

    with pytest.raises(RequestError):
        bench.ask(1, 2)

    assert isinstance(followers[0].only, QueueFullError)
    bench.engine.run()
    assert followers[1].sums == [1]
    assert bench.is_idle()


def test_a_refused_request_no_longer_waits_for_what_it_joined(bench):
    leader = bench.ask(1)
    bench.engine.refusal = QueueFullError("full")
    refused = CacheReply()

    with pytest.raises(QueueFullError):
        bench.ask(1, 2, reply=refused)
    bench.engine.run()

    assert leader.sums == [1]
    assert refused.answers == []
    assert bench.is_idle()


def test_a_refused_request_is_freed_while_what_it_joined_runs(bench):
    bench.ask(1)
    bench.engine.refusal = QueueFullError("full")
    refused = CacheReply()
    kept = weakref.ref(refused)

    with pytest.raises(QueueFullError):
        bench.ask(1, 2, reply=refused)

    del refused
    gc.collect()
    assert kept() is None


def test_a_request_answered_while_it_is_refused_is_answered_once(bench):
    bench.ask(1)
    bench.engine.on_submit = lambda: bench.engine.fail(EngineError("the batch failed"))
    bench.engine.refusal = QueueFullError("full")

    reply = bench.ask(1, 2)

    assert isinstance(reply.only, EngineError)
    assert bench.is_idle()


def test_a_flight_is_cancelled_once_all_its_requests_are(bench):
    leader, follower = bench.ask(1, 2), bench.ask(2)
    [(_, flight)] = bench.engine.flights

    leader.cancelled = True
    assert not flight.is_cancelled()
    follower.cancelled = True
    assert flight.is_cancelled()
    bench.engine.run()
    assert isinstance(leader.only, RequestCancelled)
    assert isinstance(follower.only, RequestCancelled)
    assert bench.engine.flights == []
    assert bench.is_idle()


def test_a_follower_gets_its_answer_when_its_leader_is_cancelled(bench):
    leader, follower = bench.ask(1), bench.ask(1)
    leader.cancelled = True

    bench.engine.run()

    assert follower.sums == [1]
    assert len(leader.answers) == 1


def test_a_request_that_joins_a_flight_being_cancelled_restarts(bench):
    leader = bench.ask(1)
    leader.cancelled = True
    [(_, flight)] = bench.engine.flights
    assert flight.is_cancelled()
    late = bench.ask(1)

    bench.engine.fail(RequestCancelled("cancelled before it ran"))

    assert isinstance(leader.only, RequestCancelled)
    assert late.answers == []
    bench.engine.run()
    assert late.sums == [1]


def test_a_reply_that_cannot_say_whether_it_is_cancelled_keeps_its_flight(bench):
    reply = bench.ask(1, reply=CacheReply(raises=("is_cancelled",)))

    bench.engine.run()

    assert reply.sums == [1]


@pytest.mark.parametrize("error", [DeadlineError("late"), QueueFullError("full")])
def test_a_leader_that_is_dropped_for_itself_leaves_its_followers_alone(bench, error):
    leader = bench.ask(1, 2, deadline_seconds=1.0)
    first, second = bench.ask(2, deadline_seconds=3.0), bench.ask(2, 1)
    bench.clock.now += 1.5

    bench.engine.fail(error)

    assert leader.only is error
    # the first follower now leads, with its own remaining time
    assert bench.engine.waiting == [[[2]], [[1]]]
    assert bench.seconds_left() == [1.5, math.inf]
    bench.engine.run()
    bench.engine.run()
    assert (first.sums, second.sums) == ([2], [2, 1])
    assert bench.is_idle()


def test_a_restarted_request_does_not_join_a_later_one(bench):
    bench.ask(1, deadline_seconds=1.0)
    early = bench.ask(1)
    late = bench.ask(1, deadline_seconds=2.0)
    bench.clock.now += 1.5

    bench.engine.fail(DeadlineError("late"))

    # otherwise requests that miss their deadlines could delay it forever
    assert bench.seconds_left() == [0.5, math.inf]
    bench.engine.fail(DeadlineError("late"))
    assert isinstance(late.only, DeadlineError)
    bench.engine.run()
    assert early.sums == [1]


def test_a_follower_without_time_left_leaves_it_to_the_engine_to_say_so(bench):
    bench.ask(1, deadline_seconds=1.0)
    follower = bench.ask(1, deadline_seconds=1.5)
    bench.clock.now += 2.0

    bench.engine.fail(DeadlineError("late"))

    assert bench.seconds_left() == [-0.5]
    bench.engine.fail(DeadlineError("later"))
    assert isinstance(follower.only, DeadlineError)


@pytest.mark.parametrize("error", [EngineError("the batch failed"), KeyError("a bug")])
def test_a_failed_batch_fails_all_its_requests_and_is_not_kept(bench, error):
    replies = [bench.ask(1, 2), bench.ask(2), bench.ask(3, 1)]

    bench.engine.fail(error)

    assert all(reply.only is error for reply in replies)
    assert bench.cache.use().entries == 0
    # no other request waits for the third one's sequences
    [(_, flight)] = bench.engine.flights
    assert flight.is_cancelled()
    bench.engine.run()
    assert bench.is_idle()
    assert bench.get(1).sums == [1]
    assert bench.engine.runs == 1


def test_an_output_of_a_failed_request_that_runs_anyway_is_kept(bench):
    bench.ask(1)
    bench.ask(1, 2)
    bench.engine.fail(EngineError("the batch failed"))
    [(_, flight)] = bench.engine.flights
    succeed(flight, [answer(prompt_of(2), False)])

    assert bench.ask(2).sums == [2]


@pytest.mark.parametrize("rows", [[], [None], [np.zeros(WIDTH)] * 3])
def test_an_answer_that_cannot_be_kept_is_an_error_to_all(bench, rows):
    replies = [bench.ask(1, 2), bench.ask(2)]
    _, flight = bench.engine.flights.pop()

    succeed(flight, rows)

    assert all(isinstance(reply.only, EngineError) for reply in replies)
    assert bench.is_idle()


@pytest.mark.parametrize("how", ["send", "finish", "fail"])
def test_a_reply_that_raises_harms_no_other(bench, how):
    broken = bench.ask(1, reply=CacheReply(raises=(how,)))
    company = bench.ask(1)
    if how == "fail":
        bench.engine.fail(EngineError("the batch failed"))
    else:
        bench.engine.run()

    assert len(broken.answers) == len(company.answers) == 1
    assert bench.is_idle()


def test_an_engine_may_answer_during_submit():
    class Instant:
        def submit(self, request, reply):
            succeed(reply, [answer(s, request.options.normalize) for s in request.prompts])

    cache = ResponseCache(Instant().submit, ANY, Clock(), max_bytes=10_000)
    reply = CacheReply()
    cache.submit(request_of(1, 2, 1), reply)

    assert reply.sums == [1, 2, 1]


ERRORS = [
    RequestCancelled("cancelled before it ran"),
    DeadlineError("late"),
    QueueFullError("full"),
    EngineError("the batch failed"),
]
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.lists(st.integers(0, 5), min_size=1, max_size=4),
            st.fixed_dictionaries(
                {
                    "priority": st.integers(0, 2),
                    "deadline_seconds": st.sampled_from([None, 1.0, 2.0]),
                    "normalize": st.booleans(),
                }
            ),
            st.sampled_from([None, None, None, *ERRORS[2:]]),
        ),
        st.tuples(st.just("run"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9), st.sampled_from(ERRORS)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0])),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(EVENTS, st.integers(0, 6), st.integers(1, 4), st.integers(0, 3))
def test_any_order_of_events_answers_each_request_once_and_rightly(
    events, entries, flight_tokens, most
):
    bench = Bench(entries, JoinLimits(flight_tokens, most, 100), max_seconds=3.0)
    asked, failures, unexpected = [], set(), []
    for action, *what in events:
        flights = bench.engine.flights
        if action == "ask":
            rows, given, refusal = what
            bench.engine.refusal = refusal
            reply = CacheReply()
            try:
                bench.ask(*rows, reply=reply, **given)
                asked.append((rows, given["normalize"], reply))
            except VarlenError as error:
                unexpected += [error] if error is not refusal else []
                unexpected += reply.answers
            bench.engine.refusal = None
        elif action == "wait":
            bench.clock.now += what[0]
        elif action == "cancel" and asked:
            asked[what[0] % len(asked)][2].cancelled = True
        elif action == "run" and flights:
            bench.engine.run(what[0] % len(flights))
        elif action == "fail" and flights:
            failures.add(what[1])
            bench.engine.fail(what[1], what[0] % len(flights))
        assert bench.cache.use().held_bytes <= entries * SIZE
        assert bench.cache._flights._followers <= most
    bench.engine.run_all()

    assert unexpected == []
    for rows, normalize, reply in asked:
        if isinstance(reply.only, Exception):
            is_own = isinstance(reply.only, RequestCancelled) and reply.cancelled
            assert is_own or reply.only in failures
        else:
            assert [[row[0], row[2]] for row in reply.only] == [[r, normalize] for r in rows]
    assert bench.is_idle()


# Threads


class ThreadedEngine:
    """Answers in a thread; refuses and fails random requests."""

    def __init__(self, chance=0.0, seed=0):
        self._chance = chance
        self._random = random.Random(seed)
        self._lock = Lock()
        self._inbox = SimpleQueue()
        self.runs = Counter()
        self._thread = Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _happens(self):
        with self._lock:
            return self._random.random() < self._chance

    def submit(self, request, reply):
        if self._happens():
            raise QueueFullError("full")
        self._inbox.put((request, reply))

    def close(self):
        self._inbox.put(None)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _loop(self):
        while (flight := self._inbox.get()) is not None:
            request, reply = flight
            if reply.is_cancelled():
                reply.fail(RequestCancelled("cancelled before it ran"))
            elif self._happens():
                reply.fail(DeadlineError("late"))
            elif self._happens():
                reply.fail(EngineError("the batch failed"))
            else:
                rows = [answer(s, request.options.normalize) for s in request.prompts]
                self.runs.update(int(s.token_ids.sum()) for s in request.prompts)
                succeed(reply, rows)


def test_what_many_threads_ask_for_at_once_runs_once():
    engine = ThreadedEngine()
    joins = JoinLimits(max_flight_tokens=2, max_requests=10_000, max_tokens=10_000)
    cache = ResponseCache(engine.submit, joins, Clock(), max_bytes=2**20)
    replies = [[] for _ in range(8)]

    def ask(index):
        for text in range(200):
            reply = CacheReply()
            replies[index].append((text, reply))
            cache.submit(request_of(text, text // 2), reply)

    run_in_threads(8, ask)

    for part in replies:
        for text, reply in part:
            assert reply.answered.wait(SECONDS)
            assert reply.sums == [text, text // 2]
    engine.close()
    assert set(engine.runs.values()) == {1}
    use = cache.use()
    assert use.misses == len(engine.runs) == 200
    assert use.hits + use.joined + use.misses == 8 * 200 * 2


def test_whatever_goes_wrong_in_many_threads_each_request_is_answered_once():
    engine = ThreadedEngine(chance=0.2)
    bound = 12 * SIZE
    cache = ResponseCache(engine.submit, JoinLimits(3, 6, 100), Clock(), max_bytes=bound)
    accepted, refused = [], []

    def ask(index):
        numbers = random.Random(index)
        for _ in range(400):
            rows = [numbers.randrange(20) for _ in range(numbers.randint(1, 4))]
            reply = CacheReply()
            reply.cancelled = numbers.random() < 0.1
            given = {
                "priority": numbers.randrange(2),
                "deadline_seconds": numbers.choice([None, 1.0]),
            }
            try:
                cache.submit(request_of(*rows, **given), reply)
                accepted.append((rows, reply))
            except QueueFullError:
                refused.append(reply)
            assert cache.use().held_bytes <= bound

    run_in_threads(6, ask)

    for rows, reply in accepted:
        assert reply.answered.wait(SECONDS)
        if isinstance(reply.only, list):
            assert reply.sums == rows
        else:
            assert isinstance(reply.only, VarlenError)
    engine.close()
    assert len(accepted) + len(refused) == 2400
    assert all(reply.answers == [] for reply in refused)
    assert holds_nothing(cache)
