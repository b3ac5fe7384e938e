"""Which processes grammars have, and when they end."""

import gc

import pytest

from tests.backend.decoding.grammar.grammar_fakes import VOCABULARY, GrammarBench, grammar
from tests.backend.refusals import refused_request as refused
from varlen.decoding.grammar.grammars import MAX_COMPILING
from varlen.errors import EngineError, QueueFullError, RequestError
from varlen.sandbox.frames import HEAD, MASK, REFUSED


def test_only_some_grammars_compile_at_the_same_time():
    bench = GrammarBench()
    holds = [bench.ask(name)[0] for name in range(MAX_COMPILING + 4)]
    assert len(bench.sandbox.processes) == MAX_COMPILING

    bench.sandbox.processes[3].has_compiled()
    assert holds[3].compile(wait_seconds=0)
    bench.await_background()

    assert len(bench.sandbox.processes) == MAX_COMPILING + 1


def test_grammars_of_answers_that_run_count_among_what_compiles():
    bench = GrammarBench()
    matchers = [bench.grammars.matcher(grammar(name)) for name in range(MAX_COMPILING + 4)]
    for matcher in matchers:
        matcher.advance([1], 1)
    bench.await_background()

    assert len(bench.sandbox.processes) == MAX_COMPILING
    assert all(matcher.allowed_tokens() is None for matcher in matchers)


def test_a_grammar_ends_when_the_last_request_that_waits_for_it_goes():
    bench = GrammarBench()
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
    bench = GrammarBench()
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
    bench = GrammarBench()
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
    bench = GrammarBench()
    hold, process = bench.ask("a")
    process.has_compiled()

    hold.release()
    bench.await_background()

    assert process.is_alive
    assert bench.grammars.hold(grammar("a")).take()


def test_a_refusal_is_remembered_though_its_request_has_gone():
    bench = GrammarBench()
    hold, process = bench.ask("a")
    process.error = RequestError("too much")

    hold.release()
    bench.await_background()

    assert not process.is_alive
    with refused("too much"):
        bench.grammars.check(grammar("a"))
    assert len(bench.sandbox.processes) == 1


def test_processes_that_end_without_a_request_are_released():
    bench = GrammarBench()
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
    bench = GrammarBench()
    hold, process = bench.ask("a")
    process.error = EngineError("killed")

    bench.read("a")
    with pytest.raises(EngineError, match="killed"):
        hold.compile(wait_seconds=0)
    hold.release()

    bench.compiled("a")


def test_a_grammar_that_failed_after_it_had_compiled_may_be_sent_again():
    bench = GrammarBench()
    hold, process = bench.compiled("a")
    matcher = bench.grammars.matcher(grammar("a"))
    matcher.advance([1], 1)
    process.error = RequestError("this answer took too much")

    bench.read("a")
    with refused("this answer took too much"):
        matcher.allowed_tokens()
    hold.release()

    bench.compiled("a")


def test_a_grammar_that_was_killed_while_it_was_idle_compiles_again():
    bench = GrammarBench()
    hold, process = bench.compiled("a")
    hold.release()
    process.error = EngineError("killed")

    again = bench.grammars.hold(grammar("a"))
    assert not again.take()
    bench.compiled("a")
    assert again.take()
    assert len(bench.sandbox.processes) == 2


def test_no_call_waits_while_a_process_starts():
    bench = GrammarBench()
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
    bench = GrammarBench()
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
    bench = GrammarBench()
    holds = [bench.compiled(name)[0] for name in range(30)]
    assert len(bench.sandbox.alive) == 30

    for hold in holds:
        hold.release()
    bench.await_background()

    assert len(bench.sandbox.alive) == 16
    assert bench.grammars.use().evictions == 14


def test_a_request_whose_grammar_does_not_fit_is_refused_once():
    bench = GrammarBench(max_bytes=10)
    bench.compiled("a", 4)
    large, process = bench.ask("b")
    process.has_compiled(7)

    for _ in range(2):
        with pytest.raises(QueueFullError, match="more than 10 bytes of memory; try again later"):
            large.compile(wait_seconds=0)
    assert len(bench.sandbox.processes) == 2


def test_no_grammar_is_compiled_after_the_sandbox_was_closed():
    bench = GrammarBench()
    hold, _ = bench.compiled("a")
    hold.release()
    bench.sandbox.is_closed = True

    with pytest.raises(EngineError, match="the model is being unloaded"):
        bench.grammars.check(grammar("a"))


def test_a_process_that_cannot_be_started_fails_its_request_only(caplog):
    bench = GrammarBench()
    fork, bench.sandbox.fork = bench.sandbox.fork, None

    with pytest.raises(EngineError, match="could not be started"):
        bench.grammars.check(grammar("a"))
    bench.sandbox.fork = fork
    bench.compiled("a")
