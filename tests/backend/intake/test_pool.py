"""The pool of tokenizer threads: requests end once, in fair order, within limits."""

import gc
import weakref
from threading import Event, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.fakes.engine_parts import Clock
from tests.backend.requests import prompt_of
from varlen.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestCancelled,
    RequestError,
)
from varlen.intake.pool import PoolLimits, TokenizerPool
from varlen.request.request import Draft, RequestOptions, TokenizationTask
from varlen.telemetry.metrics import Stats

SECONDS = 20.0


class Client:
    """The reply to one request; counts how often it ends."""

    def __init__(self, refusal=None):
        self.refusal = refusal
        self.cancelled = False
        self.cancel_check_fails = False
        self.asked = 0
        self.request = None
        self.ends = []

    def is_cancelled(self):
        assert not self.ends
        self.asked += 1
        if self.cancel_check_fails:
            raise OSError("cannot ask")
        return self.cancelled

    def fail(self, error):
        self.ends.append(error)

    def accept(self, request):
        if self.refusal is not None:
            raise self.refusal
        self.request = request
        self.ends.append("accepted")

    @property
    def error(self):
        [end] = self.ends
        return end


class Bench:
    """A pool without threads, its clock, and the order in which steps run."""

    def __init__(self, max_requests=100, max_bytes=10**9, elsewhere=0, **options):
        self.clock, self.stats, self.ran = Clock(), Stats(), []
        limits = PoolLimits(max_requests, max_bytes, lambda: elsewhere)
        self.pool = TokenizerPool(limits, self.stats, self.clock, **options)

    def ask(self, name, *sizes, client=None, errors=(), **options):
        """Submit a draft with a step per size."""
        client = client or Client()

        def step(number, size):
            def run():
                self.ran.append((name, number))
                if number in dict(errors):
                    raise dict(errors)[number]
                return (prompt_of([number + 1]),)

            return TokenizationTask(size, run)

        steps = tuple(step(number, size) for number, size in enumerate(sizes))
        draft = Draft(steps, RequestOptions(**options))
        self.pool.submit(draft, client, client.accept, arrival=self.clock.now)
        return client

    def run(self):
        while self.pool.step():
            pass


def rows_of(client):
    return [prompt.token_ids.tolist() for prompt in client.request.prompts]


def test_a_request_gets_its_prompts_in_order_of_the_rows_and_keeps_its_arrival():
    bench = Bench()
    client = bench.ask("a", 10, 500, 10, priority=3)
    bench.clock.now += 5.0

    bench.run()

    assert rows_of(client) == [[1], [2], [3]]
    assert client.ends == ["accepted"]
    assert client.request.arrival == 100.0
    assert client.request.options == RequestOptions(priority=3)


def test_a_short_text_that_comes_alone_is_tokenized_at_once():
    bench = Bench(at_once=True)

    client, failed = bench.ask("a", 256), bench.ask("b", 1, errors=[(0, RequestError("no"))])

    assert rows_of(client) == [[1]]
    assert str(failed.error) == "no"
    assert bench.pool.depth == (0, 0)
    assert not bench.pool.step()


def test_other_texts_wait_for_a_thread():
    bench = Bench(at_once=True)

    clients = [bench.ask("long", 257), bench.ask("short", 1)]
    bench.ask("several", 1, 1)

    assert not bench.ran
    bench.run()
    assert [client.ends for client in clients] == [["accepted"]] * 2


def test_a_short_text_runs_between_the_rows_of_a_large_request():
    bench = Bench()
    bench.ask("large", *[65_536] * 4)
    assert bench.pool.step()
    bench.clock.now += 0.1

    bench.ask("short", 50)
    bench.run()

    assert [name for name, _ in bench.ran] == ["large", "short", "large", "large", "large"]


def test_a_large_request_is_passed_only_by_what_comes_before_it_is_due():
    bench = Bench()
    large = bench.ask("large", 65_536)
    served = 0

    # a stream of short texts that would otherwise never end
    while not large.ends:
        bench.clock.now += 0.05
        bench.ask("short", 50)
        assert bench.pool.step()
        served += 1
        assert served < 100

    # 65,536 bytes are due after 0.66 seconds
    assert 12 <= served <= 15


def test_a_short_text_never_waits_for_long_steps_of_others():
    pool = TokenizerPool(PoolLimits(100, 10**9, lambda: 0), Stats())
    pool.start()
    goes_on, started, ended, most = Event(), Event(), Event(), []
    clients = [Client() for _ in range(4)]
    running = 0

    def run_long():
        nonlocal running
        running += 1
        most.append(running)
        started.set()
        assert goes_on.wait(SECONDS)
        running -= 1
        return ()

    def accept(_):
        ended.set()

    for client in clients:
        draft = Draft((TokenizationTask(1 << 20, run_long),) * 2, RequestOptions(priority=9))
        pool.submit(draft, client, client.accept, arrival=0.0)
    assert started.wait(SECONDS)

    short = Draft((TokenizationTask(10, tuple),), RequestOptions())
    pool.submit(short, Client(), accept, arrival=1e9)

    assert ended.wait(SECONDS)
    goes_on.set()
    pool.close()
    assert most == [1] * 8
    assert all(client.ends == ["accepted"] for client in clients)


def test_priority_makes_a_request_due_sooner():
    bench = Bench()
    bench.ask("plain", 1000)
    bench.ask("urgent", 5000, priority=9)

    bench.run()

    assert [name for name, _ in bench.ran] == ["urgent", "plain"]


def test_equal_requests_run_in_order_of_arrival():
    bench = Bench()
    for name in "abcde":
        bench.ask(name, 100)

    bench.run()

    assert [name for name, _ in bench.ran] == list("abcde")


def test_a_request_whose_deadline_has_passed_is_not_tokenized():
    bench = Bench()
    late = bench.ask("late", 10, deadline_seconds=1.0)
    half = bench.ask("half", 200_000, 200_000, deadline_seconds=3.0)
    bench.clock.now += 1.5
    bench.pool.step()
    bench.pool.step()
    bench.clock.now += 2.0

    bench.run()

    assert bench.ran == [("half", 0)]
    for client in (late, half):
        assert isinstance(client.error, DeadlineError)
    assert bench.stats.drain().counts == {("varlen_refused_requests_total", "expired"): 2}


def test_a_cancelled_request_is_not_tokenized():
    bench = Bench()
    gone = bench.ask("gone", 10)
    gone.cancelled = True
    bench.clock.now += 1.0

    bench.run()

    assert bench.ran == []
    assert isinstance(gone.error, RequestCancelled)


def test_a_request_that_has_just_come_is_not_asked_whether_it_is_cancelled():
    bench = Bench()
    client = bench.ask("a", 10, 10)

    bench.run()

    assert client.asked == 0


def test_a_cancel_check_that_fails_does_not_lose_the_request():
    bench = Bench()
    client = bench.ask("a", 10)
    client.cancel_check_fails = True
    bench.clock.now += 1.0

    bench.run()

    assert client.ends == ["accepted"]


def test_the_first_bad_row_fails_its_request_and_the_rest_is_not_tokenized():
    bench = Bench()
    error = RequestError("row 1: bad")
    bad = bench.ask("bad", 10, 10, 10, errors=[(1, error)])
    good = bench.ask("good", 30)

    bench.run()

    assert bad.error is error
    assert ("bad", 2) not in bench.ran
    assert good.ends == ["accepted"]


@pytest.mark.parametrize("ends", ["refused", "bad", "late"])
def test_a_request_that_has_failed_keeps_no_texts(ends):
    class Text:
        """Texts of a step, which tell when they are freed."""

        def __call__(self):
            if ends == "bad":
                raise RequestError("bad")
            return (prompt_of([1]),)

    bench = Bench()
    client = Client(QueueFullError("full") if ends == "refused" else None)
    texts = Text()
    draft = Draft((TokenizationTask(10, texts),), RequestOptions(deadline_seconds=1.0))
    bench.pool.submit(draft, client, client.accept, arrival=bench.clock.now)
    if ends == "late":
        bench.clock.now += 2.0
    freed = weakref.ref(texts)
    del texts, draft
    gc.disable()
    try:
        bench.run()
    finally:
        gc.enable()

    assert len(client.ends) == 1
    assert freed() is None


class Panic(BaseException):
    """A panic of a library, which is no Exception."""


@pytest.mark.parametrize("fault", [KeyError("secret"), Panic("secret")])
def test_an_unexpected_error_is_answered_without_details(fault, caplog):
    bench = Bench()
    broken = bench.ask("broken", 10, errors=[(0, fault)])
    unlucky = bench.ask("unlucky", 10, client=Client(refusal=fault))

    bench.run()

    for client in (broken, unlucky):
        assert isinstance(client.error, EngineError)
        assert "secret" not in str(client.error)
    assert "secret" in caplog.text
    assert bench.pool.depth == (0, 0)


def test_a_request_that_the_engine_refuses_gets_its_error():
    bench = Bench()
    error = QueueFullError("full")
    client = bench.ask("a", 10, client=Client(refusal=error))

    bench.run()

    assert client.ends == [error]
    assert bench.pool.depth == (0, 0)


def test_requests_that_wait_here_and_elsewhere_count_together():
    bench = Bench(max_requests=5, elsewhere=3)
    bench.ask("a", 10)
    bench.ask("b", 10)

    with pytest.raises(QueueFullError, match="5 requests wait, at most 5 may"):
        bench.ask("c", 10)

    assert bench.stats.drain().counts == {("varlen_refused_requests_total", "queue_full"): 1}
    bench.run()
    bench.ask("c", 10)


def test_waiting_texts_have_a_limit_in_bytes():
    bench = Bench(max_bytes=1000)
    bench.ask("a", 300, 300)
    assert bench.pool.depth == (1, 600)
    with pytest.raises(
        QueueFullError, match="600 bytes of text wait, the request has 500, at most 1000"
    ):
        bench.ask("b", 500)

    bench.pool.step()

    assert bench.pool.depth == (1, 300)
    bench.ask("b", 500)
    bench.run()
    assert bench.pool.depth == (0, 0)


def test_texts_longer_than_the_limit_are_the_caller_s_fault():
    with pytest.raises(
        RequestError, match="the texts have 1001 bytes; this model queues at most 1000"
    ):
        Bench(max_bytes=1000).ask("a", 501, 500)


def test_closing_finishes_what_waits_and_refuses_the_rest():
    bench = Bench()
    clients = [bench.ask(name, 10, 10) for name in "abc"]

    bench.pool.close()

    assert [client.ends for client in clients] == [["accepted"]] * 3
    with pytest.raises(EngineError, match="unloaded"):
        bench.ask("d", 10)


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "sizes": st.lists(st.integers(1, 70_000), min_size=1, max_size=4),
            "bad": st.sampled_from([None, None, 0, 1]),
            "deadline": st.sampled_from([None, 0.05, 1.0]),
            "cancelled": st.booleans(),
            "refused": st.booleans(),
            "pause": st.sampled_from([0.0, 0.03, 0.5]),
            "steps": st.integers(0, 5),
        }
    ),
    max_size=15,
)


@settings(max_examples=60)
@given(requests=REQUESTS)
def test_every_request_ends_exactly_once(requests):
    bench = Bench(max_requests=6, max_bytes=300_000)
    clients = []
    for number, each in enumerate(requests):
        client = Client(QueueFullError("full") if each["refused"] else None)
        errors = [] if each["bad"] is None else [(each["bad"], RequestError("bad"))]
        try:
            bench.ask(
                number,
                *each["sizes"],
                client=client,
                errors=errors,
                deadline_seconds=each["deadline"],
            )
        except (RequestError, QueueFullError) as error:
            client.fail(error)
        client.cancelled = each["cancelled"]
        clients.append(client)
        bench.clock.now += each["pause"]
        for _ in range(each["steps"]):
            bench.pool.step()

    bench.pool.close()

    assert all(len(client.ends) == 1 for client in clients)
    assert bench.pool.depth == (0, 0)
    for client, each in zip(clients, requests, strict=True):
        if client.request is not None:
            assert rows_of(client) == [[row + 1] for row in range(len(each["sizes"]))]


def test_threads_end_every_request_of_many_threads_once_while_the_pool_closes():
    # room for all, however slow the pool's threads are
    bench = Bench(max_requests=200)
    bench.pool.start()
    clients, refused = [], []

    def ask(name):
        for number in range(50):
            client = Client()
            try:
                bench.ask((name, number), 100, 5000, 10, client=client)
            except EngineError:
                refused.append(client)
            else:
                clients.append(client)

    askers = [Thread(target=ask, args=(name,)) for name in range(4)]
    for asker in askers:
        asker.start()
    while len(clients) < 20:
        pass
    bench.pool.close()
    for asker in askers:
        asker.join(SECONDS)

    assert len(clients) + len(refused) == 200
    assert all(client.ends == ["accepted"] for client in clients)
    assert not any(client.ends for client in refused)


def test_a_request_in_work_holds_up_no_other():
    bench = Bench()
    begun, go_on = Event(), Event()

    def wait():
        begun.set()
        assert go_on.wait(SECONDS)
        return (prompt_of([1]),)

    slow, quick = Client(), Client()
    answered = Event()
    quick.accept = lambda request: answered.set()
    bench.pool.start()
    options = RequestOptions()
    bench.pool.submit(
        Draft((TokenizationTask(10, wait),), options), slow, slow.accept, arrival=100.0
    )
    assert begun.wait(SECONDS)

    bench.pool.submit(
        Draft((TokenizationTask(10, lambda: (prompt_of([2]),)),), options),
        quick,
        quick.accept,
        arrival=100.0,
    )

    assert answered.wait(SECONDS)
    assert not slow.ends
    go_on.set()
    bench.pool.close()
    assert slow.ends == ["accepted"]


def test_a_request_that_waits_for_a_process_ends_at_its_deadline_or_when_its_client_goes():
    bench = Bench(work="its grammar was compiled")
    asked = []

    def step_of(name):
        def wait(seconds):
            asked.append(name)
            bench.clock.now += seconds
            if name == "gone" and asked.count(name) == 3:
                gone.cancelled = True
            return name == "ready" and asked.count(name) == 3

        return TokenizationTask(5, lambda: (prompt_of([1]),), wait)

    late, gone, ready = Client(), Client(), Client()
    for name, client, seconds in (
        ("late", late, 0.05),
        ("gone", gone, None),
        ("ready", ready, None),
    ):
        options = RequestOptions(deadline_seconds=seconds)
        draft = Draft((step_of(name),), options)
        bench.pool.submit(draft, client, client.accept, arrival=bench.clock.now)

    bench.run()

    assert isinstance(late.error, DeadlineError)
    assert str(late.error).endswith("the deadline passed before its grammar was compiled")
    assert isinstance(gone.error, RequestCancelled)
    assert ready.ends == ["accepted"]
    assert asked.count("late") < 10
    assert bench.pool.depth == (0, 0)
