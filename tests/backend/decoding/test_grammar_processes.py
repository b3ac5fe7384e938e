"""Which processes grammars have, and when they end. The processes are fakes that do what a test says."""

import gc
import json
from threading import Event

import pytest

from varlen.decoding.structured import MAX_COMPILING, Grammars
from varlen.errors import EngineError, QueueFullError, RequestError
from varlen.sandbox.protocol import COMPILED, HEAD, MASK, MEMORY, REFUSED

from ..refusals import refused_request as refused

# Longest wait for what comes in any case.
SECONDS = 60.0
VOCABULARY = 16


class Process:
    """A process of one grammar."""

    def __init__(self):
        self.orders = []
        self.answers = []
        self.error = None
        self.is_alive = True

    def fileno(self):
        return -1

    def send(self, order):
        self.orders.append(order)

    def receive(self):
        answers, self.answers = self.answers, []
        if self.error is not None and not answers:
            raise EOFError
        return answers

    def end(self):
        self.is_alive = False

    def failure(self, _):
        self.end()
        return self.error

    def has_compiled(self, num_bytes=1):
        self.answers.append(HEAD.pack(MEMORY, COMPILED) + num_bytes.to_bytes(8, "little"))


class Sandbox:
    """A sandbox whose processes are fakes."""

    def __init__(self):
        self.processes = []
        self.is_closed = False
        self.reason = None
        self.may_fork = Event()
        self.may_fork.set()

    def refusal(self, kind):
        assert kind == "grammar"
        return self.reason

    def fork(self, _):
        assert self.may_fork.wait(SECONDS)
        self.processes.append(Process())
        return self.processes[-1]

    @property
    def alive(self):
        return [each for each in self.processes if each.is_alive]


class Bench:
    """Grammars in a sandbox of fakes."""

    def __init__(self, max_bytes=1000):
        self.sandbox = Sandbox()
        self.grammars = Grammars(self.sandbox, VOCABULARY, max_bytes=max_bytes)

    def await_background(self):
        """Wait until what was begun is done."""
        done = Event()
        self.grammars._background.run(done.set)
        assert done.wait(SECONDS)

    def ask(self, name):
        """Let a request ask for a grammar, and return its hold and the newest process."""
        hold = self.grammars.hold(grammar(name))
        assert not hold.compile(wait_seconds=0)
        self.await_background()
        return hold, self.sandbox.processes[-1]

    def compiled(self, name, num_bytes=1):
        hold, process = self.ask(name)
        process.has_compiled(num_bytes)
        assert hold.compile(wait_seconds=0)
        return hold, process


def grammar(name):
    return json.dumps({"regex": str(name)})


def test_only_some_grammars_compile_at_the_same_time():
    bench = Bench()
    holds = [bench.ask(name)[0] for name in range(MAX_COMPILING + 4)]
    assert len(bench.sandbox.processes) == MAX_COMPILING

    bench.sandbox.processes[3].has_compiled()
    assert holds[3].compile(wait_seconds=0)
    bench.await_background()

    assert len(bench.sandbox.processes) == MAX_COMPILING + 1


def test_grammars_of_answers_that_run_count_among_what_compiles():
    bench = Bench()
    matchers = [bench.grammars.matcher(grammar(name)) for name in range(MAX_COMPILING + 4)]
    for matcher in matchers:
        matcher.advance([1], 1)
    bench.await_background()

    assert len(bench.sandbox.processes) == MAX_COMPILING
    assert all(matcher.allowed_tokens() is None for matcher in matchers)


def test_a_grammar_ends_when_the_last_request_that_waits_for_it_goes():
    bench = Bench()
    for name in range(40):
        bench.ask(name)[0].release()
    bench.await_background()
    assert not bench.sandbox.alive
    assert bench.grammars.use().grammars == 0

    first, process = bench.ask("shared")
    second, same = bench.ask("shared")
    assert same is process
    first.release()
    bench.await_background()
    assert process.is_alive
    second.release()
    bench.await_background()
    assert not process.is_alive


def test_a_grammar_whose_request_goes_while_it_waits_is_never_started():
    bench = Bench()
    bench.sandbox.may_fork.clear()
    holds = [bench.grammars.hold(grammar(name)) for name in range(20)]
    for hold in holds:
        assert not hold.compile(wait_seconds=0)
    for hold in holds:
        hold.release()
    bench.sandbox.may_fork.set()
    bench.await_background()

    # perhaps the first was just starting
    assert len(bench.sandbox.processes) <= 1
    assert not bench.sandbox.alive


def test_a_grammar_that_compiles_for_an_answer_ends_with_it():
    bench = Bench()
    matcher = bench.grammars.matcher(grammar("a"))
    matcher.advance([1], 1)
    bench.await_background()
    assert len(bench.sandbox.alive) == 1

    del matcher
    gc.collect()
    bench.compiled("b")[0].release()
    bench.await_background()

    [left] = bench.sandbox.alive
    assert left is bench.sandbox.processes[1]


def test_a_grammar_that_is_compiled_when_its_request_goes_is_kept():
    bench = Bench()
    hold, process = bench.ask("a")
    process.has_compiled()

    hold.release()
    bench.await_background()

    assert process.is_alive
    assert bench.grammars.hold(grammar("a")).take()


def test_a_refusal_is_remembered_though_its_request_has_gone():
    bench = Bench()
    hold, process = bench.ask("a")
    process.error = RequestError("too much")

    hold.release()
    bench.await_background()

    assert not process.is_alive
    with refused("too much"):
        bench.grammars.check(grammar("a"))
    assert len(bench.sandbox.processes) == 1


def test_processes_that_end_without_a_request_are_released():
    bench = Bench()
    holds = [bench.compiled(name)[0] for name in range(5)]
    for hold in holds:
        hold.release()
    for process in bench.sandbox.processes:
        process.error = EngineError("killed")

    bench.compiled("another")
    bench.await_background()

    assert len(bench.sandbox.alive) == 1
    assert bench.grammars.use().grammars == 1


def test_a_grammar_that_was_killed_while_it_compiled_may_be_sent_again():
    bench = Bench()
    hold, process = bench.ask("a")
    process.error = EngineError("killed")

    assert not hold.compile(wait_seconds=0)
    bench.await_background()
    with pytest.raises(EngineError, match="killed"):
        hold.compile(wait_seconds=0)
    hold.release()

    bench.compiled("a")


def test_a_grammar_that_failed_after_it_had_compiled_may_be_sent_again():
    bench = Bench()
    hold, process = bench.compiled("a")
    matcher = bench.grammars.matcher(grammar("a"))
    matcher.advance([1], 1)
    process.error = RequestError("this answer took too much")

    assert matcher.allowed_tokens() is None
    bench.await_background()
    with refused("this answer took too much"):
        matcher.allowed_tokens()
    hold.release()

    bench.compiled("a")


def test_a_grammar_that_was_killed_while_it_was_idle_compiles_again():
    bench = Bench()
    hold, process = bench.compiled("a")
    hold.release()
    process.error = EngineError("killed")

    again = bench.grammars.hold(grammar("a"))
    assert not again.take()
    bench.compiled("a")
    assert again.take()
    assert len(bench.sandbox.processes) == 2


def test_no_call_waits_while_a_process_starts():
    bench = Bench()
    hold, _ = bench.compiled("compiled")
    bench.sandbox.may_fork.clear()
    starting, matcher = bench.grammars.hold(grammar("a")), bench.grammars.matcher(grammar("b"))

    assert not starting.compile(wait_seconds=0)
    matcher.advance([1], 1)
    matcher.expect(2)

    assert matcher.allowed_tokens() is None
    assert bench.grammars.hold(grammar("compiled")).take()
    assert bench.grammars.use().grammars == 3
    starting.release()
    hold.release()
    assert not bench.sandbox.may_fork.is_set()
    # what the answer asked for was kept
    bench.sandbox.may_fork.set()
    bench.await_background()
    assert [len(order) for order in bench.sandbox.processes[-1].orders] == [
        len(grammar("b")),
        HEAD.size,
        HEAD.size + 4,
    ]


def test_an_answer_that_ended_leaves_no_mask_and_no_error():
    bench = Bench()
    hold, process = bench.compiled("a")
    matchers = [bench.grammars.matcher(grammar("a")) for _ in range(3)]
    for matcher in matchers:
        matcher.advance([1], 1)
    mask = bytes(VOCABULARY // 8)
    process.answers.append(HEAD.pack(MASK, 1) + mask)
    assert matchers[0].allowed_tokens() is not None

    del matchers[:], matcher
    gc.collect()
    bench.grammars.use()
    process.answers += [HEAD.pack(MASK, 2) + mask, HEAD.pack(REFUSED, 3) + b"late"]
    bench.grammars.use()
    hold.compile(wait_seconds=0)

    [compiled] = bench.grammars._grammars.values()
    compiled.receive()
    assert not process.answers
    assert not compiled._masks
    assert not compiled._errors
    assert compiled.users() == 1


def test_a_grammar_keeps_its_process_until_its_request_is_answered():
    bench = Bench()
    holds = [bench.compiled(name)[0] for name in range(30)]
    assert len(bench.sandbox.alive) == 30

    for hold in holds:
        hold.release()
    bench.await_background()

    assert len(bench.sandbox.alive) == 16
    assert bench.grammars.use().evictions == 14


def test_a_request_whose_grammar_does_not_fit_is_refused_once():
    bench = Bench(max_bytes=10)
    bench.compiled("a", 4)
    large, process = bench.ask("b")
    process.has_compiled(7)

    for _ in range(2):
        with pytest.raises(QueueFullError, match="more than 10 bytes of memory; try again later"):
            large.compile(wait_seconds=0)
    assert len(bench.sandbox.processes) == 2


def test_no_grammar_is_compiled_after_the_sandbox_was_closed():
    bench = Bench()
    hold, _ = bench.compiled("a")
    hold.release()
    bench.sandbox.is_closed = True

    with pytest.raises(EngineError, match="the model is being unloaded"):
        bench.grammars.check(grammar("a"))


def test_a_process_that_cannot_be_started_fails_its_request_only(caplog):
    bench = Bench()
    fork, bench.sandbox.fork = bench.sandbox.fork, None

    with pytest.raises(EngineError, match="could not be started"):
        bench.grammars.check(grammar("a"))
    bench.sandbox.fork = fork
    bench.compiled("a")
