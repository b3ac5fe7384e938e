"""Requests with a grammar wait for it, and hold its process until they are answered."""

import pytest

from tests.backend.decoding.grammar.grammar_fakes import GrammarBench, grammar
from tests.backend.requests import prompt_of
from varlen.errors import QueueFullError, RequestCancelled, RequestError
from varlen.intake.pool import PoolLimits, TokenizerPool
from varlen.request.request import Request
from varlen.service.generation import submit_with_grammar
from varlen.telemetry.metrics import Stats


class Reply:
    """The reply to one request."""

    def __init__(self):
        self.checks_left = float("inf")
        self.parts = []
        self.ends = []

    def is_cancelled(self):
        self.checks_left -= 1
        return self.checks_left < 0

    def send(self, row, output):
        self.parts.append((row, output))

    def finish(self):
        self.ends.append("finished")

    def fail(self, error):
        self.ends.append(error)


class Bench(GrammarBench):
    """A queue without threads, and an engine that keeps what it gets."""

    def __init__(self):
        super().__init__()
        self.queue = TokenizerPool(PoolLimits(100, 10**9, lambda: 0), Stats())
        self.engine = []
        self.refusal = None

    def submit(self, name):
        reply = Reply()
        hold = self.grammars.hold(grammar(name))
        submit_with_grammar(Request((prompt_of([1]),)), reply, hold, self.queue, self.take_over)
        return reply

    def take_over(self, request, reply):
        if self.refusal is not None:
            raise self.refusal
        assert request.num_tokens == 1
        self.engine.append(reply)

    @property
    def users(self):
        return [each.users() for each in self.grammars._grammars.values()]

    def compile_ahead(self, name):
        hold, process = self.compiled(name)
        hold.release()
        return process


def test_a_request_whose_grammar_is_compiled_does_not_wait_and_holds_it_until_its_answer_ends():
    bench = Bench()
    bench.compile_ahead("a")
    finished, failed = bench.submit("a"), bench.submit("a")
    assert bench.queue.depth == (0, 0)
    assert bench.users == [2]

    for reply in bench.engine:
        reply.send(0, "part")
    assert not bench.engine[0].is_cancelled()
    bench.engine[0].finish()
    assert bench.users == [1]
    error = RequestError("no")
    bench.engine[1].fail(error)

    assert bench.users == [0]
    assert finished.parts == failed.parts == [(0, "part")]
    assert finished.ends == ["finished"]
    assert failed.ends == [error]


def test_a_request_waits_for_its_grammar_and_holds_it_then():
    bench = Bench()
    _, process = bench.ask("a")
    reply = bench.submit("a")
    assert bench.queue.depth[0] == 1
    assert not bench.engine
    process.has_compiled()

    assert bench.queue.step()

    [held] = bench.engine
    assert bench.users == [2]
    held.finish()
    assert reply.ends == ["finished"]
    assert bench.users == [1]


def test_a_request_whose_client_goes_while_its_grammar_compiles_ends_the_process():
    bench = Bench()
    reply = bench.submit("a")
    reply.checks_left = 3

    assert bench.queue.step()
    bench.await_background()

    [error] = reply.ends
    assert isinstance(error, RequestCancelled)
    assert not bench.engine
    assert not bench.sandbox.alive
    assert bench.users == []


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_request_that_the_engine_refuses_lets_its_grammar_go(is_compiled):
    bench = Bench()
    bench.refusal = QueueFullError("full")
    if is_compiled:
        bench.compile_ahead("a")
        with pytest.raises(QueueFullError):
            bench.submit("a")
    else:
        hold, process = bench.ask("a")
        reply = bench.submit("a")
        process.has_compiled()
        bench.queue.step()
        assert reply.ends == [bench.refusal]
        hold.release()

    assert bench.users == [0]
