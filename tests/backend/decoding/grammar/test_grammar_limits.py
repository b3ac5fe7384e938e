"""Limits of time and memory of grammars, and the ends of their processes."""

import gc
import json
import os
import re
import signal
from multiprocessing.connection import wait
from threading import Event

import pytest

from tests.backend.decoding.grammar.grammar_server import CHOICES, Server
from tests.backend.decoding.sequences import sample, sequence_of
from tests.backend.decoding.text.small_tokenizers import byte_level
from tests.backend.refusals import refused_request as refused
from varlen.decoding.grammar.grammars import _key
from varlen.errors import QueueFullError
from varlen.sandbox.limits import SandboxLimits


def regex(text):
    return json.dumps({"regex": text})


def test_compiled_grammars_are_ended_when_they_have_too_much_memory_and_compiled_again():
    server = Server(byte_level(), max_bytes=20_000_000)
    for index in range(20):
        server.grammars.check(regex(f"x{index}{{1,300}}"))

    use = server.grammars.use()
    assert 0 < use.held_bytes <= 20_000_000
    assert use.started == 20
    assert use.evictions == 20 - use.grammars > 0
    sequence = sequence_of(1, 2, grammar=regex("x0{1,300}"), max_tokens=300)
    [[text, _]] = server.answers([sequence])
    assert re.fullmatch("x0*", text)
    assert server.grammars.use().started == 21


def test_only_some_grammars_keep_their_processes_without_an_answer():
    server = Server(byte_level())
    for index in range(20):
        server.grammars.check(regex(f"x{index}"))
    used = []
    for index in range(18):
        server.grammars.check(regex(f"y{index}"))
        used.append(server.grammars.matcher(regex(f"y{index}")))
        used[-1].advance([1], 1)

    server.grammars.check(regex("z"))

    # answers in progress keep their grammars
    assert server.grammars.use().grammars == 16 + 18
    assert not any(each._grammar.error for each in used)


def test_a_grammar_that_fits_beside_none_in_use_is_refused_for_now():
    server = Server(byte_level(), max_bytes=1)

    with pytest.raises(QueueFullError, match="more than 1 bytes of memory; try again later"):
        server.grammars.check(regex("a"))
    assert server.grammars.use().grammars == 0


COSTLY = {
    "multiples": {
        "json": {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}
    },
    "patterns": {
        "json": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(1, 30)]}
    },
    "counts": {"regex": "(a{0000000001000}){ 1000 }"},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_grammar_that_takes_too_long_is_refused_and_remembered(name):
    # each takes more than ten times as long on the fastest processors
    server = Server(byte_level(), limits=SandboxLimits(0.1, 1 << 28))

    for _ in range(3):
        with refused("the grammar takes more than 0.1 s of processor time"):
            server.grammars.check(json.dumps(COSTLY[name]))
    assert server.grammars.use().started == 1
    server.grammars.check(regex("a"))


def test_a_grammar_that_takes_too_much_memory_is_refused():
    server = Server(byte_level(), limits=SandboxLimits(60, 1 << 23))
    text = "".join(f"{index} " for index in range(12_000))

    with refused("the grammar takes more than 8388608 bytes of memory"):
        server.grammars.check(json.dumps({"choice": [text]}))


def process_of(server, grammar):
    """Return the process id of a grammar, once it has started."""
    found = server.grammars._grammars[_key(grammar)]
    assert found.await_start(60)
    return found._process._pid


def test_an_answer_whose_masks_take_too_long_fails_and_the_others_do_not():
    server = Server(byte_level(), limits=SandboxLimits(60, 1 << 28))
    costly = server.sequence({"regex": "[ab]{1,9}c"}, seed=1)
    other = server.sequence({"choice": CHOICES}, seed=1)
    process = process_of(server, costly.generation.grammar)
    # its first mask is asked for and cannot come before the time of the process is up
    os.kill(process, signal.SIGSTOP)
    [token] = sample(server.sampler, server.model.logits([costly]), [costly])
    assert token.is_pending
    os.kill(process, signal.SIGPROF)
    os.kill(process, signal.SIGCONT)

    (_, error), (text, reason) = server.answers([costly, other])

    assert "more than 60 s of processor time" in str(error)
    assert text in CHOICES
    assert reason == "stop"


def await_background(server):
    done = Event()
    server.grammars._background.run(done.set)
    assert done.wait(60)


def test_the_process_of_a_grammar_ends_when_its_requests_have_gone():
    server = Server(byte_level())
    grammar = json.dumps(COSTLY["counts"])
    hold = server.grammars.hold(grammar)
    hold.compile(wait_seconds=0)
    process = process_of(server, grammar)
    # it cannot be done before the request has gone
    os.kill(process, signal.SIGSTOP)

    hold.release()
    await_background(server)

    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert server.grammars.use().grammars == 0


def test_a_grammar_whose_idle_process_was_killed_is_compiled_for_the_next_answer():
    server = Server(byte_level())
    sequence = server.sequence({"choice": CHOICES}, seed=1)
    grammar = sequence.generation.grammar
    [compiled] = server.grammars._grammars.values()
    os.kill(process_of(server, grammar), signal.SIGKILL)
    # its end has come when the descriptor becomes readable
    wait([compiled.fileno()], 60)

    assert not server.grammars.hold(grammar).take()
    [[text, _]] = server.answers([sequence])

    assert text in CHOICES
    assert server.grammars.use().started == 2


def test_the_sandbox_starts_again_after_its_host_was_killed():
    server = Server(byte_level())
    server.grammars.check(regex("a"))
    host = server.grammars._sandbox._host._process
    os.kill(host.pid, signal.SIGKILL)
    host.wait(60)

    sequence = server.sequence({"choice": CHOICES}, seed=1)

    [[text, _]] = server.answers([sequence])
    assert text in CHOICES


def test_all_processes_end_with_the_sandbox():
    server = Server(byte_level())
    server.grammars.check(regex("a"))
    host = server.grammars._sandbox._host._process
    [grammar] = server.grammars._grammars.values()

    server.grammars._sandbox.close()

    assert host.poll() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(grammar._process._pid, 0)


def test_answers_that_ended_are_released_when_another_begins():
    server = Server(byte_level())
    for _ in range(3):
        server.answers([server.sequence({"choice": ["a"]}, seed=1)])
    [grammar] = server.grammars._grammars.values()
    # a request and its sequences refer to each other; the engine breaks that cycle, and nothing does here
    gc.collect()

    server.answers([server.sequence({"choice": ["a"]}, seed=1)])

    # numbered from 1; the last one waits for the next
    assert grammar._answers == {4}
