"""Small requests in a process of their own: no thread of the campaign delays them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection

from varlen_client import Client, RetryPolicy, VarlenClientError

from .endings import TIMEOUT_SECONDS
from .known import GREEDY
from .models import DECODER
from .report import Report
from .target import Target

_PATIENCE_SECONDS = 2 * TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True)
class Waits:
    """Times of small requests that came one after another.

    Attributes:
        seconds: time of each request.
        problems: requests without the right answer, and why.
    """

    seconds: list[float]
    problems: list[str]


class SmallRequests:
    """A process that sends requests of one token while it is told to."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @contextmanager
    def sent(self, report: Report, when: str) -> Iterator[None]:
        """Send requests during a `with`; note their median and longest time.

        Args:
            report: gets the times, and requests that are not answered right.
            when: names the times, such as "alone".
        """
        self._connection.send("begin")
        try:
            yield
        finally:
            self._connection.send("end")
            waits = self._receive()
        for problem in waits.problems:
            report.ledger.report(f"a small request {when}: {problem}")
        ordered = sorted(waits.seconds)
        for name, seconds in (("median", ordered[len(ordered) // 2]), ("longest", ordered[-1])):
            report.notes[f"ms of a token {when}, {name}"] = round(1000 * seconds)

    def _receive(self) -> Waits:
        if not self._connection.poll(_PATIENCE_SECONDS):
            raise TimeoutError(f"small requests take more than {_PATIENCE_SECONDS:g} s")
        waits: Waits = self._connection.recv()
        return waits


@contextmanager
def small_requests(target: Target) -> Iterator[SmallRequests]:
    """Yield a process that sends small requests to the decoder of a server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, target.server.grpc_url, target.known.continuations)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        yield SmallRequests(ours)
    finally:
        # it ends with its connection
        ours.close()
        process.join(TIMEOUT_SECONDS)
        process.kill()


def _serve(connection: Connection, url: str, answers: Mapping[str, tuple[int, ...]]) -> None:
    """Send requests between each pair of orders, and answer with their times."""
    prompts = cycle(answers)
    with Client(url, DECODER, retry=RetryPolicy(max_retries=0), watch_seconds=0) as client:
        # connects, and is not counted
        _problem(client, next(prompts), ())
        while _has_come(connection):
            waits = Waits([], [])
            while not waits.seconds or not connection.poll():
                prompt = next(prompts)
                began = time.monotonic()
                problem = _problem(client, prompt, answers[prompt][:1])
                waits.seconds.append(time.monotonic() - began)
                if problem:
                    waits.problems.append(problem)
            connection.recv()
            connection.send(waits)


def _has_come(connection: Connection) -> bool:
    """Wait for an order; return whether one has come before the end of the connection."""
    try:
        connection.recv()
    except EOFError:
        return False
    return True


def _problem(client: Client, prompt: str, expected: tuple[int, ...]) -> str:
    """Return what is wrong with the answer to a prompt; empty if it is right."""
    try:
        answer = client.generate(prompt, max_tokens=1, timeout=TIMEOUT_SECONDS, **GREEDY)
    except VarlenClientError as error:
        return f"{type(error).__name__}: {error}"
    return "" if answer.token_ids == expected else "the answer is another one"
