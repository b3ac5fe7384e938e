"""Grammars whose processes are fakes that do what a test says."""

import json
from threading import Event

from varlen.decoding.grammar.grammars import Grammars, _key
from varlen.sandbox.frames import COMPILED, HEAD, MEMORY

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


class GrammarBench:
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

    def read(self, name):
        """Read what the process of a grammar says, and await what follows."""
        self.grammars._grammars[_key(grammar(name))].receive()
        self.await_background()

    def compiled(self, name, num_bytes=1):
        """Let a request ask for a grammar, which compiles."""
        hold, process = self.ask(name)
        process.has_compiled(num_bytes)
        assert hold.compile(wait_seconds=0)
        return hold, process


def grammar(name):
    return json.dumps({"regex": str(name)})
