"""Requests with a grammar: they wait for it, and hold it until they are answered."""

import time
from collections.abc import Callable
from dataclasses import replace

from varlen.decoding.grammar.grammars import GrammarHold
from varlen.intake.pool import TokenizerPool
from varlen.request.draft import Draft, TokenizationTask
from varlen.request.request import Output, Reply, Request


def submit_with_grammar(
    request: Request,
    reply: Reply,
    hold: GrammarHold,
    queue: TokenizerPool,
    submit: Callable[[Request, Reply], None],
) -> None:
    """Submit a request, now or once its grammar is compiled.

    Args:
        hold: grammar of the request; it is released when the request is answered.
        queue: requests that wait for their grammar.
        submit: `Engine.submit`.

    Raises:
        VarlenError: the request is not admitted; the caller answers it.
    """
    holding = _HoldingReply(reply, hold)
    try:
        if hold.take():
            submit(request, holding)
            return
        arrival = request.arrived(time.monotonic())
        admitted = replace(request, arrival=arrival)
        draft = Draft((_compile_task(hold),), request.options)
        queue.submit(draft, holding, lambda _: submit(admitted, holding), arrival=arrival)
    except BaseException:
        hold.release()
        raise


class _HoldingReply:
    """The reply of a request that holds its grammar until it is answered."""

    def __init__(self, reply: Reply, hold: GrammarHold) -> None:
        self._reply = reply
        self._hold = hold

    def is_cancelled(self) -> bool:
        return self._reply.is_cancelled()

    def send(self, row: int, output: Output) -> None:
        self._reply.send(row, output)

    def finish(self) -> None:
        self._hold.release()
        self._reply.finish()

    def fail(self, error: Exception) -> None:
        self._hold.release()
        self._reply.fail(error)


def _compile_task(hold: GrammarHold) -> TokenizationTask:
    """Return the task that compiles the grammar of a request."""

    def is_compiled(seconds: float) -> bool:
        return hold.compile(wait_seconds=seconds)

    return TokenizationTask(hold.num_characters, lambda: (), is_compiled)
